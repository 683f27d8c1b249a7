"""Compressed chunks of recorded messages: unpacked within bounds, and merged by time.

A recording is somebody else's file. Each size, count and offset that it claims is checked before
memory or time is spent on it, and a chunk that breaks a rule costs only itself.
"""

from __future__ import annotations

import bz2
import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from stream_ssl.producers.sources.recordings import DamagedError

MAX_BYTES = 1 << 28  # of a chunk, packed or not, and of a message; far above any packet
MAX_WAITING = 1 << 29  # bytes of messages that wait for their turn while chunks overlap in time
FEW_RECORDS = 1 << 16  # that any chunk may hold; more need a byte of the file each
PIECE = 1 << 20

Drop = Callable[[object, object], None]
"""Counts and logs a part that is left out: what it is, and why."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A message as a recording stores it."""

    channel: int
    log_time: int  # ns
    data: bytes


@dataclass(frozen=True, slots=True)
class ChunkPlace:
    """Where a chunk lies in its file, and the log times of its first and last message."""

    at: int
    start: int
    end: int
    size: int = 0  # bytes in the file, where the index tells it


class Waiting(NamedTuple):
    """A chunk or a message in the order of times; a chunk comes before its own messages."""

    time: int
    at: int
    number: int
    what: ChunkPlace | Stored


def unpacked(compression: str, data: bytes, size: int | None = None) -> bytes:
    """Return the plain bytes of a chunk or message that should have `size` bytes.

    Raises:
        DamagedError: the data do not unpack to this size, or to more than MAX_BYTES.
    """
    limit = MAX_BYTES if size is None else size
    if limit > MAX_BYTES:
        raise DamagedError(f"it claims {size} bytes unpacked; at most {MAX_BYTES} are read")
    plain = data
    if compression not in ("", "none"):
        try:
            plain = b"".join(pieces(compression, data, limit))
        except DamagedError:
            raise
        except Exception as error:  # each library has errors of its own
            raise DamagedError(f"its {compression} is damaged: {error}") from error
    if len(plain) > limit or (size is not None and len(plain) != size):
        raise DamagedError(f"it unpacks to {len(plain)} bytes or more, not to {limit}")
    return plain


def pieces(compression: str, data: bytes, limit: int) -> Iterator[bytes]:
    """Unpack bytes piece by piece, until more than `limit` are out."""
    done = 0
    if compression == "zstd":
        import zstandard

        with zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True) as stream:
            while done <= limit and (piece := stream.read(PIECE)):
                done += len(piece)
                yield piece
        return
    if compression == "lz4":
        from lz4.frame import LZ4FrameDecompressor

        state: Any = LZ4FrameDecompressor()
    elif compression == "bz2":
        state = bz2.BZ2Decompressor()
    else:
        raise DamagedError(f"compression {compression[:80]!r} is none of zstd, lz4 and bz2")
    while done <= limit and not state.eof:
        piece = state.decompress(data, max_length=PIECE)
        if not piece and state.needs_input:
            raise DamagedError(f"its {compression} ends too soon")
        data = b""
        done += len(piece)
        yield piece


def check_count(count: int, packed: int) -> None:
    """Check how many records a chunk of `packed` bytes holds.

    Raises:
        DamagedError: there are more than a recorder can write into so few bytes.
    """
    if count > FEW_RECORDS + packed:
        raise DamagedError(f"more than {count - 1} records in a chunk of {packed} bytes")


def disjoint(chunks: Iterable[ChunkPlace], begin: int, end: int) -> list[ChunkPlace]:
    """Return the chunks in the order of their places.

    Raises:
        DamagedError: two chunks share bytes, or one lies outside [begin, end).
    """
    ordered, free = sorted(chunks, key=lambda chunk: chunk.at), begin
    for chunk in ordered:
        if chunk.at < free or chunk.at + chunk.size > end:
            raise DamagedError(f"its index names a chunk at {chunk.at}, where none can be")
        free = chunk.at + max(1, chunk.size)
    return ordered


def in_order(
    chunks: Iterable[ChunkPlace],
    read: Callable[[ChunkPlace], Iterable[Stored]],
    start: int,
    drop: Callable[[ChunkPlace, Exception], None],
) -> Iterator[Stored]:
    """Yield messages from log time `start` on, by time and then by place in the file.

    Args:
        chunks: those to read; each is opened when its first message is due.
        read: yields the messages of a chunk; what it raises costs the rest of this chunk.
        start: nanoseconds.
        drop: hears of a chunk whose rest is left out.
    """
    queue = [Waiting(chunk.start, chunk.at, -1, chunk) for chunk in chunks if chunk.end >= start]
    heapq.heapify(queue)
    waiting = 0
    while queue:
        _, at, _, what = heapq.heappop(queue)
        if isinstance(what, Stored):
            waiting -= len(what.data)
            yield what
            continue
        try:
            for number, message in enumerate(read(what)):
                if message.log_time >= start:
                    if waiting + len(message.data) > MAX_WAITING:
                        raise DamagedError("too many chunks overlap in time")
                    waiting += len(message.data)
                    heapq.heappush(queue, Waiting(message.log_time, at, number, message))
        except Exception as error:  # whatever damaged bytes lead to
            drop(what, error)
