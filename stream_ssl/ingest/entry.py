"""What is appended to a journal, and what comes of it."""

from __future__ import annotations

from dataclasses import dataclass

from stream_ssl.ingest.layout import (
    ProducerState,
    disk_bytes,
    pack_record,
    state_bytes,
    wire_checksum,
)
from stream_ssl.wire import Position


@dataclass(frozen=True, slots=True)
class Entry:
    """A packet to journal.

    Args:
        position: the source's position after the packet.
        received: seconds since the Unix epoch.
        header: None only moves the producer's sequence on, past a packet that was refused for good.
        checksum: as in DATA; computed if None.
    """

    producer: str
    sequence: int
    position: Position = None
    received: float = 0.0
    header: bytes | memoryview | None = None
    payload: bytes | memoryview = b""
    checksum: int | None = None


@dataclass(frozen=True, slots=True)
class Commit:
    """What an append did: positions first..last are on disk (last < first: no record)."""

    first: int
    last: int
    seconds: float  # in the transaction's commit, which is nearly all fsync


def pack_entry(position: int, total: int, entry: Entry) -> bytes:
    """The record that an entry becomes; `total` counts its own bytes too."""
    assert entry.header is not None
    checksum = entry.checksum
    if checksum is None:
        checksum = wire_checksum(entry.sequence, entry.header, entry.payload)
    return pack_record(
        position,
        total,
        entry.producer,
        entry.sequence,
        entry.received,
        checksum,
        entry.header,
        entry.payload,
    )


def entry_bytes(entry: Entry) -> int:
    """What an entry takes on disk, at most."""
    if entry.header is None:
        return 0
    state = ProducerState(entry.sequence, entry.position)
    length = 128 + len(entry.producer) + len(entry.header) + len(entry.payload)
    return disk_bytes(length) + state_bytes(entry.producer, state)
