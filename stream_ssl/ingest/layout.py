"""How a record lies in a segment: a checked head, the producer's name, header and payload."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass, field
from typing import Any

import msgpack

from stream_ssl.wire import Position

PAGE = 4096  # bytes, LMDB's

# magic, CRC-32 of all of the head after it, position, bytes journalled up to and with this record,
# sequence, received, CRC-32 as on the wire, lengths of name, header and payload
_HEAD = struct.Struct(">4sIQQQdIHII")
MAGIC = b"SSJ1"
_KEY = struct.Struct(">Q")
_CHECKED_FROM = 8


@dataclass(frozen=True, slots=True)
class Record:
    """One packet as the journal holds it; positions run from 1, without gaps but where damaged."""

    position: int
    producer: str
    sequence: int
    received: float  # seconds since the Unix epoch
    header: bytes
    payload: bytes


@dataclass(frozen=True, slots=True)
class ProducerState:
    """The last sequence of a producer that is on disk, the source's position after it, and when
    that was, seconds since the Unix epoch."""

    sequence: int = 0
    position: Position = None
    written: float = field(default=0.0, compare=False)

    def pack(self) -> bytes:
        """The value that `producers` holds."""
        packed: bytes = msgpack.packb((self.sequence, self.position, self.written))
        return packed


class Damaged(Exception):
    """Bytes that do not match their checksum, or a file that LMDB cannot open."""


def key_of(position: int) -> bytes:
    """The record's key."""
    return _KEY.pack(position)


def position_of(key: bytes | memoryview) -> int:
    """The position that a key stands for."""
    return int(_KEY.unpack(key)[0])


def wire_checksum(sequence: int, header: Any, payload: Any) -> int:
    """CRC-32 as in DATA: kept from producer to learner, so that it covers every copy between."""
    crc = zlib.crc32(header, zlib.crc32(sequence.to_bytes(8, "big")))
    return zlib.crc32(payload, crc)


def pack_record(
    position: int,
    total: int,
    producer: str,
    sequence: int,
    received: float,
    checksum: int,
    header: Any,
    payload: Any,
) -> bytes:
    """The value that `records` holds."""
    name = producer.encode()
    fields = (position, total, sequence, received, checksum, len(name), len(header), len(payload))
    head = _HEAD.pack(MAGIC, 0, *fields)
    crc = zlib.crc32(name, zlib.crc32(head[_CHECKED_FROM:]))
    return b"".join((_HEAD.pack(MAGIC, crc, *fields), name, header, payload))


@dataclass(frozen=True, slots=True)
class Head:
    """A record's fixed part and name, checked."""

    position: int
    total: int
    sequence: int
    received: float
    checksum: int
    producer: str
    start: int  # of the header, in the value
    middle: int  # of the payload
    end: int


def unpack_head(value: memoryview) -> Head:
    """The head of a record.

    Raises:
        Damaged: it does not match its checksum.
    """
    if len(value) < _HEAD.size:
        raise Damaged(f"{len(value)} bytes are no record")
    magic, crc, position, total, sequence, received, checksum, n_name, n_header, n_payload = (
        _HEAD.unpack_from(value)
    )
    start = _HEAD.size + n_name
    checked = value[_CHECKED_FROM:start]
    if magic != MAGIC or zlib.crc32(checked) != crc:
        raise Damaged("head does not match its checksum")
    name = bytes(value[_HEAD.size : start]).decode()
    middle = start + n_header
    return Head(
        position, total, sequence, received, checksum, name, start, middle, middle + n_payload
    )


def unpack_record(value: memoryview) -> Record:
    """The record that a value holds; value may be longer.

    Raises:
        Damaged: head, header or payload do not match their checksum.
    """
    head = unpack_head(value)
    if head.end > len(value):
        raise Damaged(f"record {head.position} is cut off")
    header, payload = value[head.start : head.middle], value[head.middle : head.end]
    if wire_checksum(head.sequence, header, payload) != head.checksum:
        raise Damaged(f"record {head.position} does not match its checksum")
    return Record(
        head.position, head.producer, head.sequence, head.received, bytes(header), bytes(payload)
    )


def state_bytes(name: str, state: ProducerState) -> int:
    """Bytes that a producer's state takes in each segment."""
    return disk_bytes(len(name) + len(state.pack()))


def disk_bytes(length: int) -> int:
    """Bytes that a value takes in LMDB: a share of a tree's page if short, else whole pages."""
    if length < PAGE // 2 - 64:
        return 2 * length + 64  # a page of two such values may be half empty
    return -(-(length + 16) // PAGE) * PAGE + 64
