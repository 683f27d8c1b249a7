"""Writer and reader of the journal, the ordered log of packets between receiver and learner.

**A sample is durable when `Journal.append` returns**, because its LMDB transaction is then on disk.
`group_commit.py` is the only caller, and the receiver acknowledges a packet only after this call.

A journal is a sequence of segments, each an LMDB environment (`segment.py`). `append` fills the
newest segment, and `trim` deletes whole segments. A single environment would need less code, but
its pages stay mapped: with a budget of 4 GiB the writer's resident set would reach 4 GiB. Trimming
would also have to write to the full disk that it must free.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import lmdb

from stream_ssl.bounded_files import open_file
from stream_ssl.durable import make_folder, write
from stream_ssl.journal.recovery import (
    BackgroundCheck,
    Checked,
    is_gap,
    recover,
    replace_damaged,
    salvage,
)
from stream_ssl.journal.segment import (
    ID_FILE,
    MAX_RECORDS,
    PAGE,
    Damaged,
    Entry,
    NewerFormat,
    ProducerState,
    Record,
    Segment,
    create_segment,
    delete_segment,
    disk_room,
    entry_bytes,
    file_bytes,
    identity,
    is_coming,
    journal_id,
    key_of,
    list_segments,
    pack_record,
    position_of,
    publish_segment,
    segment_path,
    state_bytes,
    unpack_head,
    unpack_record,
)
from stream_ssl.rate_limited_logger import RateLimitedLogger

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

FORGET_SECONDS = 30 * 86_400
"""Idle time after which the journal deletes the state of a producer, when a new segment begins.

The state takes up to 13 KB in each segment. Only time while a writer has the journal open counts.
"""

MIN_SEGMENT = 256 << 10
MAX_SEGMENT = 64 << 20
LOCK_FILE = "writer.lock"
_TREE = 16 * PAGE  # overhead of a transaction; the first of a new segment takes up to 12 pages
_CLOCK_SET = 1_577_836_800  # the year 2020; an earlier time comes from a clock that was not set


class JournalError(Exception):
    """A failed append. Nothing was written, and the caller may retry the same append."""


class JournalFull(JournalError):
    """A failed append because the budget is used up or the disk is full."""


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
        budget: most bytes on disk, at least 1 MiB.
        segment_bytes: the size at which a new segment begins. None: an eighth of the budget or of
            the room on the disk, whichever is less, between 256 KiB and 64 MiB. Other values are
            for tests.
        check: check the segments for damage. False is for tests.

    Attributes:
        id: the id of this journal, which `identify` sets. Positions are valid for one id only.
        damaged: segments that were found damaged or missing.

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
            raise ValueError(f"journal budget {budget} bytes: must be at least 1 MiB ({1 << 20})")
        self.path = Path(path)
        self.budget = budget
        room = min(budget, disk_room(self.path))  # only whole segments can be deleted
        self.segment_bytes = segment_bytes or max(MIN_SEGMENT, min(room // 8, MAX_SEGMENT))
        if not MIN_SEGMENT <= self.segment_bytes <= budget // 2:
            raise ValueError(
                f"segment_bytes {self.segment_bytes}: must lie between {MIN_SEGMENT} and half of "
                f"the budget, {budget // 2}"
            )
        self._limited_log = RateLimitedLogger(log)
        self._active: Segment | None = None
        self._active_bytes = 0
        self._check: BackgroundCheck | None = None
        self._lock_handle: int | None = _lock_for_writing(self.path)
        try:
            found = recover(self.path, check)
        except (OSError, lmdb.Error) as error:
            self.close()
            raise _translate(error, self.path) from error
        except BaseException:
            self.close()
            raise
        self.id = journal_id(self.path)
        self.damaged = found.damaged
        self._sealed = found.segments  # (first position, bytes) of all segments but the active one
        # Idle time counts the time that a writer was running, because the wall clock may jump.
        self._opened = time.monotonic()
        self._active_before = max((s.active for s in found.states.values()), default=0.0) or 1.0
        wall = time.time()
        self._states = {  # format 1 has neither of the times, and format 2 has only `written`
            name: replace(
                state,
                written=state.written if state.written > _CLOCK_SET else wall,
                active=state.active or self._active_before,
            )
            for name, state in found.states.items()
        }
        self._state_bytes = sum(state_bytes(*item) for item in self._states.items())
        self._total = found.total  # bytes of header and payload ever journalled
        self._last = found.last
        older = [path for _, path in found.unchecked]
        starts = [first for first, _ in found.unchecked]
        # First position -> first position of the previous segment. This process must not open
        # these segments before they are checked.
        self._unchecked = dict(zip(starts, [0, *starts], strict=False))
        self._check = BackgroundCheck(older)
        # The first append begins a new segment, and older segments are only read: readers do not
        # notice damage to LMDB's list of free pages, but a writer would reuse pages in use.
        self._active_first = found.last + 1

    # -- state

    @property
    def bytes(self) -> int:
        """Bytes on disk."""
        return sum(size for _, size in self._sealed) + self._active_bytes

    @property
    def room(self) -> int:
        """Bytes that can still be appended within the budget; trimming increases it."""
        return max(0, self.budget - self.bytes - self._reserve)

    @property
    def first(self) -> int:
        """The oldest position on disk; last + 1 if there is none."""
        return self._sealed[0][0] if self._sealed else self._active_first

    @property
    def last(self) -> int:
        """The newest position on disk; first - 1 if there is none."""
        return self._last

    @property
    def _reserve(self) -> int:
        """Bytes that a new segment needs before its first record."""
        return _TREE + self._state_bytes

    def producers(self) -> dict[str, ProducerState]:
        """Return name -> durable state for every producer that the journal knows."""
        return dict(self._states)

    def state(self, producer: str) -> ProducerState:
        """Return the durable state of one producer; its sequence is 0 if it is unknown."""
        return self._states.get(producer, ProducerState())

    def bytes_after(self, position: int) -> int:
        """Return the bytes of header and payload from `position` on, the lag of a reader there.

        The result is an upper bound for segments that are not checked yet or cannot be read.
        """
        position = max(position, self.first)
        if position > self._last:
            return 0
        firsts = [*(first for first, _ in self._sealed), self._active_first]
        start = max(first for first in firsts if first <= position)
        if start in self._unchecked:  # an upper bound from the sizes of the files
            held = sum(size for first, size in self._sealed if first >= start)
            return min(self._total, held + self._active_bytes)
        try:
            before = self._bytes_before(start, position)
        except (Damaged, lmdb.Error, OSError) as error:
            text = f"journal: lag at position {position} is unknown: {error}"
            self._limited_log.warning("lag", text)
            return self._total
        return self._total if before is None else self._total - before

    # -- changes

    def append(self, entries: Sequence[Entry]) -> Commit:
        """Write entries in one transaction; they are durable when this method returns.

        Raises:
            ValueError: the sequences of a producer do not increase.
            JournalFull: the budget or the disk has no room; nothing was written.
            JournalError: the disk failed, or the journal was deleted; nothing was written.
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
            self._close_active()
            raise JournalFull(f"journal {self.path}: segment overrun; try again") from None
        except (lmdb.Error, OSError, Damaged) as error:
            self._close_active()
            raise _translate(error, self.path) from error

    def take_checked(self, wait: bool = False) -> None:
        """Replace the old segments that the background check found damaged; never raises.

        Args:
            wait: block until all old segments are checked.
        """
        for checked in self._check.take(wait) if self._check is not None else ():
            first = int(checked.path.name.rpartition("-")[2])
            before = self._unchecked.get(first, 0)
            if all(start != first for start, _ in self._sealed):
                self._unchecked.pop(first, None)  # trimmed in the meantime
            elif checked.fault is not None:
                self._replace_damaged(first, before, checked)
            else:
                del self._unchecked[first]
                self.damaged += bool(before) and is_gap(self.path, checked.follows, before)

    def _replace_damaged(self, first: int, before: int, checked: Checked) -> None:
        self.damaged += 1
        index = [start for start, _ in self._sealed].index(first)
        following = [start for start, _ in self._sealed[index + 1 :]]
        bound = following[0] if following else self._active_first
        try:
            states = self._states_of(before)
            fault = str(checked.fault)
            kept = replace_damaged(checked.path, first, bound, before, states, fault)
        except (OSError, lmdb.Error) as error:
            log.error(
                "journal segment %s is damaged (%s) and cannot be replaced now (%s): the next "
                "start tries again",
                checked.path.name,
                checked.fault,
                error,
            )
            return
        del self._unchecked[first]
        self._sealed[index : index + 1] = [(first, file_bytes(checked.path))] if kept else []

    def _states_of(self, first: int) -> dict[str, ProducerState]:
        """Return the producer states of the segment at `first`; empty if it cannot be opened."""
        try:
            segment = Segment(segment_path(self.path, first))
        except Damaged:
            return {}
        try:
            return segment.states()
        finally:
            segment.close()

    def count_fitting(self, entries: Sequence[Entry]) -> int:
        """Return how many of the entries, from the first on, fit into the budget."""
        room = self.budget - self.bytes - self._reserve
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
        freed, end = 0, time.monotonic() + seconds
        while self._sealed and (not freed or time.monotonic() < end):
            following = self._sealed[1][0] if len(self._sealed) > 1 else self._active_first
            if following > before:
                break
            if len(self._sealed) == 1 and not self._active_bytes:
                break  # no newer segment has the producers' states, which a restart needs
            first, size = self._sealed[0]
            path = segment_path(self.path, first)
            try:
                delete_segment(path)
            except OSError as error:
                raise _translate(error, self.path) from error
            del self._sealed[0]
            freed += size
        return freed

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
        log.error("journal %s ends at %d: going on at %d", self.path, self._last, position)
        self._seal()
        self._active_first, self._last = position, position - 1

    def close(self) -> None:
        """Close the files and stop the background check; the next start checks the rest."""
        if self._check is not None:
            self._check.stop()
        if self._active is not None:
            self._active.close()
            self._active = None
        if self._lock_handle is not None:
            os.close(self._lock_handle)
            self._lock_handle = None

    # -- helpers

    def _check_lock(self) -> None:
        """Check that the lock file is still the locked one.

        If the folder was deleted and created again, another process may hold the new lock.
        """
        assert self._lock_handle is not None, "closed"
        try:
            found = (self.path / LOCK_FILE).stat()
        except FileNotFoundError:
            found = None
        if found is None or not os.path.samestat(found, os.fstat(self._lock_handle)):
            raise Damaged(f"{LOCK_FILE} was deleted: start the receiver again")

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
        empty = self._last < self._active_first
        # Many producer states make a segment larger, so that they take a small part of it. Two
        # segments must fit into the budget, because the newest is never trimmed.
        states = min(4 * self._state_bytes, (self.budget - self._reserve) // 2)
        full = self._active_bytes + need > max(self.segment_bytes, states)
        return (full and not empty) or self._last - self._active_first + 1 >= MAX_RECORDS

    def _roll(self, need: int) -> None:
        """Begin a new segment after the last durable position.

        It starts with the states of all producers that were active within FORGET_SECONDS.

        Raises:
            Damaged: this is not the folder that was locked.
        """
        self._check_lock()
        self._seal()
        oldest = self._active_now() - FORGET_SECONDS
        for name in [name for name, state in self._states.items() if state.active < oldest]:
            log.info("journal %s: producer %s is forgotten: long idle", self.path, name)
            self._state_bytes -= state_bytes(name, self._states.pop(name))
        path = segment_path(self.path, self._active_first)
        size = 2 * max(self.segment_bytes, need) + 4 * self._state_bytes + (1 << 20)
        follows = self._sealed[-1][0] if self._sealed else 0
        fresh = create_segment(path, self._states, size, follows=follows)
        self._active = Segment(fresh, write=True)
        shutil.rmtree(publish_segment(fresh, path), ignore_errors=True)
        self._active_bytes = self._active.used()

    def _seal(self) -> None:
        """Close the active segment; if it has no records, the next segment replaces it."""
        self._close_active()
        path = segment_path(self.path, self._active_first)
        if self._last < self._active_first:
            return
        if path.exists():
            self._sealed.append((self._active_first, file_bytes(path)))
            self._active_first, self._active_bytes = self._last + 1, 0

    def _write(self, entries: Sequence[Entry]) -> Commit:
        segment = self._active
        assert segment is not None
        position, total, states = self._last, self._total, dict[str, ProducerState]()
        times = time.time(), self._active_now()
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
                txn.put(name.encode(), state.pack(), db=segment.producers)
            began = time.monotonic()
        # Leaving the block committed and fsynced the transaction, so the entries are durable.
        commit = Commit(self._last + 1, position, time.monotonic() - began)
        # If another process deleted the file, the commit went to the deleted file.
        if identity(path := segment_path(self.path, self._active_first)) != segment.key:
            raise Damaged(f"{path} was replaced by another")
        self._last, self._total = position, total
        self._active_bytes = segment.used()
        self._keep(states)
        return commit

    def _active_now(self) -> float:
        """Return the seconds for which writers have had the journal open, over all its runs."""
        return self._active_before + time.monotonic() - self._opened

    def _keep(self, states: Mapping[str, ProducerState]) -> None:
        """Store producer states that have become durable."""
        for name, state in states.items():
            if name in self._states:
                self._state_bytes -= state_bytes(name, self._states[name])
            self._states[name] = state
            self._state_bytes += state_bytes(name, state)

    def _close_active(self) -> None:
        """Close the active segment, so that the next append begins a new segment.

        After a failed commit the content of the file is unknown. The new segment may write the same
        positions again; readers use the newest segment that can contain a position.
        """
        if self._active is not None:
            self._active.close()
            self._active = None

    def _bytes_before(self, start: int, position: int) -> int | None:
        segment = Segment(segment_path(self.path, start))
        try:
            with (
                segment.env.begin(db=segment.records, buffers=True) as txn,
                txn.cursor() as cursor,
            ):
                if not cursor.set_range(key_of(position)):
                    return None
                head = unpack_head(cursor.value())
                return head.total - (head.end - head.header_at)
        finally:
            segment.close()


def _lock_for_writing(path: Path) -> int:
    """Lock the journal for writing; return the descriptor, which releases the lock when closed.

    Raises:
        JournalError: another process has the lock, or the folder cannot be used.
    """
    try:
        make_folder(path, mode=0o700)
        handle = open_file(path / LOCK_FILE, os.O_RDWR | os.O_CREAT)
    except (OSError, ValueError) as error:
        raise _translate(error, path) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise JournalError(
            f"journal {path} is being written by another process: stop the other receiver first"
        ) from None
    return handle


def _translate(error: Exception, path: Path) -> JournalError:
    """Return an error of LMDB or of the system as a JournalError."""
    text = str(error)
    full = isinstance(error, lmdb.DiskError) or any(
        word in text for word in ("No space left", "Disk quota", "Errno 28", "Errno 122")
    )
    kind = JournalFull if full else JournalError
    return kind(f"journal {path}: {text}")


class JournalReader:
    """A reader of records in order of position, which never blocks the writer.

    Each `read` uses its own transaction, so that the writer can reuse pages. One segment is open at
    a time. Not thread-safe.

    Args:
        path: the folder of the journal; it may be created later.

    Attributes:
        corrupt: damaged records skipped so far, plus segments that LMDB could not read. The intact
            records of such a segment are still returned.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.corrupt = 0
        self._open: Segment | None = None
        self._reported: set[int] = set()
        self._limited_log = RateLimitedLogger(log, lines=20)
        self._salvaged: tuple[Path | None, dict[int, bytes]] = (None, {})

    @property
    def id(self) -> str | None:
        """The id of the journal; None if the journal does not exist yet or has no id."""
        return journal_id(self.path)

    @property
    def first(self) -> int:
        """The oldest position on disk; last + 1 if there is none."""
        segments = list_segments(self.path)
        for _, path in segments:
            bounds = self._bounds(path)
            if bounds:
                return bounds[0]
        return segments[-1][0] if segments else 1

    @property
    def last(self) -> int:
        """The newest position on disk; first - 1 if there is none."""
        segments = list_segments(self.path)
        if not segments:
            return 0
        start, path = segments[-1]
        bounds = self._bounds(path)
        return bounds[1] if bounds else start - 1

    def read(self, position: int, max_bytes: int = 8 << 20) -> list[Record]:
        """Return records from `position` on, in order.

        Trimmed and damaged records are skipped; gaps in the returned positions show this. An empty
        list means that there are no records yet.

        Args:
            position: the first position to return, from 1.
            max_bytes: approximate size of all records together; at least one is returned.

        Raises:
            ValueError: `position` is below 1.
            NewerFormat: a later version wrote the journal.
        """
        if position < 1:
            raise ValueError(f"position {position}: positions start at 1")
        segments = list_segments(self.path, coming=True)
        for index, (start, path) in enumerate(segments):
            bound = segments[index + 1][0] if index + 1 < len(segments) else None
            if bound is not None and bound <= position:
                continue
            try:
                records = self._read(path, max(position, start), bound, max_bytes)
            except (Damaged, lmdb.Error, FileNotFoundError) as error:
                coming = is_coming(path)
                if not path.exists():
                    if coming:  # the writer is creating it, or replacing it by its intact records
                        return []
                    continue  # trimmed in the meantime
                self._count_corrupt(start, f"segment {path}: {error}")
                records = self._salvage(path, start, position, bound, max_bytes)
            if records:
                return records
        return []

    def close(self) -> None:
        """Close the open segment."""
        if self._open is not None:
            self._open.close()
            self._open = None

    def _segment(self, path: Path) -> Segment:
        held = self._open
        if held is not None and held.key == identity(path) and not held.is_cut_off():
            return held
        self.close()
        self._open = Segment(path)
        return self._open

    def _read(self, path: Path, position: int, bound: int | None, max_bytes: int) -> list[Record]:
        segment = self._segment(path)
        records: list[Record] = []
        size = 0
        with segment.env.begin(db=segment.records, buffers=True) as txn:
            cursor: Any = txn.cursor()
            more = cursor.set_range(key_of(position))
            while more and size < max_bytes:
                found = position_of(cursor.key())
                if bound is not None and found >= bound:
                    break
                try:
                    record = unpack_record(cursor.value())
                except Damaged as error:
                    self._count_corrupt(found, f"record {found}: {error}")
                else:
                    records.append(record)
                    size += len(record.header) + len(record.payload)
                more = cursor.next()
        return records

    def _salvage(
        self, path: Path, start: int, position: int, bound: int | None, max_bytes: int
    ) -> list[Record]:
        """Return the intact records of a damaged segment that the writer has not replaced yet."""
        if bound is None:  # the newest segment: the writer checks it before it begins another
            return []
        if self._salvaged[0] != path:
            self._salvaged = (path, salvage(path, start, bound))
        records: list[Record] = []
        size = 0
        for found, value in self._salvaged[1].items():
            if found >= position and size < max_bytes:
                records.append(unpack_record(memoryview(value)))
                size += len(value)
        return records

    def _bounds(self, path: Path) -> tuple[int, int] | None:
        try:
            return self._segment(path).bounds()
        except (Damaged, lmdb.Error, FileNotFoundError):
            return None

    def _count_corrupt(self, position: int, what: str) -> None:
        if position in self._reported:
            return
        self._reported.add(position)
        self.corrupt += 1
        self._limited_log.log(logging.ERROR, "damaged", f"journal: skipped damaged {what}")
