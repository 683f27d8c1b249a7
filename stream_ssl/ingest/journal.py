"""The journal: what producers sent, in order and on disk, between receiver and learner.

It is a row of LMDB environments, "segments". Appending fills the newest; trimming deletes whole
ones. One environment for all would do the same in less code, but its pages stay mapped: at a budget
of 4 GiB the writer's resident set comes to 4 GiB, and trimming would write to the full disk that it
is to relieve.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import lmdb

from stream_ssl.ingest.entry import Commit, Entry, entry_bytes, pack_entry
from stream_ssl.ingest.journal_errors import JournalError, JournalFull, take_writer_lock, translate
from stream_ssl.ingest.layout import (
    PAGE,
    Damaged,
    ProducerState,
    Record,
    key_of,
    state_bytes,
    unpack_head,
)
from stream_ssl.ingest.recovery import recover
from stream_ssl.ingest.segment import (
    MAX_RECORDS,
    NewerFormat,
    Segment,
    create_segment,
    delete_segment,
    file_bytes,
    publish_segment,
    put_state,
    segment_path,
)
from stream_ssl.ingest.segment_reader import JournalReader
from stream_ssl.ingest.seldom import SeldomLog

__all__ = [
    "Commit",
    "Entry",
    "Journal",
    "JournalError",
    "JournalFull",
    "JournalReader",
    "NewerFormat",
    "ProducerState",
    "Record",
]

log = logging.getLogger(__name__)

MIN_SEGMENT = 256 << 10
MAX_SEGMENT = 64 << 20
_TREE = 8 * PAGE  # what a transaction may take beside its values


class Journal:
    """The only writer of a journal.

    Opening needs no operator: what a crash or a bad disk left is recovered or set aside (beside
    the folder, as `<name>.damaged-<time>-<segment>`) and counted in `damaged`.

    Args:
        path: folder of the journal; made if missing.
        budget: bytes on disk, at least 1 MiB.
        segment_bytes: size at which a new segment begins; an eighth of the budget, within 256 KiB
            and 64 MiB.
        forget_days: a producer's name that has sent nothing for so long is forgotten when a segment
            begins: where it stood, and the bytes that this takes in each segment.
        check: whether opening walks through old segments, in a process of its own, to find damage.

    Raises:
        ValueError: budget or segment_bytes are too small.
        JournalError: another process writes this journal, or the folder cannot be used.
        NewerFormat: the journal is of a later version.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        budget: int = 4 << 30,
        segment_bytes: int | None = None,
        forget_days: float = 30.0,
        check: bool = True,
    ) -> None:
        if budget < 1 << 20:
            raise ValueError(f"journal budget {budget} bytes: must be at least 1 MiB ({1 << 20})")
        self.path = Path(path)
        self.budget = budget
        self.segment_bytes = segment_bytes or max(MIN_SEGMENT, min(budget // 8, MAX_SEGMENT))
        if not MIN_SEGMENT <= self.segment_bytes <= budget // 2:
            raise ValueError(
                f"segment_bytes {self.segment_bytes}: must lie between {MIN_SEGMENT} and half of "
                f"the budget, {budget // 2}"
            )
        if forget_days <= 0:
            raise ValueError(f"forget_days {forget_days}: must be more than 0")
        self._seldom = SeldomLog(log)
        self._forget_seconds = 86_400 * forget_days
        self._active: Segment | None = None
        self._active_bytes = 0
        self._lock_handle: int | None = take_writer_lock(self.path)
        try:
            found = recover(self.path, check)
        except (OSError, lmdb.Error) as error:
            self.close()
            raise translate(error, self.path) from error
        except BaseException:
            self.close()
            raise
        self.damaged = found.damaged
        self._closed = found.segments  # (first position, bytes) of all but the active one
        now = time.time()  # when states of format 1 were written, nobody knows
        self._states = {
            name: state if state.written else replace(state, written=now)
            for name, state in found.states.items()
        }
        self._state_bytes = sum(state_bytes(*item) for item in self._states.items())
        self._total = found.total  # bytes of header and payload ever journalled
        self._last = found.last
        # Appending begins a new segment: an older one is only ever read, so that damage to LMDB's
        # list of free pages, which no reader notices, does no harm.
        self._start = found.last + 1

    # -- what there is

    @property
    def bytes(self) -> int:
        """Bytes on disk."""
        return sum(size for _, size in self._closed) + self._active_bytes

    @property
    def room(self) -> int:
        """Bytes that can still be appended within the budget; trimming brings it back."""
        return max(0, self.budget - self.bytes - self._reserve)

    @property
    def first(self) -> int:
        """The oldest position held; last + 1 when there is none."""
        return self._closed[0][0] if self._closed else self._start

    @property
    def last(self) -> int:
        """The newest position on disk; first - 1 when there is none."""
        return self._last

    @property
    def _reserve(self) -> int:
        """Bytes that beginning a segment takes before the first record."""
        return _TREE + self._state_bytes

    def producers(self) -> dict[str, ProducerState]:
        """Name to durable state, of every producer that was journalled and not forgotten."""
        return dict(self._states)

    def state(self, producer: str) -> ProducerState:
        """The durable state of one producer; sequence 0 if it is unknown."""
        return self._states.get(producer, ProducerState())

    def bytes_after(self, position: int) -> int:
        """Bytes of header and payload from `position` on: how far a reader lags."""
        if position > self._last:
            return 0
        if position <= self.first:
            position = self.first
        later = [first for first, _ in self._closed if first <= position]
        start = self._start if position >= self._start or not later else later[-1]
        try:
            before = self._total_before(start, position)
        except (Damaged, lmdb.Error) as error:
            self._seldom.warn("lag", f"journal: lag at position {position} is unknown: {error}")
            return self._total
        return self._total if before is None else self._total - before

    # -- what changes it

    def append(self, entries: Sequence[Entry]) -> Commit:
        """Writes entries in one transaction that is on disk when this returns.

        Raises:
            ValueError: a producer's sequence does not grow.
            JournalFull: no room in the budget or on the disk; nothing was written.
            JournalError: the disk failed; nothing was written.
        """
        self._check_order(entries)
        need = self._reserve + sum(entry_bytes(entry) for entry in entries)
        if need > self.budget - self.bytes and any(e.header is not None for e in entries):
            raise JournalFull(
                f"journal {self.path}: {need} bytes do not fit, {self.bytes} of {self.budget} are "
                "used; it empties behind the learner's checkpoints, or raise journal.budget"
            )
        try:
            if self._active is None or self._must_roll(need):
                self._roll(need)
            return self._write(entries)
        except lmdb.MapFullError:
            self._give_up_active()
            raise JournalFull(f"journal {self.path}: segment overrun; try again") from None
        except (lmdb.Error, OSError, Damaged) as error:
            self._give_up_active()
            raise translate(error, self.path) from error

    def fitting(self, entries: Sequence[Entry]) -> int:
        """How many of these entries, the first ones, the budget has room for."""
        room = self.budget - self.bytes - self._reserve
        return sum(size <= room for size in accumulate(map(entry_bytes, entries)))

    def trim(self, before: int) -> int:
        """Deletes whole segments of positions below `before`; returns the bytes that came free.

        Needs no free space. Raises:
            JournalError: the disk refuses to delete.
        """
        freed = 0
        while self._closed:
            following = self._closed[1][0] if len(self._closed) > 1 else self._start
            if following > before:
                break
            first, size = self._closed[0]
            path = segment_path(self.path, first)
            try:
                delete_segment(path)
            except OSError as error:
                raise translate(error, self.path) from error
            del self._closed[0]
            freed += size
        return freed

    def clear_readers(self) -> int:
        """Frees what dead readers hold of the active segment; returns how many there were."""
        return int(self._active.env.reader_check()) if self._active is not None else 0

    def skip_to(self, position: int) -> None:
        """Lets the next record have at least this position.

        A learner may have read further than a journal reaches that was lost and begun anew; under
        old positions it would take new records for ones it knows.
        """
        if position <= self._last + 1:
            return
        log.error("journal %s ends at %d: going on at %d", self.path, self._last, position)
        self._seal()
        self._start, self._last = position, position - 1

    def close(self) -> None:
        """Closes the files; what was appended is on disk already."""
        if self._active is not None:
            self._active.close()
            self._active = None
        if self._lock_handle is not None:
            os.close(self._lock_handle)
            self._lock_handle = None

    # -- inside

    def _check_order(self, entries: Iterable[Entry]) -> None:
        seen: dict[str, int] = {}
        for entry in entries:
            last = seen.get(entry.producer, self.state(entry.producer).sequence)
            if entry.sequence <= last:
                raise ValueError(
                    f"producer {entry.producer!r}: sequence {entry.sequence} after {last}; "
                    "sequences only grow"
                )
            seen[entry.producer] = entry.sequence

    def _must_roll(self, need: int) -> bool:
        empty = self._last < self._start
        full = self._active_bytes + need > max(self.segment_bytes, 4 * self._state_bytes)
        return (full and not empty) or self._last - self._start + 1 >= MAX_RECORDS

    def _roll(self, need: int) -> None:
        """Begins a new segment behind the last durable position, with all producers' states but
        those of names long idle."""
        self._seal()
        oldest = time.time() - self._forget_seconds
        for name in [name for name, state in self._states.items() if state.written < oldest]:
            log.info("journal %s: producer %s is forgotten: long idle", self.path, name)
            self._state_bytes -= state_bytes(name, self._states.pop(name))
        path = segment_path(self.path, self._start)
        size = 2 * max(self.segment_bytes, need) + 4 * self._state_bytes + (1 << 20)
        follows = self._closed[-1][0] if self._closed else 0
        fresh = create_segment(path, self._states, size, follows=follows)
        self._active = Segment(fresh, write=True)
        publish_segment(fresh, path)
        self._active_bytes = self._active.used()

    def _seal(self) -> None:
        """Closes the active segment; one without records makes way for the next."""
        self._give_up_active()
        path = segment_path(self.path, self._start)
        if self._last < self._start:
            return
        if path.exists():
            self._closed.append((self._start, file_bytes(path)))
            self._start, self._active_bytes = self._last + 1, 0

    def _write(self, entries: Sequence[Entry]) -> Commit:
        segment = self._active
        assert segment is not None
        position, total, states = self._last, self._total, dict[str, ProducerState]()
        now = time.time()
        with segment.env.begin(write=True, buffers=True) as txn:
            for entry in entries:
                if entry.header is not None:
                    position += 1
                    total += len(entry.header) + len(entry.payload)
                    value = pack_entry(position, total, entry)
                    txn.put(key_of(position), value, db=segment.records, append=True)
                    states[entry.producer] = ProducerState(entry.sequence, entry.position, now)
                else:
                    before = states.get(entry.producer, self.state(entry.producer))
                    states[entry.producer] = ProducerState(entry.sequence, before.position, now)
            for name, state in states.items():
                put_state(txn, segment.producers, name, state)
            begun = time.monotonic()
        commit = Commit(self._last + 1, position, time.monotonic() - begun)
        self._last, self._total = position, total
        for name, state in states.items():
            if name in self._states:
                self._state_bytes -= state_bytes(name, self._states[name])
            self._states[name] = state
            self._state_bytes += state_bytes(name, state)
        self._active_bytes = segment.used()
        return commit

    def _give_up_active(self) -> None:
        """After a failed commit the file's state is in doubt: go on in a new one.

        Positions that the failed commit may have left are written again by the new segment, and
        readers take a position from the newest segment that can hold it.
        """
        if self._active is not None:
            self._active.close()
            self._active = None

    def _total_before(self, start: int, position: int) -> int | None:
        segment = Segment(segment_path(self.path, start))
        try:
            with (
                segment.env.begin(db=segment.records, buffers=True) as txn,
                txn.cursor() as cursor,
            ):
                if not cursor.set_range(key_of(position)):
                    return None
                head = unpack_head(cursor.value())
                return head.total - (head.end - head.start)
        finally:
            segment.close()
