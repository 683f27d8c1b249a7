"""A reader of the MCAP container (mcap.dev/spec), by its index or in file order."""

from __future__ import annotations

import contextlib
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from stream_ssl.producers.sources.base import BrokenFileError, own_fault
from stream_ssl.producers.sources.chunked import (
    MAX_BYTES,
    PIECE,
    BadRecord,
    ChunkedFile,
    ChunkPlace,
    Stored,
    check_count,
    disjoint,
    prefixed,
    unpacked,
)
from stream_ssl.producers.sources.robot_messages import Schema, decoder_of

MAGIC = b"\x89MCAP0\r\n"
FOOTER_BYTES = 9 + 20 + len(MAGIC)
NEVER = 1 << 64  # above any log time
RUN_BYTES = 1 << 24  # of messages outside of chunks that are ordered together
MAX_TEXT = 1 << 20  # bytes of a schema or channel
FOOTER, SCHEMA, CHANNEL, MESSAGE, CHUNK = 2, 3, 4, 5, 6
CHUNK_INDEX, STATISTICS, DATA_END = 8, 11, 15


@dataclass(frozen=True, slots=True)
class Channel:
    """A topic of a file."""

    id: int
    schema: int
    topic: str
    message_encoding: str


class McapFile(ChunkedFile):
    """The messages in an MCAP file whose channels are wanted; see `ChunkedFile`."""

    magic, kind = MAGIC, "MCAP files"

    def _forget(self) -> None:
        self.schemas: dict[int, Schema] = {}
        self.channels: dict[int, Channel] = {}
        self._decoders: dict[tuple[str, Schema], Callable[[bytes], Any] | ValueError] = {}

    def _records(self, at: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yield (opcode, offset of the content, size of the content) of each record."""
        while at < end and not self._stopped.is_set():
            head = self._read(at, 9)
            if len(head) < 9:
                raise BrokenFileError(f"it is cut off at byte {at + len(head)}")
            opcode, size = struct.unpack("<BQ", head)
            if opcode == 0 or size > end - at - 9:
                raise BrokenFileError(f"no whole record begins at byte {at}")
            yield opcode, at + 9, size
            at += 9 + size

    def _content(self, at: int, size: int) -> bytes:
        if size > MAX_BYTES:
            raise BrokenFileError(
                f"a record of {size} bytes at byte {at}; at most {MAX_BYTES} are read"
            )
        return self._read(at, size)

    def _summary(self) -> tuple[int, int]:
        """Return where the summary begins and ends; it begins at 0 if there is none."""
        footer_at = self._size - FOOTER_BYTES
        footer = self._read(max(0, footer_at), FOOTER_BYTES)
        if len(footer) < FOOTER_BYTES or footer[0] != FOOTER or not footer.endswith(MAGIC):
            raise BrokenFileError("it does not end as MCAP files do")
        begin, _, checksum = struct.unpack_from("<QQI", footer, 9)
        if begin > footer_at:
            raise BrokenFileError(f"its summary claims to begin at byte {begin}")
        if begin and checksum and checksum != self._checksum(begin, footer_at + 25):
            raise BrokenFileError("its summary has another checksum")
        return begin, footer_at

    def _index(self) -> dict[ChunkPlace, list[int]] | None:
        begin, footer_at = self._summary()
        if begin == 0:
            return None
        found: dict[ChunkPlace, list[int]] = {}
        ends = {}  # for each chunk, the end of the message indexes behind it
        counted: tuple[int, ...] | None = None
        for opcode, at, size in self._records(begin, footer_at):
            if opcode == CHUNK_INDEX:
                chunk, ids, indexes = chunk_index(self._content(at, size))
                found[chunk], ends[chunk] = ids, chunk.at + chunk.size + indexes
            elif opcode == STATISTICS:
                counted = struct.unpack_from("<QHIIII", self._content(at, size))
            else:
                self._note(opcode, at, size)
        if not found:
            return None
        chunks = disjoint(found, len(MAGIC), begin)
        if counted is not None and counted[5] != len(found):
            raise BrokenFileError(f"its index has {len(found)} of {counted[5]} chunks")
        gaps = zip(
            (len(MAGIC), *(ends[chunk] for chunk in chunks)),
            (*(chunk.at for chunk in chunks), begin),
            strict=True,
        )
        for gap in gaps:
            found.update(self._runs(*gap))
        used = {one for ids in found.values() for one in ids}

        def complete() -> bool:
            if any(one.schema and one.schema not in self.schemas for one in self.channels.values()):
                return False
            if counted is not None:
                return len(self.channels) >= counted[2]
            return all(found.values()) and used <= self.channels.keys()

        if not complete():
            self._learn(begin, complete)
        return found

    def _runs(self, begin: int, end: int) -> Iterator[tuple[ChunkPlace, list[int]]]:
        """Yield the places of messages outside of chunks, at most RUN_BYTES each, with channels."""
        start = done = begin
        first, last, ids = NEVER, 0, set[int]()
        try:
            for opcode, at, size in self._records(begin, end):
                if opcode == MESSAGE:
                    channel, _, log_time = struct.unpack("<HIQ", self._read(at, 14))
                    first, last = min(first, log_time), max(last, log_time)
                    ids.add(channel)
                else:
                    self._note(opcode, at, size)
                done = at + size
                if ids and (done - start > RUN_BYTES or done >= end):
                    yield ChunkPlace(start, first, last, done - start), list(ids)
                    start = done
                    first, last, ids = NEVER, 0, set()
        except BadRecord as error:
            self._drop(f"records outside of chunks from byte {done} on", error)
            if ids:
                yield ChunkPlace(start, first, last, done - start), list(ids)

    def _learn(self, end: int, complete: Callable[[], bool]) -> None:
        """Read channels and schemas that are missing from the summary, until all are known."""
        try:
            for opcode, at, size in self._records(len(MAGIC), end):
                if opcode == CHUNK:
                    with contextlib.suppress(*BadRecord):  # reported when its messages are read
                        for _ in self._chunk(at, size):
                            pass
                else:
                    self._note(opcode, at, size)
                if complete():
                    return
        except BadRecord as error:
            self._drop("channels from there on", error)

    def _note(self, opcode: int, at: int, size: int) -> None:
        """Store a schema or a channel, and ignore other records."""
        if opcode in (SCHEMA, CHANNEL):
            self._define(opcode, self._content(at, size))

    def _define(self, opcode: int, data: bytes) -> None:
        if len(data) > MAX_TEXT:
            raise BrokenFileError(f"a schema or channel of {len(data)} bytes")
        if opcode == SCHEMA:
            (number,) = struct.unpack_from("<H", data)
            name, at = text(data, 2)
            encoding, at = text(data, at)
            content, _ = prefixed(data, at)
            self.schemas[number] = Schema(number, name, encoding, content)
            self._known.clear()
        else:
            number, schema = struct.unpack_from("<HH", data)
            topic, at = text(data, 4)
            encoding, _ = text(data, at)
            self.channels[number] = Channel(number, schema, topic, encoding)
            self._known.pop(number, None)

    def _decide(self, channel: int) -> bool:
        found = self.channels.get(channel)
        if found is None:
            self._drop(f"messages of channel {channel}", "the file does not define the channel")
            return False
        schema = self.schemas.get(found.schema)
        if found.schema and schema is None:
            self._drop(f"messages of {found.topic}", "the file does not define their schema")
        return schema is not None and self._wanted(found.topic, schema.name)

    def definition_of(self, channel: int) -> tuple[str, str, Callable[[bytes], Any]]:
        """Return topic, type and decoder of a channel; see `ChunkedFile`."""
        found = self.channels[channel]
        schema = self.schemas[found.schema]
        return found.topic, schema.name, partial(self._decode, found.message_encoding, schema)

    def _decode(self, encoding: str, schema: Schema, data: bytes) -> Any:
        """Return a decoded message. A schema that cannot be read is read only once."""
        if (encoding, schema) not in self._decoders:
            try:
                self._decoders[encoding, schema] = decoder_of(encoding, schema)
            except Exception as error:  # a damaged schema can cause errors of any type
                if own_fault(error):
                    raise
                self._decoders[encoding, schema] = ValueError(f"{type(error).__name__}: {error}")
        if isinstance(made := self._decoders[encoding, schema], ValueError):
            raise made
        return made(data)

    def _indexed(self, chunk: ChunkPlace) -> Iterator[Stored]:
        for opcode, at, size in self._records(chunk.at, chunk.at + chunk.size):
            if opcode == CHUNK:
                yield from self._chunk(at, size)
            elif opcode == MESSAGE:
                yield from self._message(at, size)

    def _message(self, at: int, size: int) -> Iterator[Stored]:
        """Yield a message outside of chunks if it is wanted and can be read."""
        try:
            data = self._content(at, size)
            channel, _, log_time = struct.unpack_from("<HIQ", data)
        except BadRecord as error:
            self._drop(f"the message at byte {at - 9}", error)
            return
        if self._is_wanted(channel):
            yield Stored(channel, log_time, data[22:])

    def _chunk(self, at: int, size: int) -> Iterator[Stored]:
        """Yield the wanted messages of a chunk, and store its channels and schemas.

        Raises:
            BrokenFileError, ValueError, struct.error: the rest of the chunk cannot be read.
        """
        data = self._content(at, size)
        whole, checksum = struct.unpack_from("<QI", data, 16)
        compression, behind = text(data, 28)
        (length,) = struct.unpack_from("<Q", data, behind)
        packed = data[behind + 8 : behind + 8 + length]
        if len(packed) < length:
            raise BrokenFileError(f"it claims {length} bytes of data, and has {len(packed)}")
        plain = unpacked(compression, packed, whole)
        if checksum and checksum != zlib.crc32(plain):
            raise BrokenFileError("its data have another checksum")
        begin, count = 0, 0
        while begin < len(plain) and not self._stopped.is_set():
            count += 1
            check_count(count, len(packed))
            opcode, size = struct.unpack_from("<BQ", plain, begin)
            begin += 9
            if opcode == 0 or size > len(plain) - begin:
                raise BrokenFileError(f"no whole record begins at byte {begin - 9} of its data")
            if opcode in (SCHEMA, CHANNEL):
                self._define(opcode, plain[begin : begin + size])
            elif opcode == MESSAGE:
                channel, _, log_time = struct.unpack_from("<HIQ", plain, begin)
                if self._is_wanted(channel):
                    yield Stored(channel, log_time, plain[begin + 22 : begin + size])
            begin += size

    def _in_file_order(self) -> Iterator[Stored]:
        loose = False
        for opcode, at, size in self._records(len(MAGIC), self._size):
            if opcode == CHUNK:
                try:
                    yield from self._chunk(at, size)
                except BadRecord as error:
                    self._drop(f"the chunk at byte {at - 9}", error)
            elif opcode == MESSAGE:
                loose = True
                yield from self._message(at, size)
            elif opcode == DATA_END:
                (checksum,) = struct.unpack("<I", self._read(at, 4))
                if loose and checksum and checksum != self._checksum(0, at - 9):
                    self._drop("the checksum of all data", "it differs: some images may be wrong")
            elif opcode == FOOTER:
                return
            else:
                self._note(opcode, at, size)
        if not self._stopped.is_set():
            raise BrokenFileError("its end is missing")

    def _checksum(self, begin: int, end: int) -> int:
        checksum = 0
        for at in range(begin, end, PIECE):
            checksum = zlib.crc32(self._read(at, min(PIECE, end - at)), checksum)
        return checksum


def text(data: bytes, at: int) -> tuple[str, int]:
    """Return the text at an offset of a record, and the offset of its end."""
    raw, end = prefixed(data, at)
    return raw.decode(), end


def chunk_index(data: bytes) -> tuple[ChunkPlace, list[int], int]:
    """Return the place of a chunk, its channels, and the bytes of the message indexes behind it."""
    start, end, at, size = struct.unpack_from("<QQQQ", data)
    offsets, behind = prefixed(data, 32)
    ids = [channel for channel, _ in struct.iter_unpack("<HQ", offsets)]
    (indexes,) = struct.unpack_from("<Q", data, behind)
    return ChunkPlace(at, start, end, size), ids, indexes
