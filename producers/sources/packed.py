"""Reads files that are packed with gzip, bzip2 or xz, within limits."""

from __future__ import annotations

import bz2
import lzma
import zlib
from collections.abc import Callable, Iterator
from typing import IO, Any

from stream_ssl.producers.sources.base import BrokenFileError

CHUNK = 2**18  # bytes
MAX_RATIO, SLACK = 100, 2**26  # see `most_unpacked`
MAX_DICTIONARY = 2**27  # bytes of memory for unpacking xz; `xz -9` needs 2**26
PACKED_DAMAGE = (BrokenFileError, EOFError, OSError, zlib.error, lzma.LZMAError, ValueError)
"""The errors that reading a damaged packed file raises."""


class Gunzip:
    """A gzip decompressor with the interface of the decompressors in bz2 and lzma."""

    def __init__(self) -> None:
        self._zlib, self._rest = zlib.decompressobj(31), b""

    @property
    def eof(self) -> bool:
        return self._zlib.eof

    @property
    def unused_data(self) -> bytes:
        return self._zlib.unused_data

    @property
    def needs_input(self) -> bool:
        return not self._rest

    def decompress(self, data: bytes, max_length: int) -> bytes:
        part = self._zlib.decompress(self._rest + data, max_length)
        self._rest = b"" if self._zlib.eof else self._zlib.unconsumed_tail
        return part


GZIP = b"\x1f\x8b"
PACKED: dict[bytes, Callable[[], Any]] = {
    GZIP: Gunzip,
    b"BZh": bz2.BZ2Decompressor,
    b"\xfd7zXZ\0": lambda: lzma.LZMADecompressor(memlimit=MAX_DICTIONARY),
}
UNREAD = {
    b"\x28\xb5\x2f\xfd": "packed by Zstandard; unpack it with `zstd -d`, or pack it with gzip",
    b"\x04\x22\x4d\x18": "packed by LZ4; unpack it with `lz4 -d`, or pack it with gzip",
    b"PK\x03\x04": "a ZIP archive; pack its files with tar",
    b"7z\xbc\xaf": "a 7z archive; pack its files with tar",
}


def most_unpacked(size: int) -> int:
    """Return the most bytes to which `size` packed bytes may unpack."""
    return MAX_RATIO * size + SLACK


def unpacked(file: IO[bytes], magic: bytes, stopped: Callable[[], bool]) -> Iterator[bytes]:
    """Yield the content of a packed file in parts of at most CHUNK bytes.

    Raises:
        BrokenFileError: the content exceeds MAX_RATIO, or other bytes follow it.
        EOFError: the file is truncated.
    """
    unpacker, total = PACKED[magic](), 0
    while not stopped():
        packed = b""
        if unpacker.eof:  # another packed stream may follow after padding
            packed = unpacker.unused_data.lstrip(b"\0")
            while not packed:
                if not (more := file.read(CHUNK)):
                    return
                packed = more.lstrip(b"\0")
            if not packed.startswith(magic[: len(packed)]):
                raise BrokenFileError("other bytes follow the packed data")
            unpacker = PACKED[magic]()
        elif unpacker.needs_input:
            packed = file.read(CHUNK)
            if not packed:
                raise EOFError("the packed data is cut off")
        part = unpacker.decompress(packed, CHUNK)
        total += len(part)
        if total > most_unpacked(file.tell()):
            raise BrokenFileError(
                f"the file unpacks to more than {MAX_RATIO} times its size; pack it uncompressed"
            )
        if part:
            yield part
