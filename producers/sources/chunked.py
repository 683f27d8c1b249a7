"""Reads the compressed chunks of recordings within size limits, and merges their messages by time.

A recording is untrusted input. Every size, count and offset in it is checked before memory or time
is spent on it. A chunk that breaks a rule does not affect the other chunks.
"""

from __future__ import annotations

import bz2
import heapq
import io
import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple

from stream_ssl.producers.sources.base import BrokenFileError

MAX_BYTES = 1 << 28  # of a chunk, packed or unpacked, and of a message; far larger than a packet
MAX_WAITING = 1 << 29  # maximum bytes of messages that are held while chunks overlap in time
FEW_RECORDS = 1 << 16  # records allowed in any chunk; more need one packed byte each
PIECE = 1 << 20
OTHERS = {
    b"#ROSBAG": "; it is a ROS 1 bag: use the source rosbag",
    b"SQLite": "; it may be a ROS 2 bag: use the source rosbag",
    b"\x28\xb5\x2f\xfd": "; it is compressed with Zstandard: unpack it with zstd -d",
}
"""By its first bytes: the format of another file, and the remedy."""

BadRecord = (BrokenFileError, ValueError, KeyError, struct.error)
"""The errors that reading damaged bytes of a recording raises."""
Drop = Callable[[object, Exception | str], None]
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


class ChunkedFile(ABC):
    """The messages in a recording of chunks whose channels are wanted.

    Args:
        file: opened for reading, in binary mode.
        wanted: called with the topic and the type of a channel. Returns whether to read its
            messages.
        drop: called with (what, why) for each part that cannot be read.
        no_index: called with the reason if the file is read in file order.
        stopped: stops the reading when it is set.

    Raises:
        BrokenFileError: the file does not begin with the bytes of its format.
    """

    magic: bytes
    """The first bytes of every file; set by the subclass, as `kind` is."""
    kind: str
    """The files of the format, in the plural."""

    def __init__(
        self,
        file: BinaryIO,
        wanted: Callable[[str, str], bool],
        drop: Drop,
        no_index: Callable[[Exception], None],
        stopped: threading.Event,
    ) -> None:
        self._file, self._wanted, self._stopped = file, wanted, stopped
        self._drop, self._no_index = drop, no_index
        self._size = file.seek(0, io.SEEK_END)
        head = self._read(0, len(self.magic))
        if head != self.magic:
            known = (remedy for begin, remedy in OTHERS.items() if head.startswith(begin))
            raise BrokenFileError(f"it does not begin as {self.kind} do{next(known, '')}")
        self._known: dict[int, bool] = {}  # whether a channel is wanted
        self._forget()

    def messages(self, start: int) -> Iterator[Stored]:
        """Yield the messages in the order of log times, from log time `start` (nanoseconds) on.

        A file without a valid index is read in file order, from the beginning up to the damage.

        Raises:
            BrokenFileError: the rest cannot be read.
        """
        try:
            chunks = self._index()
        except BadRecord as error:
            self._no_index(error)
            self._forget()
            chunks = None
        if chunks is None:
            yield from self._in_file_order()
            return
        yield from in_order(
            [c for c, ids in chunks.items() if not ids or any(map(self._is_wanted, ids))],
            self._indexed,
            start,
            lambda chunk, why: self._drop(f"the chunk at byte {chunk.at}", why),
        )

    def _read(self, at: int, size: int) -> bytes:
        self._file.seek(at)
        return self._file.read(size)

    def _is_wanted(self, channel: int) -> bool:
        if channel not in self._known:
            self._known[channel] = self._decide(channel)
        return self._known[channel]

    @abstractmethod
    def definition_of(self, channel: int) -> tuple[str, str, Callable[[bytes], Any]]:
        """Return the topic and the type of a channel, and a function that decodes its messages."""

    @abstractmethod
    def _forget(self) -> None:
        """Start without the definition of any channel."""

    @abstractmethod
    def _index(self) -> dict[ChunkPlace, list[int]] | None:
        """Return the chunks with the channels of their messages; None if there is no index.

        A chunk without channels is read, because its channels are not known.

        Raises:
            BadRecord: the index is missing or damaged.
        """

    @abstractmethod
    def _decide(self, channel: int) -> bool:
        """Return whether a channel is wanted, and report a channel that is not defined."""

    @abstractmethod
    def _indexed(self, chunk: ChunkPlace) -> Iterator[Stored]:
        """Yield the wanted messages of a chunk of the index."""

    @abstractmethod
    def _in_file_order(self) -> Iterator[Stored]:
        """Yield the wanted messages of the whole file, without the index."""


def prefixed(data: bytes, at: int) -> tuple[bytes, int]:
    """Return the bytes after a length prefix, and the offset of their end.

    Raises:
        BrokenFileError: the length exceeds the data.
    """
    size = int.from_bytes(data[at : at + 4], "little")
    if at + 4 + size > len(data):
        raise BrokenFileError(f"a part claims {size} bytes, and {len(data) - at} are there")
    return data[at + 4 : at + 4 + size], at + 4 + size


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
