"""Detects truncated media files by the sizes that the files declare.

FFmpeg stops at the last byte of a truncated file and reports no error.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import IO

EBML, SEGMENT, CLUSTER = 0x1A45DFA3, 0x18538067, 0x1F43B675  # ids of Matroska elements
BOXES = frozenset(b"ftyp moov mdat wide free skip styp moof mfra sidx uuid meta pdin udta".split())
"""The top-level boxes of MP4. Cameras append other bytes after these boxes."""
MAX_ID, MAX_SIZE = 4, 8  # bytes of the id and of the size of a Matroska element


def missing_bytes(path: Path) -> int:
    """Return how many bytes the file lacks; 0 if it is complete or its format is not supported.

    The supported formats are MP4 and QuickTime, Matroska and WebM, and AVI and other RIFF files. In
    a Matroska file, everything after the last valid element counts as missing, such as the zeros
    that a power failure leaves.

    Raises:
        OSError: the file cannot be read.
    """
    size = path.stat().st_size
    with path.open("rb", buffering=0) as file:
        head = file.read(8)
        if head[4:8] in BOXES:
            ends = boxes(file, size)
        elif head[:4] == b"RIFF":
            ends = riffs(file, size)
        elif head[:4] == EBML.to_bytes(4, "big"):
            ends = elements(file, size)
        else:
            return 0
        lost = max((end - size for end in ends), default=0)
        return max(0, lost)  # other bytes may follow the last part


def boxes(file: IO[bytes], size: int) -> Iterator[int]:
    """Yield the end of each top-level box of MP4, in bytes."""
    at = 0
    while at + 8 <= size:
        file.seek(at)
        head = file.read(16)
        length = int.from_bytes(head[:4], "big")
        if length == 1:
            length = int.from_bytes(head[8:], "big")
        if length < 8 or head[4:8] not in BOXES:  # a length of 0 means up to the end of the file
            return
        at += length
        yield at


def riffs(file: IO[bytes], size: int) -> Iterator[int]:
    """Yield the end of each RIFF chunk, in bytes. Large AVI files have several chunks."""
    at = 0
    while at + 8 <= size:
        file.seek(at)
        head = file.read(8)
        length = int.from_bytes(head[4:], "little")
        if head[:4] != b"RIFF" or length in (0, 0xFFFFFFFF):  # the recorder did not close the file
            return
        at += 8 + length
        yield at
        at += length % 2


def elements(file: IO[bytes], size: int) -> Iterator[int]:
    """Yield the end of each Matroska element, in bytes, including the blocks of clusters."""
    at = 0
    while at < size:
        file.seek(at)
        head = file.read(MAX_ID + MAX_SIZE)
        id_bytes = 9 - head[0].bit_length()
        size_bytes = 9 - head[id_bytes].bit_length() if len(head) > id_bytes else 0
        start = at + id_bytes + size_bytes
        if id_bytes > MAX_ID or not 1 <= size_bytes <= MAX_SIZE or start > size:
            yield size + max(1, size - at)
            return
        length = int.from_bytes(head[id_bytes : id_bytes + size_bytes], "big")
        length &= (1 << 7 * size_bytes) - 1
        unknown = length == (1 << 7 * size_bytes) - 1  # live streams declare no size
        at = start + length
        if not unknown:
            yield at
        if unknown or int.from_bytes(head[:id_bytes], "big") in (SEGMENT, CLUSTER):
            at = start
