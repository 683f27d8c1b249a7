"""What can be had back of a damaged journal: good segments, and the records of bad ones."""

from __future__ import annotations

import logging
import mmap
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from stream_ssl.durable import sync
from stream_ssl.ingest import segment_check
from stream_ssl.ingest.layout import (
    MAGIC,
    Damaged,
    Head,
    ProducerState,
    Record,
    disk_bytes,
    unpack_head,
    unpack_record,
)
from stream_ssl.ingest.segment import (
    MAX_RECORDS,
    Segment,
    create_segment,
    file_bytes,
    list_segments,
    publish_segment,
    tidy,
)
from stream_ssl.ingest.seldom import SeldomLog
from stream_ssl.wire import Data, WireError

log = logging.getLogger(__name__)

_TELL_SECONDS = 5.0  # between two lines about how far a check has come


@dataclass(slots=True)
class Recovered:
    """What a journal's folder holds."""

    segments: list[tuple[int, int]] = field(default_factory=list)  # (first position, bytes)
    states: dict[str, ProducerState] = field(default_factory=dict)
    last: int = 0  # the newest position that may have been given out
    total: int = 0  # bytes of header and payload ever journalled
    damaged: int = 0  # segments, those included that are gone
    dropped: int = 0  # first position of the last one that nothing was left of


def recover(folder: Path, check: bool) -> Recovered:
    """Finds the segments, and puts others with what is intact in the place of damaged ones.

    Raises:
        NewerFormat: a later version wrote them.
        OSError, lmdb.Error: the disk does not take the intact records of a damaged segment.
    """
    tidy(folder)
    found = Recovered()
    segments = list_segments(folder)
    damaged = find_damaged([path for _, path in segments]) if check else {}
    for index, (first, path) in enumerate(segments):
        bound = segments[index + 1][0] if index + 1 < len(segments) else None
        try:
            if path in damaged:
                raise Damaged(damaged[path])
            _adopt(found, first, path)
        except Damaged as error:
            _repair(found, first, path, bound, error)
    if found.segments and found.segments[-1][0] > found.last:
        found.segments.pop()  # without records: the next one takes its place
    return found


def _adopt(found: Recovered, first: int, path: Path) -> None:
    """Takes a segment over, the newest so far."""
    segment = Segment(path)
    try:
        bounds, states = segment.bounds(), segment.states()
        if found.segments and segment.follows not in (0, found.segments[-1][0], found.dropped):
            found.damaged += 1
            log.error(
                "journal %s: the segment that began at record %d is gone, and its records with it; "
                "look after the disk, and at who else writes there",
                path.parent,
                segment.follows,
            )
        if bounds:
            found.total = max(found.total, segment.newest_total())
    finally:
        segment.close()
    found.states = states  # each segment has those of all producers not forgotten
    found.segments.append((first, file_bytes(path)))
    found.last = max(first - 1, bounds[1] if bounds else 0)


def _repair(found: Recovered, first: int, path: Path, bound: int | None, error: Exception) -> None:
    """Sets a damaged segment aside; one of its intact records takes its place."""
    found.damaged += 1
    values = salvage(path, first, bound)
    stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
    folder = path.parent
    aside = folder.with_name(f"{folder.name}.damaged-{stamp}-{path.name}")
    fresh = None
    if values:
        size = sum(disk_bytes(len(value)) for value in values.values()) + (4 << 20)
        follows = found.segments[-1][0] if found.segments else 0
        states = states_after(found.states, values)
        fresh = create_segment(path, states, size, values, follows)
    path.rename(aside)
    if fresh is not None:
        publish_segment(fresh, path)
        _adopt(found, first, path)
    else:
        found.dropped = first
    if bound is None:  # what came after its last intact record is unknown: leave it a gap
        found.last = first + MAX_RECORDS
    sync(folder)
    log.error(
        "journal segment %s is damaged: %s; %d intact records were taken over, the original was "
        "set aside as %s",
        path.name,
        error,
        len(values),
        aside,
    )


def find_damaged(paths: Sequence[Path]) -> dict[Path, str]:
    """The segments that cannot be walked through, each with what was seen."""
    damaged: dict[Path, str] = {}
    rest, progress = list(paths), SeldomLog(log, _TELL_SECONDS)
    while rest:

        def tell(good: int, done: int = len(paths) - len(rest)) -> None:
            text = f"journal: {done + good} of {len(paths)} segments checked for damage"
            progress.tell(logging.INFO, "check", text)

        good, reason = _check(rest, tell)
        rest = rest[good:]
        if rest:
            damaged[rest.pop(0)] = reason
    return damaged


def _check(paths: Sequence[Path], tell: Callable[[int], None]) -> tuple[int, str]:
    """How many of the segments are good before the first that is not, and what that one does.

    However long it takes: a disk that is slow, or busy, holds no damaged segments.
    """
    command = [sys.executable, "-I", segment_check.__file__, *map(str, paths)]
    good = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        for line in process.stdout:
            good += line.startswith(b"good ")
            tell(good)
        said = process.stderr.read().decode(errors="replace").strip().splitlines()
    return good, said[-1] if said else f"reading it ends the process (status {process.returncode})"


def salvage(path: Path, first: int, bound: int | None) -> dict[int, bytes]:
    """Position -> packed record, of all intact records in a segment's data file.

    LMDB lays a value down in one piece, so that records can be found by their magic and known by
    their checksums without its tree. A file may hold old copies too, of a commit that failed: the
    one received last counts.

    Args:
        path: the segment.
        first: its first position.
        bound: the following segment's, if there is one.
    """
    found: dict[int, tuple[Head, bytes]] = {}
    for head, value in _scan(path / "data.mdb"):
        if head.position < first or (bound is not None and head.position >= bound):
            continue
        before = found.get(head.position)
        if before is None or before[0].received <= head.received:
            found[head.position] = (head, value)
    return {position: found[position][1] for position in sorted(found)}


def _scan(path: Path) -> list[tuple[Head, bytes]]:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return list(_intact(data))
    except (OSError, ValueError) as error:  # no file, or an empty one
        log.error("journal: nothing can be read from %s: %s", path, error)
        return []


def _intact(data: mmap.mmap) -> list[tuple[Head, bytes]]:
    records, at = [], data.find(MAGIC)
    while at >= 0:
        following = at + 1
        try:
            value = data[at : at + 4096]
            head = unpack_head(memoryview(value))
            value = data[at : at + head.end]
            unpack_record(memoryview(value))
        except (Damaged, UnicodeDecodeError):
            pass
        else:
            records.append((head, value))
            following = at + head.end  # what lies within a record's payload is its sender's
        at = data.find(MAGIC, following)
    return records


def states_after(
    states: Mapping[str, ProducerState], values: Mapping[int, bytes]
) -> dict[str, ProducerState]:
    """The producers' states when salvaged records follow upon `states`."""
    after = dict(states)
    for value in values.values():
        record = unpack_record(memoryview(value))
        if record.sequence > after.get(record.producer, ProducerState()).sequence:
            after[record.producer] = ProducerState(
                record.sequence, _position(record), record.received
            )
    return after


def _position(record: Record) -> object:
    try:
        return Data(record.sequence, record.header, record.payload).position
    except WireError:
        return None
