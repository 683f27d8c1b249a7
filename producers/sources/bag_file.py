"""A reader of ROS 1 bags (wiki.ros.org/Bags/Format/2.0), by the index or in file order."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from stream_ssl.producers.sources.base import BrokenFileError
from stream_ssl.producers.sources.chunked import (
    MAX_BYTES,
    BadRecord,
    ChunkedFile,
    ChunkPlace,
    Stored,
    check_count,
    disjoint,
    prefixed,
    unpacked,
)
from stream_ssl.producers.sources.robot_messages import decode

MAGIC = b"#ROSBAG V2.0\n"
MAX_HEADER = 1 << 20  # bytes of a record's header or of a connection's definition
MESSAGE, BAG, CHUNK, CHUNK_INFO, CONNECTION = 2, 3, 5, 6, 7

Header = dict[str, bytes]


@dataclass(frozen=True, slots=True)
class BagTopic:
    """A topic of a bag."""

    topic: str
    kind: str  # the type, such as sensor_msgs/msg/Image
    definition: str


class BagFile(ChunkedFile):
    """The messages in a ROS 1 bag whose connections are wanted; see `ChunkedFile`."""

    magic, kind = MAGIC, "ROS 1 bags"

    def _forget(self) -> None:
        self.connections: dict[int, BagTopic] = {}

    def _records(self, at: int, end: int) -> Iterator[tuple[Header, int, int]]:
        """Yield (header, offset of the data, size of the data) of each record."""
        while at < end and not self._stopped.is_set():
            head, data_at = self._length(at, end)
            header = header_of(self._read(at + 4, head))
            size, _ = self._length(data_at, end, MAX_BYTES)
            yield header, data_at + 4, size
            at = data_at + 4 + size

    def _record_at(self, at: int) -> tuple[Header, int, int]:
        """Return (header, offset of the data, size of the data) of the record at an offset."""
        found = next(self._records(at, self._size), None)
        if found is None:
            raise BrokenFileError(f"it ends at byte {at}, before the next record")
        return found

    def _length(self, at: int, end: int, most: int = MAX_HEADER) -> tuple[int, int]:
        """Return the length prefix at an offset, and the offset where its content ends."""
        raw = self._read(at, 4)
        size = int.from_bytes(raw, "little")
        if len(raw) < 4 or size > end - at - 4:
            raise BrokenFileError(f"no whole record stands at byte {at}")
        if size > most:
            raise BrokenFileError(f"{size} bytes in one record; at most {most} are read")
        return size, at + 4 + size

    def _index(self) -> dict[ChunkPlace, list[int]]:
        header, at, size = self._record_at(len(MAGIC))
        begin, connections, chunks = (
            number(header, name) for name in ("index_pos", "conn_count", "chunk_count")
        )
        if operation(header) != BAG or not at + size <= begin <= self._size:
            raise BrokenFileError(f"its index should begin at byte {begin}")
        found: dict[ChunkPlace, list[int]] = {}
        for header, at, size in self._records(begin, self._size):
            if operation(header) == CONNECTION:
                self._connect(header, self._read(at, size))
            elif operation(header) == CHUNK_INFO:
                times = log_time(header, "start_time"), log_time(header, "end_time")
                counts = struct.iter_unpack("<II", self._read(at, size))
                found[ChunkPlace(number(header, "chunk_pos"), *times)] = [one for one, _ in counts]
        if (len(self.connections), len(found)) != (connections, chunks):
            raise BrokenFileError(
                f"its index has {len(self.connections)} of {connections} connections and "
                f"{len(found)} of {chunks} chunks"
            )
        ordered = disjoint(found, len(MAGIC), begin)
        # A chunk without connections has no messages.
        return {chunk: found[chunk] for chunk in ordered if found[chunk]}

    def _connect(self, header: Header, data: bytes) -> None:
        if len(data) > MAX_HEADER:
            raise BrokenFileError(f"a connection of {len(data)} bytes")
        fields = header_of(data)
        self.connections[number(header, "conn")] = BagTopic(
            header["topic"].decode(),
            "/msg/".join(fields["type"].decode().split("/")),  # the spelling of types in ROS 2
            fields["message_definition"].decode(errors="replace"),
        )
        self._known.pop(number(header, "conn"), None)

    def _decide(self, channel: int) -> bool:
        connection = self.connections.get(channel)
        if connection is None:
            self._drop(f"messages of connection {channel}", "the bag does not define it")
        return connection is not None and self._wanted(connection.topic, connection.kind)

    def definition_of(self, channel: int) -> tuple[str, str, Callable[[bytes], Any]]:
        """Return topic, type and decoder of a connection; see `ChunkedFile`."""
        found = self.connections[channel]
        return found.topic, found.kind, partial(decode, found.kind, found.definition, True)

    def _indexed(self, chunk: ChunkPlace) -> Iterator[Stored]:
        if self._stopped.is_set():
            return
        header, at, size = self._record_at(chunk.at)
        if operation(header) != CHUNK:
            raise BrokenFileError("another record stands there")
        yield from self._chunk(header, at, size)

    def _chunk(self, header: Header, at: int, size: int) -> Iterator[Stored]:
        """Yield the wanted messages of a chunk, and store its connections.

        Raises:
            BrokenFileError, ValueError, KeyError, struct.error: the chunk's rest cannot be read.
        """
        plain = unpacked(
            header["compression"].decode(), self._read(at, size), number(header, "size")
        )
        begin, count = 0, 0
        while begin < len(plain) and not self._stopped.is_set():
            count += 1
            check_count(count, size)
            inner, begin = prefixed(plain, begin)
            data, begin = prefixed(plain, begin)
            yield from self._record(header_of(inner), data)

    def _record(self, header: Header, data: bytes) -> Iterator[Stored]:
        if operation(header) == CONNECTION:
            self._connect(header, data)
        elif operation(header) == MESSAGE and self._is_wanted(number(header, "conn")):
            yield Stored(number(header, "conn"), log_time(header, "time"), data)

    def _in_file_order(self) -> Iterator[Stored]:
        for header, at, size in self._records(len(MAGIC), self._size):
            try:
                if operation(header) == CHUNK:
                    yield from self._chunk(header, at, size)
                elif operation(header) in (CONNECTION, MESSAGE):
                    yield from self._record(header, self._read(at, size))
            except BadRecord as error:
                self._drop(f"the record at byte {at}", error)


def header_of(data: bytes) -> Header:
    """Return the fields of a record's header, by name.

    Raises:
        BrokenFileError: the bytes are not a header.
    """
    fields: Header = {}
    at = 0
    while at < len(data):
        field, at = prefixed(data, at)
        name, equals, value = field.partition(b"=")
        if not equals:
            raise BrokenFileError("a header's field without a name")
        fields[name.decode(errors="replace")] = value
    return fields


def number(header: Header, name: str) -> int:
    """Return an integer field of a header."""
    return int.from_bytes(header[name], "little")


def operation(header: Header) -> int:
    """Return the record type in a header."""
    return number(header, "op")


def log_time(header: Header, name: str) -> int:
    """Return a time field of a header, in nanoseconds."""
    seconds, nanoseconds = struct.unpack("<II", header[name])
    return int(seconds * 1_000_000_000 + nanoseconds)
