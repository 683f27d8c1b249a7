"""Recovery of a journal after a crash or disk damage: check the segments, rebuild the damaged."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue

from stream_ssl.durable import UNREAD, move, sync
from stream_ssl.journal import segment_check
from stream_ssl.journal.errors import LOCAL_DISK, is_unsuited
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

_PROGRESS_SECONDS = 5.0  # between two log lines about the progress of a check
_BLOCK = 1 << 20  # bytes per read
_TRIES = 3  # processes that may end, for another reason than damage, before a segment is checked
_CRASHES = {  # signals by which a damaged segment ends a process; SIGPROF: after CPU_SECONDS
    signal.SIGSEGV,
    signal.SIGBUS,
    signal.SIGABRT,
    signal.SIGFPE,
    signal.SIGILL,
    signal.SIGPROF,
}
_ASIDE = "damaged-"  # in the names of damaged segments
_MOST_ASIDE = 16  # originals of damaged segments that are kept, because a failing disk makes many
_AT_ONCE = 256  # segments that one process checks, because systems limit the length of a command


@dataclass(slots=True)
class RecoveredJournal:
    """The content of a journal's folder after recovery."""

    segments: list[tuple[int, int]] = field(default_factory=list)  # (first position, bytes)
    states: dict[str, ProducerState] = field(default_factory=dict)
    last: int = 0  # the newest position that may have been given to a record
    total: int = 0  # bytes of header and payload ever journalled
    damaged: int = 0  # damaged and missing segments
    dropped: int = 0  # first position of the last segment that had no intact record
    unchecked: list[tuple[int, Path]] = field(default_factory=list)  # older segments, not opened


def recover(folder: Path, check: bool) -> RecoveredJournal:
    """Find the segments, and replace damaged segments by new ones with their intact records.

    Segments are opened from the newest back to the first intact segment with records, which has
    everything that a writer needs. Older segments are returned as `unchecked`, so that a `Check`
    can read them while the journal is in use.

    Args:
        folder: the folder of the journal.
        check: check the segments for damage.

    Raises:
        NewerFormat: a later version wrote a segment.
        OSError, lmdb.Error: the intact records of a damaged segment cannot be written.
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
        if path not in damaged and _has_all(path):
            break
    found = RecoveredJournal([(first, file_bytes(path)) for first, path in segments[:begin]])
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
        found.segments.pop()  # it has no records, and the next segment replaces it
    return found


def _has_all(path: Path) -> bool:
    """Return whether a segment has records, and intact states of the producers."""
    try:
        with closing(Segment(path)) as segment:
            segment.states()
            return segment.bounds() is not None
    except Damaged:
        return False


def _add_segment(found: RecoveredJournal, first: int, path: Path) -> None:
    """Add an intact segment, which is newer than all segments added before."""
    with closing(Segment(path)) as segment:
        bounds, states = segment.bounds(), segment.states()
        before = found.segments[-1][0] if found.segments else 0
        if before and is_gap(path.parent, segment.follows, before, found.dropped):
            found.damaged += 1
        if bounds:
            found.total = max(found.total, segment.newest_total())
    found.states = states  # each segment has the states of all producers that are not forgotten
    found.segments.append((first, file_bytes(path)))
    found.last = max(first - 1, bounds[1] if bounds else 0)


def is_gap(folder: Path, follows: int, *before: int) -> bool:
    """Return whether the segment before a segment is missing; log an error if it is.

    Args:
        folder: the folder of the journal.
        follows: the first position of the segment that should precede it; 0: unknown.
        *before: the first positions of the segments that may precede it.
    """
    if follows in (0, *before):
        return False
    log.error(
        "journal %s: the segment that began at record %d is missing, and its records are lost; "
        "check the disk, and which other programs write there",
        folder,
        follows,
    )
    return True


def _rebuild_segment(
    found: RecoveredJournal, first: int, path: Path, bound: int | None, error: Exception
) -> None:
    found.damaged += 1
    follows = found.segments[-1][0] if found.segments else 0
    if replace_damaged(path, first, bound, follows, found.states, str(error)):
        _add_segment(found, first, path)
    else:
        found.dropped = first
    if bound is None:  # its last position is unknown: leave a gap, to use no position twice
        found.last = first + MAX_RECORDS


def replace_damaged(
    path: Path,
    first: int,
    bound: int | None,
    follows: int,
    states: Mapping[str, ProducerState],
    fault: str,
) -> bool:
    """Replace a damaged segment by its intact records and move the original aside.

    Args:
        path, first, bound: as in `salvage`.
        follows: the first position of the previous segment; 0: none.
        states: the states of the producers at the end of the previous segment.
        fault: a description of the damage, for the log.

    Returns:
        Whether there were any intact records. If not, no new segment is written.

    Raises:
        OSError, lmdb.Error: the intact records cannot be read or written; nothing was changed.
    """
    values = salvage(path, first, bound)
    damaged = path
    if values:
        size = sum(disk_bytes(len(value)) for value in values.values()) + (4 << 20)
        fresh = create_segment(path, states_after(states, values), size, values, follows)
        damaged = publish_segment(fresh, path)
    aside = _set_aside(damaged, path)
    log.error(
        "journal segment %s is damaged: %s; its %d intact records were kept, and the original was "
        "moved to %s",
        path.name,
        fault,
        len(values),
        aside,
    )
    return bool(values)


def _set_aside(damaged: Path, path: Path) -> Path:
    """Move a damaged segment out of the journal's folder, and return its new path.

    The segment stays within the folder, under another name, if the folder is a mount point or its
    parent is not writable. Only the newest _MOST_ASIDE of such segments are kept.
    """
    folder = path.parent
    name = f"{_ASIDE}{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{path.name}"
    try:
        aside = move(damaged, folder.with_name(f"{folder.name}.{name}"))
    except OSError:
        aside = move(damaged, folder / name)
    sync(folder)
    beginning = aside.name.partition(_ASIDE)[0] + _ASIDE
    with suppress(OSError):  # the parent may not be readable
        kept = sorted(one for one in aside.parent.iterdir() if one.name.startswith(beginning))
        for older in kept[:-_MOST_ASIDE]:
            shutil.rmtree(older)
            log.warning("%s was removed; %d newer damaged segments stay", older, _MOST_ASIDE)
    return aside


@dataclass(frozen=True, slots=True)
class CheckedSegment:
    """The result of checking a segment."""

    path: Path
    follows: int = 0  # the first position of the previous segment, stored in this one; 0: unknown
    fault: str | None = None  # the damage; None: the segment is intact


class Check:
    """A check of segments in separate processes, because a damaged segment can crash a process.

    Iterating yields a `CheckedSegment` for each segment, in order, without a time limit. A process
    that somebody kills, such as a service manager, says nothing about its segment. Another process
    then reads the segment again.

    Raises:
        OSError: while iterating: no process can read a segment, for another reason than damage.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = list(paths)
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False

    def __iter__(self) -> Iterator[CheckedSegment]:
        progress = RateLimitedLogger(log, _PROGRESS_SECONDS)
        checked, count, tries = 0, len(self._paths), 0
        while checked < count and not self._stopped:
            end = min(checked + _AT_ONCE, count)
            with self._start(self._paths[checked:end]) as process:
                assert process.stdout is not None
                assert process.stderr is not None
                # There is no time limit, because a slow or busy disk is not damage.
                for line in process.stdout:
                    if line.startswith(b"good "):
                        yield CheckedSegment(self._paths[checked], int(line.split()[2]))
                        checked, tries = checked + 1, 0
                    text = f"journal: {checked} of {count} segments checked for damage"
                    progress.log(logging.INFO, "check", text)
                lines = process.stderr.read().decode(errors="replace").strip().splitlines()
            if checked == end or self._stopped:
                continue
            path, status = self._paths[checked], process.returncode
            said = lines[-1] if lines else f"reading it ends the process (status {status})"
            if _is_damage(status, said):
                yield CheckedSegment(path, fault=said)
                checked, tries = checked + 1, 0
            elif (tries := tries + 1) == _TRIES:
                raise OSError(f"{path.name} cannot be checked for damage: {said}; {_remedy(said)}")

    def stop(self) -> None:
        """Kill the process, which ends the iteration. Any thread may call this."""
        self._stopped = True
        if self._process is not None:
            self._process.kill()

    def _start(self, paths: Sequence[Path]) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", segment_check.__file__, *map(str, paths)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        if self._stopped:  # `stop` was called before the process existed
            self._process.kill()
        return self._process


def _is_damage(status: int, said: str) -> bool:
    """Return whether a segment ended the process that read it, and not something else."""
    if status == segment_check.DAMAGED:
        return not any(os.strerror(number) in said for number in UNREAD)
    return -status in _CRASHES


def _remedy(said: str) -> str:
    """Return the remedy for an error of a check that is no damage."""
    if any(os.strerror(number) in said for number in (errno.EACCES, errno.EPERM)):
        return "let the receiver's user read it (chown)"
    if is_unsuited(said):
        return LOCAL_DISK
    return "check the installation and the free memory, and start the receiver again"


class BackgroundCheck:
    """A `Check` that runs in a thread while the journal is in use."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._check = Check(paths)
        self._found: SimpleQueue[CheckedSegment] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="journal check", daemon=True)
        if paths:
            self._thread.start()

    def take(self, wait: bool = False) -> list[CheckedSegment]:
        """Return the segments checked since the last call; `wait` blocks until all are checked."""
        if wait and self._thread.is_alive():
            self._thread.join()
        return [self._found.get() for _ in range(self._found.qsize())]

    def stop(self) -> None:
        """Stop the check, finished or not."""
        self._check.stop()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        try:
            for checked in self._check:
                self._found.put(checked)
        except OSError as error:  # such as no memory for a process
            log.error("journal: old segments are not checked before the next start: %s", error)


def salvage(path: Path, first: int, bound: int | None) -> dict[int, bytes]:
    """Return position -> packed record for all intact records in a segment's data file.

    LMDB writes a value in one piece. Records can therefore be found by their magic number and
    verified by their checksums without LMDB's tree. The file may also contain records of a failed
    commit; of several records at one position, the last received is used.

    Args:
        path: the folder of the segment.
        first: the first position of the segment.
        bound: the first position of the following segment, or None if there is none.

    Raises:
        OSError: the file cannot be opened, which says nothing about its content.
    """
    found: dict[int, tuple[Head, bytes]] = {}
    try:
        data = _read(path / "data.mdb")
    except OSError as error:
        if error.errno in UNREAD:
            raise
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
    """Return the content of a file, with zeros for pages that the disk cannot read.

    The file is not mapped into memory, because a bad sector would then kill the process.

    Raises:
        OSError: the file cannot be opened.
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
            following = at + head.end  # skip the payload, which may contain the magic number
        at = data.find(RECORD_MAGIC, following)


def states_after(
    states: Mapping[str, ProducerState], values: Mapping[int, bytes]
) -> dict[str, ProducerState]:
    """Return the producer states after the salvaged records `values`.

    Args:
        states: the states before these records.
        values: position -> packed record, in order.
    """
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
