"""The journal: what producers sent, in order and on disk, between receiver and learner.

**A sample is durable when `Journal.append` returns**: its LMDB transaction is on disk by then. No
other place decides it; `group_commit.py` calls it, and only then is the packet acknowledged.

A journal is a sequence of segments, each an LMDB environment (`segment.py`). Appending fills the
newest, trimming deletes whole ones. A single environment would need less code, but its pages stay
mapped: at a budget of 4 GiB the writer's resident set reaches 4 GiB, and trimming would have to
write to the full disk that it is meant to free.
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
"""A producer that sends nothing for so long is forgotten when a segment begins.

Its state takes up to 13 KB of each segment. Time counts while a writer has the journal open."""

MIN_SEGMENT = 256 << 10
MAX_SEGMENT = 64 << 20
LOCK_FILE = "writer.lock"
_TREE = 16 * PAGE  # beside a transaction's values; the first of a new segment takes up to 12
_CLOCK_SET = 1_577_836_800  # 2020: a clock that says less was not set when it was asked


class JournalError(Exception):
    """Nothing of the append was kept; the same append may be tried again later."""


class JournalFull(JournalError):
    """No room: the budget is used up, or the disk is."""


@dataclass(frozen=True, slots=True)
class Commit:
    """What an append wrote: positions first..last (last < first: no record)."""

    first: int
    last: int
    seconds: float  # in the transaction's commit, which is nearly all fsync


class Journal:
    """The only writer of a journal.

    Opening needs no operator: a damaged segment is set aside (beside the folder, as
    `<name>.damaged-<time>-<segment>`, or within it), replaced by its intact records and counted in
    `damaged`. The newest is checked at once, and the journal can then be used; a process of its own
    reads the older ones meanwhile, and `take_checked` deals with what it has found.

    Args:
        path: folder of the journal; made if missing.
        budget: bytes on disk, at least 1 MiB.
        segment_bytes: size at which a new segment begins; an eighth of the budget, or of the room
            on the disk, within 256 KiB and 64 MiB. Another size is for tests.
        check: whether segments are searched for damage, the old ones in the background; False
            is for tests.

    Attributes:
        id: of this journal alone, as `identify` found or gave it; positions are of one journal.

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
        # Idle time is counted by running time: the wall clock may jump.
        self._opened = time.monotonic()
        self._active_before = max((s.active for s in found.states.values()), default=0.0) or 1.0
        wall = time.time()
        self._states = {  # format 1 has neither time, format 2 only the first one
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
        # First position -> that of the segment before; not to be opened here before it is checked.
        self._unchecked = dict(zip(starts, [0, *starts], strict=False))
        self._check = BackgroundCheck(older)
        # The first append begins a new segment. An older one is only ever read, so that damage to
        # LMDB's list of free pages, which no reader notices, does no harm.
        self._active_first = found.last + 1

    # -- state

    @property
    def bytes(self) -> int:
        """Bytes on disk."""
        return sum(size for _, size in self._sealed) + self._active_bytes

    @property
    def room(self) -> int:
        """Bytes that can still be appended within the budget; trimming brings it back."""
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
        """Bytes that a new segment takes before its first record."""
        return _TREE + self._state_bytes

    def producers(self) -> dict[str, ProducerState]:
        """Name -> durable state, of every producer that was journalled and not forgotten."""
        return dict(self._states)

    def state(self, producer: str) -> ProducerState:
        """The durable state of one producer; sequence 0 if it is unknown."""
        return self._states.get(producer, ProducerState())

    def bytes_after(self, position: int) -> int:
        """Bytes of header and payload from `position` on: the lag of a reader that is there."""
        position = max(position, self.first)
        if position > self._last:
            return 0
        firsts = [*(first for first, _ in self._sealed), self._active_first]
        start = max(first for first in firsts if first <= position)
        if start in self._unchecked:  # at most
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
        """Writes entries in one transaction. When this returns they are on disk: durable.

        Raises:
            ValueError: a producer's sequence does not grow.
            JournalFull: no room in the budget or on the disk; nothing was written.
            JournalError: the disk failed, or somebody deleted the journal; nothing was written.
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
        """Replaces old segments that the check has found damaged since the last call; never raises.

        Args:
            wait: until all are checked.
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
        """The states in the segment that begins at `first`; none where there is no such, or not a
        good one."""
        try:
            segment = Segment(segment_path(self.path, first))
        except Damaged:
            return {}
        try:
            return segment.states()
        finally:
            segment.close()

    def count_fitting(self, entries: Sequence[Entry]) -> int:
        """How many of the entries, from the first on, the budget has room for."""
        room = self.budget - self.bytes - self._reserve
        return sum(size <= room for size in accumulate(map(entry_bytes, entries)))

    def trim(self, before: int, seconds: float = float("inf")) -> int:
        """Delete segments that lie wholly below position `before`; return the bytes freed.

        Needs no free space. Deletes one at least; once `seconds` are over, the next call goes on.

        Raises:
            JournalError: the disk refuses to delete.
        """
        freed, end = 0, time.monotonic() + seconds
        while self._sealed and (not freed or time.monotonic() < end):
            following = self._sealed[1][0] if len(self._sealed) > 1 else self._active_first
            if following > before:
                break
            if len(self._sealed) == 1 and not self._active_bytes:
                break  # nothing newer has the producers' states: a restart would forget them
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
        """Frees the active segment's slots of dead readers; returns how many there were."""
        return int(self._active.env.reader_check()) if self._active is not None else 0

    def identify(self, known: str | None = None) -> None:
        """Gives the journal an id, durably, if it has none: a new journal, one of an earlier
        release, or one whose id is damaged.

        Args:
            known: what its consumer calls the journal; taken where there are records.
        """
        if self.id is not None:
            return
        fresh = known if known and list_segments(self.path) else secrets.token_hex(8)
        try:
            write(self.path / ID_FILE, f"{fresh}\n{fresh}\n", mode=0o600)
        except OSError as error:  # the disk is full, say: it must be emptied first
            log.warning("journal %s has no id until the next start: %s", self.path, error)
        else:
            self.id = fresh

    def skip_to(self, position: int) -> None:
        """Gives the next record at least this position.

        A learner may have read further than a journal reaches that was lost and started again: at
        a position that it has read, it would skip a new record.
        """
        if position <= self._last + 1:
            return
        log.error("journal %s ends at %d: going on at %d", self.path, self._last, position)
        self._seal()
        self._active_first, self._last = position, position - 1

    def close(self) -> None:
        """Closes the files; everything appended is on disk already. What is not checked yet will
        be at the next start."""
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
        """In a folder that was deleted and made again, another process may hold the lock."""
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
        # Larger where the states of producers are, so that these take little of it, but so small
        # that another one can begin: the newest is never trimmed.
        states = min(4 * self._state_bytes, (self.budget - self._reserve) // 2)
        full = self._active_bytes + need > max(self.segment_bytes, states)
        return (full and not empty) or self._last - self._active_first + 1 >= MAX_RECORDS

    def _roll(self, need: int) -> None:
        """Begins a new segment after the last durable position, with the states of all producers
        that were active within FORGET_SECONDS.

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
        """Closes the active segment; if it has no records, the next one takes its place."""
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
        # Leaving the block committed the transaction, fsync included: the entries are durable ...
        commit = Commit(self._last + 1, position, time.monotonic() - began)
        # ... unless somebody has deleted the file, which takes what is written until it is closed.
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
        """Take over states that are durable."""
        for name, state in states.items():
            if name in self._states:
                self._state_bytes -= state_bytes(name, self._states[name])
            self._states[name] = state
            self._state_bytes += state_bytes(name, state)

    def _close_active(self) -> None:
        """The next append begins a new segment: after a failed commit the file is in doubt.

        The new segment writes positions again that the failed commit may have left, and readers
        take a position from the newest segment that can have it.
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
    """A descriptor whose closing frees the journal for another writer.

    Raises:
        JournalError: another process has it, or the folder cannot be used.
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
    """LMDB's or the system's error as a JournalError."""
    text = str(error)
    full = isinstance(error, lmdb.DiskError) or any(
        word in text for word in ("No space left", "Disk quota", "Errno 28", "Errno 122")
    )
    kind = JournalFull if full else JournalError
    return kind(f"journal {path}: {text}")


class JournalReader:
    """Reads records in order of position, also while another process writes; never blocks it.

    A transaction lasts for one read(), so that the writer can reuse pages; one segment is open at a
    time. Not thread-safe.

    Args:
        path: the journal's folder; it may be created later.

    Attributes:
        corrupt: damaged records skipped so far, and segments in whose tree LMDB found damage: of
            these the intact records are read all the same.
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
        """Of the journal; None if it is not there yet, or has none."""
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
        """Records from `position` on, of about `max_bytes` together and at least one.

        Trimmed and damaged records are left out: compare the positions returned. An empty list
        means that there is nothing yet.

        Raises:
            ValueError: position below 1.
            NewerFormat: the journal is of a later version.
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
                    if coming:  # begun, or exchanged for one of its intact records
                        return []
                    continue  # trimmed in the meantime
                self._count_corrupt(start, f"segment {path}: {error}")
                records = self._salvage(path, start, position, bound, max_bytes)
            if records:
                return records
        return []

    def close(self) -> None:
        """Closes the segment that is open."""
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
        """Intact records of a damaged segment, which its writer has not replaced by them yet."""
        if bound is None:  # the newest: checked before anything is written behind it
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
