"""How long a sample takes to decode, by its header alone and without a decoder.

The learner refuses images by `decode_work`. The receiver charges producers by `decode_cost`. Few
bytes that take long to decode then count like the many bytes of other images.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

MOST_SCANS = 16
"""Scans of a JPEG of `max_pixels`, and as many more as it has fewer pixels: encoders write a dozen,
each takes the decoder as long as reading all pixels, and may be 76 bytes."""

FREE_WORK = 1 << 20
"""Pixels that any image may have, however few its bytes are."""
WORK_PER_BYTE = 512
"""Further pixels for each byte. It bounds how long the learner decodes a number of bytes. Every
baseline JPEG and every 8-bit RGB PNG stays below it: their formats need a byte for 256 pixels, and
for 344."""

WORK_PER_CHARGED_BYTE = 16
"""Pixels that cost as much as one byte. Photos have fewer pixels a byte, and cost their bytes."""

SOS = b"\xff\xda"  # begins a scan of a JPEG
_SCAN_BYTES = 10  # of the shortest marker of a scan
_MARKER = re.compile(rb"\xff[^\x00\xff]")
_ALONE = {0x01, *range(0xD0, 0xD9)}  # markers that no length follows
_SOF = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}  # markers that give the size of a JPEG
_MOST_PARTS = 1000  # parts of a header; a colour profile may take 255
_UNKNOWN = 1 << 62  # pixels of a header of more parts
_MARKS = 1000

View = bytes | memoryview


def decode_work(pixels: int, scans: int | None = None) -> int:
    """Return the pixels of a PNG or WebP that take as long to decode.

    Args:
        pixels: width times height.
        scans: of a JPEG in grey or colour; None: another image.
    """
    return pixels if scans is None else pixels * max(1, scans) // MOST_SCANS


def most_work(size: int) -> int:
    """Return the most work that the learner spends on an image of `size` bytes."""
    return max(FREE_WORK, WORK_PER_BYTE * size)


def scans_of(data: View) -> int:
    """How many scans a JPEG's markers begin; those of pictures within its segments do not count."""
    scans, at = 0, 2  # behind SOI
    while found := _MARKER.search(data, at):
        at = found.end()
        if found[0][-1] == 0xD9:  # EOI
            break
        scans += found[0][-1] == SOS[-1]
        if found[0][-1] not in _ALONE:
            at += int.from_bytes(data[at : at + 2], "big")
    return scans


def decode_cost(codec: str, payload: View) -> int:
    """Return the bytes that a sample counts for: its own, or more if it takes long to decode.

    Never raises. A sample costs its bytes if its header cannot be read, or if the learner refuses
    it by its header. The time is bounded by the number of bytes, and short for sound images.
    """
    size = len(payload)
    if codec not in _WORK:
        return size
    most = most_work(size)
    work = _WORK[codec](payload)
    return max(size, min(work, most) // WORK_PER_CHARGED_BYTE)


def extra_cost(rows: Iterable[Mapping[str, Any]], payload: View) -> int:
    """Return the cost of a packet's samples beyond their bytes.

    Args:
        rows: the samples' maps in the packet's header, checked.
        payload: the packet's.
    """
    extra, at = 0, 0
    for row in rows:
        size = row["size"]
        if row["codec"] in _WORK:
            extra += decode_cost(row["codec"], payload[at : at + size]) - size
        at += size
    return extra


def _jpeg_work(data: View) -> int:
    """Scans are counted by their bytes alone, which is quick and never too few."""
    if data[:2] != b"\xff\xd8":
        return 0
    at = 2
    for _ in range(_MOST_PARTS):
        found = _MARKER.search(data, at)
        if found is None or found[0][-1] in (0xD9, SOS[-1]):
            return 0  # no size
        at, kind = found.end(), found[0][-1]
        if kind in _SOF:
            break
        if kind not in _ALONE:
            at += int.from_bytes(data[at : at + 2], "big")
    else:
        return _UNKNOWN
    height, width = (int.from_bytes(data[at + n : at + n + 2], "big") for n in (3, 5))
    pixels, size = width * height, len(data)
    if size < at + 8:
        return 0
    if data[at + 7] not in (1, 3):  # Pillow decodes CMYK in full
        return max(pixels, decode_work(pixels, _count_scans(data)))
    if decode_work(pixels, size // _SCAN_BYTES) <= WORK_PER_CHARGED_BYTE * size:
        return 0  # small: it costs its bytes, however many scans it has
    return decode_work(pixels, _count_scans(data))


def _count_scans(data: View) -> int:
    """Return how often SOS stands in the bytes. It is several times as quick as bytes.count."""
    byte_N = np.frombuffer(data, np.uint8)
    return int(np.count_nonzero((byte_N[:-1] == SOS[0]) & (byte_N[1:] == SOS[1])))


def _png_work(data: View) -> int:
    """The last IHDR before the pixels counts, as Pillow reads it."""
    if data[:8] != b"\x89PNG\r\n\x1a\n":
        return 0
    at, work = 8, 0
    for _ in range(_MOST_PARTS):
        kind = data[at + 4 : at + 8]
        if kind == b"IHDR" and len(data) >= at + 16:
            width, height = (int.from_bytes(data[at + n : at + n + 4], "big") for n in (8, 12))
            work = decode_work(width * height)
        elif kind == b"IDAT" or len(kind) < 4:
            return _accepted(work, data)
        at += 12 + int.from_bytes(data[at : at + 4], "big")
    return _UNKNOWN


def _webp_work(data: View) -> int:
    if data[:4] != b"RIFF" or data[8:12] != b"WEBP" or len(data) < 30:
        return 0
    kind = bytes(data[12:16])
    if kind == b"VP8X":
        sides = [int.from_bytes(data[n : n + 3], "little") + 1 for n in (24, 27)]
    elif kind == b"VP8 ":
        sides = [int.from_bytes(data[n : n + 2], "little") & 0x3FFF for n in (26, 28)]
    elif kind == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        sides = [(bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1]
    else:
        return 0
    return _accepted(decode_work(sides[0] * sides[1]), data)


def _accepted(work: int, data: View) -> int:
    """Work that the learner refuses by the header takes it no time."""
    return work if work <= most_work(len(data)) else 0


_WORK = {"jpeg": _jpeg_work, "png": _png_work, "webp": _webp_work}


class UnreadCost:
    """The cost beyond their bytes of journal records that the learner has not read.

    Neighbouring records share a mark, and count until the last of them is read. After a restart of
    the receiver the records that were there before count by their bytes.

    Attributes:
        waiting: the cost of all records that are not read.
        most: cost above which the receiver takes no more. A mark covers a thousandth of it, so that
            there are some thousand marks.
    """

    def __init__(self) -> None:
        self.waiting = self.most = 0
        self._marks: deque[tuple[int, int]] = deque()  # the last record of each mark, and its cost

    def add(self, last: int, cost: int) -> None:
        """Add the cost of new records, up to the position `last`."""
        if not cost:
            return
        self.waiting += cost
        if self._marks and self._marks[-1][1] + cost <= self.most // _MARKS:
            cost += self._marks.pop()[1]
        self._marks.append((last, cost))

    def read(self, position: int) -> None:
        """Leave out the records before `position`, which the learner has read."""
        while self._marks and self._marks[0][0] < position:
            self.waiting -= self._marks.popleft()[1]
