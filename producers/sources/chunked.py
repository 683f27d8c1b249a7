"""Reads the compressed chunks of recordings within size limits, and merges their messages by time.

A recording is untrusted input. Every size, count and offset in it is checked before memory or time
is spent on it. A chunk that breaks a rule does not affect the other chunks.
"""

from __future__ import annotations

import bz2
import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from stream_ssl.producers.sources.recordings import BrokenFileError

MAX_BYTES = 1 << 28  # of a chunk, packed or unpacked, and of a message; far larger than a packet
MAX_WAITING = 1 << 29  # maximum bytes of messages that are held while chunks overlap in time
FEW_RECORDS = 1 << 16  # records allowed in any chunk; more need one packed byte each
PIECE = 1 << 20

Drop = Callable[[object, object], None]
"""Callback that counts and logs a part that is left out: (what, why)."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A message as a recording stores it."""

    channel: int
    log_time: int  # ns
    data: bytes


@dataclass(frozen=True, slots=True)
class ChunkPlace:
    """The position of a chunk in its file, and the log times of its first and last message."""

    at: int
    start: int
    end: int
    size: int = 0  # bytes in the file; 0 if the index does not say


class Waiting(NamedTuple):
    """A chunk or a message in the time-ordered queue. A chunk sorts before its own messages."""

    time: int
    at: int
    number: int
    what: ChunkPlace | Stored


def unpacked(compression: str, data: bytes, size: int | None = None) -> bytes:
    """Return the plain bytes of a chunk or message that should have `size` bytes.

    Raises:
        BrokenFileError: the data unpack to another size, or to more than MAX_BYTES.
    """
    limit = MAX_BYTES if size is None else size
    if limit > MAX_BYTES:
        raise BrokenFileError(f"it claims {size} bytes unpacked; at most {MAX_BYTES} are read")
    plain = data
    if compression not in ("", "none"):
        try:
            plain = b"".join(pieces(compression, data, limit))
        except BrokenFileError:
            raise
        except Exception as error:  # each library raises its own error types
            raise BrokenFileError(f"its {compression} is damaged: {error}") from error
    if len(plain) > limit or (size is not None and len(plain) != size):
        raise BrokenFileError(f"it unpacks to {len(plain)} bytes or more, not to {limit}")
    return plain


def pieces(compression: str, data: bytes, limit: int) -> Iterator[bytes]:
    """Yield the unpacked bytes in pieces, and stop once they exceed `limit` bytes."""
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
        raise BrokenFileError(f"compression {compression[:80]!r} is none of zstd, lz4 and bz2")
    while done <= limit and not state.eof:
        piece = state.decompress(data, max_length=PIECE)
        if not piece and state.needs_input:
            raise BrokenFileError(f"its {compression} ends too soon")
        data = b""
        done += len(piece)
        yield piece


def check_count(count: int, packed: int) -> None:
    """Check the number of records in a chunk of `packed` bytes.

    Raises:
        BrokenFileError: the chunk has more records than a recorder can write into so few bytes.
    """
    if count > FEW_RECORDS + packed:
        raise BrokenFileError(f"more than {count - 1} records in a chunk of {packed} bytes")


def disjoint(chunks: Iterable[ChunkPlace], begin: int, end: int) -> list[ChunkPlace]:
    """Return the chunks in file order.

    Raises:
        BrokenFileError: two chunks overlap, or a chunk lies outside [begin, end).
    """
    ordered, free = sorted(chunks, key=lambda chunk: chunk.at), begin
    for chunk in ordered:
        if chunk.at < free or chunk.at + chunk.size > end:
            raise BrokenFileError(f"its index names a chunk at {chunk.at}, where none can be")
        free = chunk.at + max(1, chunk.size)
    return ordered


def in_order(
    chunks: Iterable[ChunkPlace],
    read: Callable[[ChunkPlace], Iterable[Stored]],
    start: int,
    drop: Callable[[ChunkPlace, Exception], None],
) -> Iterator[Stored]:
    """Yield messages from log time `start` on, ordered by time and then by place in the file.

    Args:
        chunks: the chunks to read. Each chunk is opened when its first message is due.
        read: yields the messages of a chunk. If it raises, the rest of that chunk is left out.
        start: log time in nanoseconds.
        drop: called with (chunk, error) when the rest of a chunk is left out.
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
                        raise BrokenFileError("too many chunks overlap in time")
                    waiting += len(message.data)
                    heapq.heappush(queue, Waiting(message.log_time, at, number, message))
        except Exception as error:  # damaged bytes can cause errors of any type
            drop(what, error)
