"""A reader of tar shards that can start at any header and trusts no size that a shard claims."""

from __future__ import annotations

import os
import posixpath
import re
import tarfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from stream_ssl.producers.sources.base import BrokenFileError
from stream_ssl.producers.sources.image_files import check_pulled
from stream_ssl.producers.sources.packed import (
    PACKED,
    PACKED_DAMAGE,
    UNREAD,
    most_unpacked,
    unpacked,
)

BLOCK = tarfile.BLOCKSIZE
MAX_HEADER = 2**20  # bytes of a pax header or a long name; file systems allow names of a few KiB
MAX_PADDING = 2**24  # zero bytes between two archives
DAMAGE = (*PACKED_DAMAGE, tarfile.TarError)
EXTRA = (
    *(tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE),
    *(tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK),
)
"""Types of headers that describe the next member."""
WITHOUT_CONTENT = (
    *(tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.DIRTYPE),
    *(tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE),
)
CHECKSUM = re.compile(rb" *[0-7]{1,7}[\0 ]*")
RECORD = re.compile(rb"([0-9]{1,9}) ([^=]+)=")


Lost = tuple[str, str]
"""(reason, sentence) that explain why a member cannot be read."""


@dataclass(frozen=True, slots=True)
class ArchiveMember:
    """A file in a shard, the end of an archive, or a place that cannot be read."""

    start: int  # offset of the header, in bytes of the unpacked shard
    name: str  # "" for an item that is not a file
    data: bytes | None = None  # None if it is not wanted or cannot be read
    lost: Lost | None = None


def split_key(name: str) -> tuple[str, str]:
    """Return the key and the lower-case extension of a member.

    The extension begins at the first "." of the name's last part.
    """
    folder, base = posixpath.split(name)
    key, dot, extension = base.partition(".")
    return posixpath.join(folder, key), (dot + extension).lower()


class ArchiveStream:
    """A forward reader of the tar bytes in a shard, which unpacks them if necessary.

    Attributes:
        at: number of bytes that were read or skipped.
        most: upper bound of the total number of bytes. A member that claims more is damaged.

    Raises:
        BrokenFileError: the compression is not supported.
    """

    def __init__(self, file: IO[bytes], stopped: Callable[[], bool]) -> None:
        head, size = file.read(6), os.fstat(file.fileno()).st_size
        file.seek(0)
        for magic, what in UNREAD.items():
            if head.startswith(magic):
                raise BrokenFileError(what)
        packing = [magic for magic in PACKED if head.startswith(magic)]
        self.at, self._file, self._part = 0, file, memoryview(b"")
        self._parts = unpacked(file, packing[0], stopped) if packing else None
        self.most = most_unpacked(size) if packing else size

    def read(self, size: int) -> bytes:
        """Return the next `size` bytes, or fewer at the end."""
        data = self._file.read(size) if self._parts is None else b"".join(self._taken(size))
        self.at += len(data)
        return data

    def skip(self, size: int) -> None:
        """Skip the next `size` bytes, or all remaining bytes."""
        if self._parts is None:
            self._file.seek(self.at + size)
            self.at += size
        else:
            self.at += sum(map(len, self._taken(size)))

    def _taken(self, size: int) -> Iterator[memoryview]:
        assert self._parts is not None
        while size:
            if not self._part:
                self._part = memoryview(next(self._parts, b""))
                if not self._part:
                    return
            part, self._part = self._part[:size], self._part[size:]
            size -= len(part)
            yield part


def read_members(
    path: Path,
    start: int,
    limits: Mapping[str, int],
    stopped: Callable[[], bool] = lambda: False,
) -> Iterator[ArchiveMember]:
    """Yield the files of a shard, starting with the header at byte `start`.

    A member without a name marks the end of an archive or a place that cannot be read. Reading
    continues at the next header.

    Args:
        path: the shard.
        start: offset of a header, in bytes of the unpacked shard.
        limits: maximum size in bytes of each wanted extension; "*.png" stands for all longer
            extensions that end in .png. Only these files are read.
        stopped: returns True to stop reading.

    Raises:
        BrokenFileError: the shard cannot be read further. The message names the byte.
    """
    at = start
    try:
        check_pulled(path)
        with path.open("rb") as file:
            stream = ArchiveStream(file, stopped)
            stream.skip(start)
            for member in Members(stream, limits, stopped):
                at = member.start
                yield member
    except DAMAGE as error:
        raise BrokenFileError(f"unreadable from byte {at}: {error}") from error


class Members:
    """An iterator over the members of a stream; see `read_members`."""

    def __init__(
        self, stream: ArchiveStream, limits: Mapping[str, int], stopped: Callable[[], bool]
    ) -> None:
        self._stream, self._limits, self._stopped = stream, limits, stopped
        self._extra: dict[str, str] = {}  # fields of the next member from extra headers
        self._lost: Lost | None = None  # reason why the next member cannot be read
        self._zeros = 0  # consecutive zero bytes just read
        self._searching = False  # searching for a header after a damaged place

    def __iter__(self) -> Iterator[ArchiveMember]:
        begin = self._stream.at
        while not self._stopped():
            at = self._stream.at
            block = self._stream.read(BLOCK)
            if len(block) < BLOCK:
                whole = self._zeros or self._searching or (at == begin > 0 and not block)
                if not (whole or self._stopped()):
                    raise BrokenFileError(
                        f"no end mark at byte {at}: the shard is empty or cut off"
                    )
                yield ArchiveMember(at, "", lost=self._lost)
                return
            if not self._searching and not block.strip(b"\0"):
                if not self._zeros:
                    yield ArchiveMember(at, "", lost=self._lost)
                    self._extra, self._lost = {}, None
                self._zeros += BLOCK
                if self._zeros > MAX_PADDING:
                    raise BrokenFileError(f"more than {MAX_PADDING} zero bytes behind an archive")
            elif (info := header(block)) is not None:
                self._zeros, self._searching = 0, False
                yield from self._entry(at, info, block)
            elif at == 0:
                raise BrokenFileError("no header at byte 0: it is no tar archive")
            elif not self._searching:
                self._searching = True
                yield ArchiveMember(at, "", lost=("damaged", f"no header at byte {at}"))

    def _entry(self, at: int, info: tarfile.TarInfo, block: bytes) -> Iterator[ArchiveMember]:
        # A size in an extra header is that of the next file, and not of a further extra header.
        size = info.size if info.type in EXTRA else int(self._extra.get("size", info.size))
        if not 0 <= size <= self._stream.most - self._stream.at:
            self._searching = True
            self._lost = ("damaged", f"unreadable from byte {at}: {size} bytes do not follow")
            size = 0
        if info.type in EXTRA:
            if not self._searching:
                self._read_extra(at, info.type, size)
            return
        full_name = self._extra.get("path", "/")
        if block[156:157] == tarfile.AREGTYPE and not full_name.endswith("/"):
            info.type = tarfile.AREGTYPE  # only the part of its name in `block` ends with a slash
        if info.type in WITHOUT_CONTENT:
            size = 0
        if info.type == tarfile.GNUTYPE_SPARSE and block[482]:
            while not self._stopped() and self._stream.read(BLOCK)[504:505] not in (b"", b"\0"):
                pass  # skip further lists of holes
        name = self._extra.get("GNU.sparse.name") or self._extra.get("path") or info.name
        _, extension = split_key(name)
        limit = self._limits.get(
            extension, self._limits.get(f"*{posixpath.splitext(extension)[1]}")
        )
        data, left_out = None, None
        if limit is not None:
            left_out = self._lost or self._why_not(info, size, limit)
        try:
            if limit is not None and not left_out and info.isreg():
                data = self._stream.read(size)
                if len(data) < size:
                    raise BrokenFileError(f"the {size} bytes of {name!r:.80} are cut off")
            self._stream.skip(padded(size) - len(data or b""))
        except DAMAGE as error:
            yield ArchiveMember(
                at, name, lost=("damaged", str(error))
            )  # its name ends the sample before
            raise
        self._extra, self._lost = {}, None
        if info.isreg() or left_out:
            yield ArchiveMember(at, name, data, left_out)

    def _why_not(self, info: tarfile.TarInfo, size: int, limit: int) -> Lost | None:
        """Return why the content of a wanted member is not read, or None if it is read."""
        if info.islnk() or info.issym():
            remedy = "pack its content: tar --dereference --hard-dereference"
            return "link", f"a link to {info.linkname!r:.80}; {remedy}"
        if info.type == tarfile.GNUTYPE_SPARSE or any("GNU.sparse" in key for key in self._extra):
            return "sparse", "a file with holes; pack it without --sparse"
        if not (info.isreg() or info.isdir()):
            kind = info.type.decode("ascii", "backslashreplace")
            return "kind", f"a member of type {kind!r}, which is no plain file; pack it as one"
        if size > limit:
            return "too large", f"{size} bytes; at most {limit} are read"
        return None

    def _read_extra(self, at: int, kind: bytes, size: int) -> None:
        """Read a header that describes the next member."""
        if size > MAX_HEADER:
            what = f"its extra header at byte {at} has {size} bytes"
            self._lost = ("damaged", f"{what}; at most {MAX_HEADER} are read")
            self._stream.skip(padded(size))
            return
        body = self._stream.read(padded(size))[:size]
        if kind == tarfile.GNUTYPE_LONGNAME:
            self._extra["path"] = text(body.rstrip(b"\0"))
        elif kind in (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE):
            try:
                self._extra |= pax_records(body)
            except ValueError as error:
                self._lost = ("damaged", f"the pax header at byte {at}: {error}")


def header(block: bytes) -> tarfile.TarInfo | None:
    """Return the member header in a block of 512 bytes, or None if the block is not a header."""
    if not CHECKSUM.fullmatch(block[148:156]):  # a fast check for the many blocks of a damaged part
        return None
    try:
        return tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except (tarfile.HeaderError, ValueError):
        return None


def pax_records(body: bytes) -> dict[str, str]:
    """Return the records of a pax header, each of the form "LENGTH KEY=VALUE\\n".

    Raises:
        ValueError: the records are damaged.
    """
    found: dict[str, str] = {}
    at = 0
    while at < len(body) and body[at]:
        match = RECORD.match(body, at)
        end = at + int(match[1]) if match else 0
        if not match or not match.end() < end <= len(body):
            raise ValueError(f"no record at byte {at}")
        found[text(match[2])] = text(body[match.end() : end - 1])
        at = end
    if not found.get("size", "0").isdecimal() or len(found.get("size", "0")) > 20:
        raise ValueError(f"no size: {found.pop('size')!r:.40}")
    return found


def text(name: bytes) -> str:
    """Decode a name, which need not be UTF-8."""
    return name.decode("utf-8", "surrogateescape")


def padded(size: int) -> int:
    """Return the number of bytes that a content of `size` bytes occupies, in whole blocks."""
    return -(-size // BLOCK) * BLOCK
