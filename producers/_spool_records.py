"""The records in a spool's files, and how they are found again in damaged files.

A record is a head (kind, three lengths, CRC-32) and a body: info, header and payload. There are two
kinds:

- A packet record holds a packet. Its info gives the number of its first sample, the count of its
  samples and their positions.
- A mark record holds the sequence that each packet was about to be sent with.

The info begins with the number of the next sample. So a reader that skips damaged bytes learns from
the next whole record how many samples they held.
"""

from __future__ import annotations

import os
import re
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgpack

from stream_ssl import durable
from stream_ssl.bounded_files import open_binary
from stream_ssl.producers._packer import Packet
from stream_ssl.wire import Data

MAGIC = b"SSSPOOL1"
"""The first bytes of a file with records."""
PACKET, MARK = 1, 2

_HEAD = struct.Struct(">BIIII")  # kind, bytes of info, header and payload, CRC-32
_START = re.compile(
    rb"(?:\x01.{16}\x83|\x02.{16}[\x84\x85])\xa6number", re.DOTALL
)  # of a whole record
_START_BYTES = 25
_SCAN_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class SpooledPacket:
    """The place of a packet on disk, or of lost packets."""

    number: int
    count: int
    segment: Path
    offset: int | None  # None: the packets are lost


class Record(NamedTuple):
    """A whole record, with its size in bytes."""

    kind: int
    info: dict[str, Any]
    header: bytes
    payload: bytes
    size: int


# The first field of an info must be `number`, because _START finds a record by it.


def packet_record(number: int, packet: Packet) -> bytes:
    """Return the record of a packet whose first sample has this number."""
    info = {"number": number, "count": packet.count, "positions": packet.positions}
    return pack_record(PACKET, info, packet.data.header, packet.data.payload)


def pack_record(kind: int, info: dict[str, Any], header: Any = b"", payload: Any = b"") -> bytes:
    """Return the bytes of a record."""
    packed = msgpack.packb(info)
    body = b"".join((packed, header, payload))
    lengths = (kind, len(packed), len(header), len(payload))
    return _HEAD.pack(*lengths, _crc(lengths, body)) + body


def read_record(file: Any) -> Record | None:
    """Return the record at the file's position, or None if it is torn or damaged."""
    head = file.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return None
    *lengths, crc = _HEAD.unpack(head)
    kind, info, header, payload = lengths
    if info + header + payload > os.fstat(file.fileno()).st_size:
        return None
    body = file.read(info + header + payload)
    if len(body) < info + header + payload or crc != _crc(tuple(lengths), body):
        return None
    end = info + header
    size = len(head) + len(body)
    return Record(kind, msgpack.unpackb(body[:info]), body[info:end], body[end:], size)


def records_of(path: Path) -> Iterator[tuple[int, Record]]:
    """Yield the offset of each whole record of a file, and the record."""
    with open_binary(path) as file:
        offset: int | None = len(MAGIC)
        while offset is not None:
            file.seek(offset)
            found = read_record(file)
            if found is None:
                offset = _next_start(file, offset + 1)
                continue
            yield offset, found
            offset += found.size


def read_packet(place: SpooledPacket) -> Packet | None:
    """Return the packet at a place, or None if it is lost or damaged.

    Raises:
        OSError: the file cannot be opened, which says nothing about its content.
    """
    found = None
    if place.offset is None:
        return None
    try:
        with open_binary(place.segment) as file:
            file.seek(place.offset)
            found = read_record(file)
    except OSError as error:
        if error.errno in durable.UNREAD:
            raise
    if found is None:
        return None
    data = Data(0, found.header, found.payload)
    positions = tuple(found.info["positions"])
    return Packet(data, place.count, data.size, positions, (), spooled=place.number)


def _crc(lengths: tuple[int, ...], body: bytes) -> int:
    return zlib.crc32(body, zlib.crc32(bytes(str(lengths), "ascii")))


def _next_start(file: Any, offset: int) -> int | None:
    """Return the first place at or after `offset` that looks like the start of a record."""
    while True:
        file.seek(offset)
        block = file.read(_SCAN_BYTES)
        if (match := _START.search(block)) is not None:
            return offset + match.start()
        if len(block) < _SCAN_BYTES:
            return None
        offset += _SCAN_BYTES - _START_BYTES
