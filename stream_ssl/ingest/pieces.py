"""A run of samples from one journal record, decoded: what the worker threads make.

Legend: N samples of the piece, H height, W width, C channels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from stream_ssl.ingest.decode import BadSample, Decoder, Pixels, Row
from stream_ssl.wire.sample import MAX_ID_BYTES


class JournalRecord(Protocol):
    """What is read of a journal's record."""

    @property
    def position(self) -> int: ...
    @property
    def producer(self) -> str: ...
    @property
    def sequence(self) -> int: ...
    @property
    def received(self) -> float: ...
    @property
    def header(self) -> bytes: ...
    @property
    def payload(self) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Bad:
    """A sample that was left out: its place in the record, its bytes, and why."""

    index: int
    error: BadSample
    row: Row
    source: str
    data: bytes | memoryview = field(repr=False)


@dataclass(frozen=True, slots=True)
class Piece:
    """The samples `begin` to `end` of a record: the good as columns, the bad apart."""

    record: JournalRecord
    begin: int
    end: int
    last: bool  # ends the record
    image_NHWC: Pixels
    key_N: NDArray[np.int64]
    hash_N: NDArray[np.int64]
    label_N: NDArray[np.int64]
    time_N: NDArray[np.float64]
    index_N: NDArray[np.int64]  # of each good sample within the record
    bad: Sequence[Bad]


@dataclass(frozen=True, slots=True)
class Task:
    """The same before decoding."""

    record: JournalRecord
    source: str
    rows: Sequence[dict[str, Any]]
    payload: memoryview
    begin: int
    last: bool


def decode_piece(decoder: Decoder, task: Task) -> Piece:
    """Decodes a task's samples; what is wrong with any of them lands in `bad`."""
    image_NHWC = decoder.block(task.rows, task.payload) if _sound(task.rows) else None
    if image_NHWC is not None:
        return _piece(task, image_NHWC, task.rows, range(len(task.rows)), ())
    images: list[Pixels] = []
    good: list[int] = []
    bad: list[Bad] = []
    start = 0
    for index, row in enumerate(task.rows):
        data = task.payload[start : start + row["size"]]
        start += row["size"]
        try:
            images.append(decoder(row, data, task.source))
            good.append(index)
        except BadSample as error:
            bad.append(Bad(task.begin + index, error, row, task.source, data))
    shape = (0, decoder.size, decoder.size, decoder.channels)
    image_NHWC = np.stack(images) if images else np.empty(shape, np.uint8)
    return _piece(task, image_NHWC, [task.rows[index] for index in good], good, bad)


def bad_packet(record: JournalRecord, error: Exception) -> Piece:
    """A record whose header cannot be read, as one bad sample."""
    bad = Bad(0, BadSample("packet", str(error)), {}, "", record.payload)
    none, empty = np.empty(0, np.int64), np.empty((0, 0, 0, 0), np.uint8)
    return Piece(record, 0, 1, True, empty, none, none, none, np.empty(0), none, (bad,))


def sample_keys(source: str, ids: Sequence[str]) -> NDArray[np.int64]:
    """The 63-bit numbers, >= 0, that samples go by: BLAKE2b-64 of source, NUL, id, big-endian,
    without its lowest bit. [N]"""
    head = source.encode() + b"\0"
    return _numbers([blake2b(head + name.encode(), digest_size=8).digest() for name in ids])


def content_hashes(image_NHWC: Pixels) -> NDArray[np.int64]:
    """The 63-bit numbers, > 0, that pixels go by: the same of their bytes; 1 in place of 0, which
    says "none". [N]"""
    step = math.prod(image_NHWC.shape[1:])
    flat = image_NHWC.reshape(-1).data
    digests = [_digest(flat[at : at + step]) for at in range(0, len(flat), step)]
    return np.maximum(_numbers(digests), 1)


def _digest(data: memoryview) -> bytes:
    """BLAKE2b-64, in steps for which hashlib keeps the interpreter's lock.

    From 2,048 bytes on it lets go of it, and takes up to 5 ms to have it back from a thread that is
    busy in Python: with a training loop beside, a fortieth of the speed.
    """
    hashed = blake2b(digest_size=8)
    for at in range(0, len(data), 2047):
        hashed.update(data[at : at + 2047])
    return hashed.digest()


def _piece(
    task: Task,
    image_NHWC: Pixels,
    rows: Sequence[Row],
    places: Sequence[int],
    bad: Sequence[Bad],
) -> Piece:
    labels = [-1 if row.get("label") is None else row["label"] for row in rows]
    return Piece(
        record=task.record,
        begin=task.begin,
        end=task.begin + len(task.rows),
        last=task.last,
        image_NHWC=image_NHWC,
        key_N=sample_keys(task.source, [row["id"] for row in rows]),
        hash_N=content_hashes(image_NHWC),
        label_N=np.array(labels, np.int64),
        time_N=np.array([row["time"] for row in rows], np.float64),
        index_N=np.array(places, np.int64) + task.begin,
        bad=bad,
    )


def _numbers(digests: Sequence[bytes]) -> NDArray[np.int64]:
    return (np.frombuffer(b"".join(digests), ">u8") >> np.uint64(1)).astype(np.int64)


def _sound(rows: Sequence[Row]) -> bool:
    """Whether the fields that Decoder.block does not look at surely keep the wire's rules; where in
    doubt False, for the way sample by sample then decides."""
    for row in rows:
        label = row.get("label")
        if not 1 <= len(row["id"].encode()) <= MAX_ID_BYTES or not math.isfinite(row["time"]):
            return False
        if row.get("meta") or not (label is None or (type(label) is int and 0 <= label < 2**31)):
            return False
    return True
