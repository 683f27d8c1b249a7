"""Writer of the journal, the ordered log of packets between receiver and learner.

**A sample is durable when `Journal.append` returns**, because its LMDB transaction is then on disk.
`group_commit.py` is the only caller, and the receiver acknowledges a packet only after this call.

A journal is a sequence of segments, each an LMDB environment (`segment.py`). `append` fills the
newest segment, and `trim` deletes whole segments. A single environment would need less code, but
its pages stay mapped: with a budget of 4 GiB the writer's resident set would reach 4 GiB. Trimming
would also have to write to the full disk that it must free.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import lmdb

from stream_ssl.durable import write
from stream_ssl.journal.errors import BudgetUsed, JournalFull, as_journal_error
from stream_ssl.journal.old_segments import OldSegments
from stream_ssl.journal.producer_states import ProducerStates
from stream_ssl.journal.recovery import recover
from stream_ssl.journal.segment import (
    ID_FILE,
    MAX_RECORDS,
    PAGE,
    Damaged,
    JournalEntry,
    ProducerState,
    Segment,
    create_segment,
    disk_room,
    entry_bytes,
    file_bytes,
    identity,
    journal_id,
    key_of,
    list_segments,
    pack_record,
    publish_segment,
    segment_path,
)
from stream_ssl.journal.writer_lock import WriterLock
from stream_ssl.rate_limited_logger import RateLimitedLogger

log = logging.getLogger(__name__)

MIN_SEGMENT = 256 << 10
MAX_SEGMENT = 64 << 20
_TREE = 16 * PAGE  # overhead of a transaction; the first of a new segment takes up to 12 pages


@dataclass(frozen=True, slots=True)
class Commit:
    """The positions that an append wrote, first..last; last < first if it wrote no record."""

    first: int
    last: int
    seconds: float  # duration of the transaction's commit, nearly all of it fsync


class Journal:
    """The single writer of a journal.

    Opening a damaged journal needs no operator. A damaged segment is moved aside, replaced by its
    intact records and counted in `damaged`. It is moved to `<name>.damaged-<time>-<segment>` beside
    the journal's folder, or into the folder. Opening checks the newest segment. A separate process
    checks the older segments in the background, and `take_checked` handles its results.

    Args:
        path: the folder of the journal; created if it is missing.
        budget: most bytes on disk, at least 1 MiB; see `OldSegments.left`.
        segment_bytes: the size at which a new segment begins. None: an eighth of the budget or of
            the room on the disk, whichever is less, between 256 KiB and 64 MiB. Other values are
            for tests.
        check: check the segments for damage. False is for tests.

    Attributes:
        id: the id of this journal, which `identify` sets. Positions are valid for one id only.
        lock: the lock of the folder, which tells whether the folder is still in its place.
        connected: name -> when a producer was last connected (time.monotonic); set by the receiver.

    Raises:
        ValueError: `budget` is too small, or `segment_bytes` is outside its range.
        JournalError: another process writes this journal, or the folder cannot be used.
        NewerFormat: a later version wrote the journal.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        budget: int = 4 << 30,
        segment_bytes: int | None = None,
        check: bool = True,
    ) -> None:
        if budget < 1 << 20:
            raise ValueError(f"journal.budget {budget}: must be at least {1 << 20} bytes (1 MiB)")
        self.path = Path(path)
        self.budget = budget
        if segment_bytes and not MIN_SEGMENT <= segment_bytes <= budget // 2:
            raise ValueError(
                f"segment_bytes {segment_bytes}: must lie between {MIN_SEGMENT} and half of "
                f"the budget, {budget // 2}"
            )
        self.connected: dict[str, float] = {}
        self._limited_log = RateLimitedLogger(log)
        self._active: Segment | None = None
        self._active_bytes = 0
        self.lock = WriterLock(self.path)
        try:
            room = min(budget, disk_room(self.path))  # only whole segments can be deleted
            self.segment_bytes = segment_bytes or max(MIN_SEGMENT, min(room // 8, MAX_SEGMENT))
            found = recover(self.path, check)
        except (OSError, lmdb.Error) as error:
            self.lock.release()
            raise as_journal_error(error, self.path) from error
        except BaseException:
            self.lock.release()
            raise
        self.id = journal_id(self.path)
        # The first append begins a new segment, and older segments are only read: readers do not
        # notice damage to LMDB's list of free pages, but a writer would reuse pages in use.
        self._old = OldSegments(self.path, found, budget)
        self._states = ProducerStates(found.states)
        self._total = found.total  # bytes of header and payload ever journalled
        self._last = found.last

    # -- state

    @property
    def bytes(self) -> int:
        """Bytes on disk."""
        return self._old.bytes + self._active_bytes

    @property
    def room(self) -> int:
        """Bytes that can still be appended within the budget; trimming increases it."""
        return max(0, self._old.left - self._active_bytes - self._reserve)

    @property
    def first(self) -> int:
        """The oldest position on disk; last + 1 if there is none."""
        return self._old.first

    @property
    def last(self) -> int:
        """The newest position on disk; first - 1 if there is none."""
        return self._last

    @property
    def damaged(self) -> int:
        """The number of segments that were found damaged or missing."""
        return self._old.damaged

    @property
    def _reserve(self) -> int:
        """Bytes that a new segment needs before its first record."""
        return _TREE + self._states.bytes

    def producers(self) -> dict[str, ProducerState]:
        """Return name -> durable state for every producer that the journal knows."""
        return self._states.all()

    def state(self, producer: str) -> ProducerState:
        """Return the durable state of one producer; its sequence is 0 if it is unknown."""
        return self._states.of(producer)

    def bytes_after(self, position: int) -> int:
        """Return the bytes of header and payload from `position` on, the lag of a reader there.

        The result is an upper bound for segments that are not checked yet or cannot be read.
        """
        position = max(position, self.first)
        if position > self._last:
            return 0
        start = self._old.start_of(position)
        if not self._old.is_checked(start):  # an upper bound from the sizes of the files
            return min(self._total, self._old.bytes_from(start) + self._active_bytes)
        try:
            with closing(Segment(segment_path(self.path, start))) as segment:
                return self._total - segment.total_before(position)
        except (Damaged, lmdb.Error, OSError) as error:
            text = f"journal: lag at position {position} is unknown: {error}"
            self._limited_log.warning("lag", text)
            return self._total

    # -- changes

    def append(self, entries: Sequence[JournalEntry]) -> Commit:
        """Write entries in one transaction; they are durable when this method returns.

        Raises:
            ValueError: the sequences of a producer do not increase.
            JournalFull: the budget or the disk has no room; nothing was written.
            JournalError: the disk failed, or the journal was deleted; nothing was written.
        """
        self._states.check_order(entries)
        need = self._reserve + sum(entry_bytes(entry) for entry in entries)
        if need > self.room + self._reserve and any(e.header is not None for e in entries):
            raise BudgetUsed(
                f"journal {self.path}: {need} bytes do not fit, {self.bytes} of {self.budget} are "
                "used; it empties behind the learner's checkpoints, or raise journal.budget"
            )
        try:
            if self._active is None or self._must_roll(need):
                self._roll(need)
            return self._write(entries)
        except lmdb.MapFullError:
            self._close_active()
            raise JournalFull(f"journal {self.path}: segment overrun; try again") from None
        except (lmdb.Error, OSError, Damaged) as error:
            self._close_active()
            raise as_journal_error(error, self.path) from error

    def take_checked(self, wait: bool = False) -> None:
        """Replace the old segments that the background check found damaged; never raises.

        `wait` blocks until all old segments are checked.
        """
        self._old.take_checked(wait)

    def count_fitting(self, entries: Sequence[JournalEntry]) -> int:
        """Return how many of the entries, from the first on, fit into the budget."""
        room = self.room
        return sum(size <= room for size in accumulate(map(entry_bytes, entries)))

    def trim(self, before: int, seconds: float = float("inf")) -> int:
        """Delete the segments that lie wholly below a position; return the bytes freed.

        Trimming needs no free space on the disk.

        Args:
            before: the position; records before it are not needed any more.
            seconds: the time limit. At least one segment is deleted if one can be, and the next
                call continues.

        Raises:
            JournalError: a segment cannot be deleted.
        """
        # A restart needs the producers' states, so one segment with them must stay.
        return self._old.trim(before, seconds, keep_newest=not self._active_bytes)

    def clear_readers(self) -> int:
        """Free the reader slots of dead processes in the active segment; return their number."""
        return int(self._active.env.reader_check()) if self._active is not None else 0

    def identify(self, known: str | None = None) -> None:
        """Set and save the id of a journal that has none or a damaged id.

        New journals and journals of earlier releases have no id.

        Args:
            known: the id that the consumer has stored for this journal. It is used if the journal
                has segments; otherwise the id is random.
        """
        if self.id is not None:
            return
        fresh = known if known and list_segments(self.path) else secrets.token_hex(8)
        try:
            write(self.path / ID_FILE, f"{fresh}\n{fresh}\n", mode=0o600)
        except OSError as error:  # such as a full disk, which must not stop the receiver
            log.warning("journal %s has no id until the next start: %s", self.path, error)
        else:
            self.id = fresh

    def skip_to(self, position: int) -> None:
        """Let the next record have at least this position.

        If the newest records were lost, the learner may have read beyond the end of the journal.
        A new record at a position that the learner has already read would be skipped.
        """
        if position <= self._last + 1:
            return
        log.error("journal %s ends at %d: continuing at %d", self.path, self._last, position)
        self._seal()
        self._old.end, self._last = position, position - 1

    def close(self) -> None:
        """Close the files and stop the background check; the next start checks the rest."""
        self._old.close()
        self._close_active()
        self.lock.release()

    # -- helpers

    def _must_roll(self, need: int) -> bool:
        empty = self._last < self._old.end
        # Many producer states make a segment larger, so that they take a small part of it. Two
        # segments must fit into the budget, because the newest is never trimmed.
        states = min(4 * self._states.bytes, (self.budget - self._reserve) // 2)
        full = self._active_bytes + need > max(self.segment_bytes, states)
        return (full and not empty) or self._last - self._old.end + 1 >= MAX_RECORDS

    def _roll(self, need: int) -> None:
        """Begin a new segment after the last durable position.

        It starts with the states of all producers that were active within FORGET_SECONDS.

        Raises:
            Damaged: this is not the folder that was locked.
        """
        self.lock.check()
        self._seal()
        for name in self._states.forget_idle(self.connected):
            log.info("journal %s: producer %s is forgotten: long idle", self.path, name)
        path = segment_path(self.path, self._old.end)
        size = 2 * max(self.segment_bytes, need) + 4 * self._states.bytes + (1 << 20)
        fresh = create_segment(path, self._states.all(), size, follows=self._old.newest)
        self._active = Segment(fresh, write=True)
        shutil.rmtree(publish_segment(fresh, path), ignore_errors=True)
        self._active_bytes = self._active.used()

    def _seal(self) -> None:
        """Close the active segment; if it has no records, the next segment replaces it."""
        self._close_active()
        path = segment_path(self.path, self._old.end)
        if self._last < self._old.end:
            return
        if path.exists():
            self._old.add(file_bytes(path), self._last + 1)
            self._active_bytes = 0

    def _write(self, entries: Sequence[JournalEntry]) -> Commit:
        segment = self._active
        assert segment is not None
        position, total, states = self._last, self._total, dict[str, ProducerState]()
        times = time.time(), self._states.active_now()
        with segment.env.begin(write=True, buffers=True) as txn:
            for entry in entries:
                token = entry.resume_token
                if entry.header is not None:
                    position += 1
                    total += len(entry.header) + len(entry.payload)
                    value = pack_record(position, total, entry)
                    txn.put(key_of(position), value, db=segment.records, append=True)
                else:
                    token = states.get(entry.producer, self.state(entry.producer)).resume_token
                states[entry.producer] = ProducerState(entry.sequence, token, *times)
            for name, state in states.items():
                key = name.encode()
                txn.put(key, state.pack(key), db=segment.producers)
            began = time.monotonic()
        # Leaving the block committed and fsynced the transaction, so the entries are durable.
        commit = Commit(self._last + 1, position, time.monotonic() - began)
        # If another process deleted the file, the commit went to the deleted file.
        if identity(path := segment_path(self.path, self._old.end)) != segment.key:
            raise Damaged(f"{path} was replaced by another")
        self._last, self._total = position, total
        self._active_bytes = segment.used()
        self._states.keep(states)
        return commit

    def _close_active(self) -> None:
        """Close the active segment, so that the next append begins a new segment.

        After a failed commit the content of the file is unknown. The new segment may write the same
        positions again; readers use the newest segment that can contain a position.
        """
        if self._active is not None:
            self._active.close()
            self._active = None
