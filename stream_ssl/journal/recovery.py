"""Opening a journal after a crash or disk damage: finds the good segments, rebuilds the others."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue

from stream_ssl.durable import sync
from stream_ssl.journal import segment_check
from stream_ssl.journal.segment import (
    MAX_RECORDS,
    PAGE,
    RECORD_MAGIC,
    Damaged,
    Head,
    ProducerState,
    Record,
    Segment,
    create_segment,
    disk_bytes,
    file_bytes,
    finish_interrupted,
    list_segments,
    publish_segment,
    unpack_head,
    unpack_record,
)
from stream_ssl.rate_limited_logger import RateLimitedLogger
from stream_ssl.wire import Data, WireError

log = logging.getLogger(__name__)

_PROGRESS_SECONDS = 5.0  # between two lines about how far a check has come
_BLOCK = 1 << 20  # read at once


@dataclass(slots=True)
class Recovered:
    """What a journal's folder holds."""

    segments: list[tuple[int, int]] = field(default_factory=list)  # (first position, bytes)
    states: dict[str, ProducerState] = field(default_factory=dict)
    last: int = 0  # the newest position that may have been given to a record
    total: int = 0  # bytes of header and payload ever journalled
    damaged: int = 0  # segments, missing ones included
    dropped: int = 0  # first position of the last segment that had no intact record
    unchecked: list[tuple[int, Path]] = field(default_factory=list)  # older ones, not opened yet


def recover(folder: Path, check: bool) -> Recovered:
    """Finds the segments, and replaces damaged ones by new ones of their intact records.

    Only the newest are looked into, back to a good one with records, for all that a writer must
    know stands there. Those before it are `unchecked`, for a `Check` while the journal is in use.

    Raises:
        NewerFormat: a later version wrote them.
        OSError, lmdb.Error: the disk does not take the intact records of a damaged segment.
    """
    finish_interrupted(folder)
    segments = list_segments(folder)
    damaged: dict[Path, str] = {}
    begin = len(segments)
    while begin > 0:
        begin -= 1
        path = segments[begin][1]
        if check:
            damaged |= {c.path: c.fault for c in Check([path]) if c.fault is not None}
        if path not in damaged and _holds_records(path):
            break
    found = Recovered([(first, file_bytes(path)) for first, path in segments[:begin]])
    found.unchecked = segments[:begin] if check else []
    for index, (first, path) in enumerate(segments[begin:], begin):
        bound = segments[index + 1][0] if index + 1 < len(segments) else None
        try:
            if path in damaged:
                raise Damaged(damaged[path])
            _add_segment(found, first, path)
        except Damaged as error:
            _rebuild_segment(found, first, path, bound, error)
    if found.segments and found.segments[-1][0] > found.last:
        found.segments.pop()  # without records: the next segment takes its place
    return found


def _holds_records(path: Path) -> bool:
    try:
        segment = Segment(path)
    except Damaged:
        return False
    try:
        return segment.bounds() is not None
    finally:
        segment.close()


def _add_segment(found: Recovered, first: int, path: Path) -> None:
    """Adds a good segment, the newest so far."""
    segment = Segment(path)
    try:
        bounds, states = segment.bounds(), segment.states()
        before = found.segments[-1][0] if found.segments else 0
        if before and is_gap(path.parent, segment.follows, before, found.dropped):
            found.damaged += 1
        if bounds:
            found.total = max(found.total, segment.newest_total())
    finally:
        segment.close()
    found.states = states  # each segment has those of all producers not forgotten
    found.segments.append((first, file_bytes(path)))
    found.last = max(first - 1, bounds[1] if bounds else 0)


def is_gap(folder: Path, follows: int, *before: int) -> bool:
    """Whether the segment that another says it follows is none of those before it; logs that."""
    if follows in (0, *before):
        return False
    log.error(
        "journal %s: the segment that began at record %d is gone, and its records with it; "
        "look after the disk, and at who else writes there",
        folder,
        follows,
    )
    return True


def _rebuild_segment(
    found: Recovered, first: int, path: Path, bound: int | None, error: Exception
) -> None:
    found.damaged += 1
    follows = found.segments[-1][0] if found.segments else 0
    if replace_damaged(path, first, bound, follows, found.states, str(error)):
        _add_segment(found, first, path)
    else:
        found.dropped = first
    if bound is None:  # how far it went is unknown: leave a gap, so that no position is used twice
        found.last = first + MAX_RECORDS


def replace_damaged(
    path: Path,
    first: int,
    bound: int | None,
    follows: int,
    states: Mapping[str, ProducerState],
    fault: str,
) -> bool:
    """Puts a segment of the intact records in a damaged one's place, and sets that aside; whether
    there were any.

    Args:
        path, first, bound: as of `salvage`.
        follows: first position of the previous segment; 0: none.
        states: of the producers, as of that one.
        fault: what is wrong, for the log.

    Raises:
        OSError, lmdb.Error: the disk does not take the intact records; all is as before.
    """
    values = salvage(path, first, bound)
    damaged = path
    if values:
        size = sum(disk_bytes(len(value)) for value in values.values()) + (4 << 20)
        fresh = create_segment(path, states_after(states, values), size, values, follows)
        damaged = publish_segment(fresh, path)
    aside = _set_aside(damaged, path)
    log.error(
        "journal segment %s is damaged: %s; %d intact records were taken over, the original was "
        "set aside as %s",
        path.name,
        fault,
        len(values),
        aside,
    )
    return bool(values)


def _set_aside(damaged: Path, path: Path) -> Path:
    """Moves a damaged segment out of its journal's folder; within it, where that is a disk of its
    own or nothing may be written beside it. Returns where it is."""
    folder = path.parent
    name = f"damaged-{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{path.name}"
    try:
        aside = damaged.rename(folder.with_name(f"{folder.name}.{name}"))
    except OSError:
        aside = damaged.rename(folder / name)
    sync(folder)
    return aside


@dataclass(frozen=True, slots=True)
class Checked:
    """A segment that was read through."""

    path: Path
    follows: int = 0  # first position of the previous segment, as this one tells it; 0: unknown
    fault: str | None = None  # why it cannot be read through


class Check:
    """Reads segments through, in a process of its own, which a damaged one may end.

    Iterating gives a `Checked` for each, in order; it waits for the disk as long as that takes.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = list(paths)
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False

    def __iter__(self) -> Iterator[Checked]:
        progress = RateLimitedLogger(log, _PROGRESS_SECONDS)
        checked, count = 0, len(self._paths)
        while checked < count and not self._stopped:
            with self._start(self._paths[checked:]) as process:
                assert process.stdout is not None
                assert process.stderr is not None
                # However long it takes: a disk that is slow, or busy, holds no damaged segments.
                for line in process.stdout:
                    if line.startswith(b"good "):
                        yield Checked(self._paths[checked], int(line.split()[2]))
                        checked += 1
                    text = f"journal: {checked} of {count} segments checked for damage"
                    progress.log(logging.INFO, "check", text)
                said = process.stderr.read().decode(errors="replace").strip().splitlines()
            if checked < count and not self._stopped:
                status = f"reading it ends the process (status {process.returncode})"
                yield Checked(self._paths[checked], fault=said[-1] if said else status)
                checked += 1

    def stop(self) -> None:
        """Ends the process, and so the iteration; from any thread."""
        self._stopped = True
        if self._process is not None:
            self._process.kill()

    def _start(self, paths: Sequence[Path]) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-I", segment_check.__file__, *map(str, paths)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        if self._stopped:  # meanwhile
            self._process.kill()
        return self._process


class BackgroundCheck:
    """A `Check` in a thread, while the journal is in use."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._check = Check(paths)
        self._found: SimpleQueue[Checked] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="journal check", daemon=True)
        if paths:
            self._thread.start()

    def take(self, wait: bool = False) -> list[Checked]:
        """What was checked since the last call; with `wait`, all that is left to be."""
        if wait and self._thread.is_alive():
            self._thread.join()
        return [self._found.get() for _ in range(self._found.qsize())]

    def stop(self) -> None:
        """Ends it, finished or not."""
        self._check.stop()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        try:
            for checked in self._check:
                self._found.put(checked)
        except OSError as error:  # no memory for a process, say
            log.error("journal: old segments are not checked before the next start: %s", error)


def salvage(path: Path, first: int, bound: int | None) -> dict[int, bytes]:
    """Position -> packed record, of all intact records in a segment's data file.

    LMDB writes a value in one piece, so records can be found by their magic and verified by their
    checksums without its tree. A file may also hold old copies, of a commit that failed: the one
    received last is taken.

    Args:
        path: the segment.
        first: its first position.
        bound: the following segment's, if there is one.
    """
    found: dict[int, tuple[Head, bytes]] = {}
    try:
        data = _read(path / "data.mdb")
    except OSError as error:
        log.error("journal: nothing can be read from %s: %s", path / "data.mdb", error)
        return {}
    for head, value in _intact_records(data):
        if head.position < first or (bound is not None and head.position >= bound):
            continue
        other = found.get(head.position)
        if other is None or other[0].received <= head.received:
            found[head.position] = (head, value)
    return {position: found[position][1] for position in sorted(found)}


def _read(path: Path) -> bytes:
    """A file's content, with zeros where the disk cannot read it: mapped into memory, a bad sector
    would kill the process.

    Raises:
        OSError: there is no such file.
    """
    with path.open("rb", buffering=0) as file:
        data = bytearray(os.fstat(file.fileno()).st_size)
        at, faults = 0, 0
        while at < len(data):
            try:
                count = os.preadv(file.fileno(), [memoryview(data)[at : at + _BLOCK]], at)
            except OSError as error:
                faults += 1
                if faults == 1:
                    log.error("journal: %s cannot be read at byte %d: %s", path, at, error)
                at = (at // PAGE + 1) * PAGE
            else:
                if count == 0:
                    break  # truncated in the meantime
                at += count
    return bytes(data)


def _intact_records(data: bytes) -> Iterator[tuple[Head, bytes]]:
    at = data.find(RECORD_MAGIC)
    while at >= 0:
        following = at + 1
        try:
            head = unpack_head(memoryview(data[at : at + PAGE]))
            value = data[at : at + head.end]
            unpack_record(memoryview(value))
        except (Damaged, UnicodeDecodeError):
            pass
        else:
            yield head, value
            following = at + head.end  # a magic within a payload is the producer's data
        at = data.find(RECORD_MAGIC, following)


def states_after(
    states: Mapping[str, ProducerState], values: Mapping[int, bytes]
) -> dict[str, ProducerState]:
    """The producers' states after salvaged records, from those before them."""
    after = dict(states)
    newest = max((state.active for state in states.values()), default=0.0)
    for value in values.values():
        record = unpack_record(memoryview(value))
        if record.sequence > after.get(record.producer, ProducerState()).sequence:
            after[record.producer] = ProducerState(
                record.sequence, _resume_token(record), record.received, newest
            )
    return after


def _resume_token(record: Record) -> object:
    try:
        return Data(record.sequence, record.header, record.payload).position
    except WireError:
        return None
