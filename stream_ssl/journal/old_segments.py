"""The segments before the active one: checked in the background, replaced if damaged, trimmed."""

from __future__ import annotations

import logging
import time
from contextlib import closing
from pathlib import Path

import lmdb

from stream_ssl.journal.errors import as_journal_error
from stream_ssl.journal.recovery import (
    BackgroundCheck,
    CheckedSegment,
    RecoveredJournal,
    is_gap,
    replace_damaged,
)
from stream_ssl.journal.segment import (
    Damaged,
    ProducerState,
    Segment,
    delete_segment,
    file_bytes,
    segment_path,
)

log = logging.getLogger(__name__)


class OldSegments:
    """The segments that nobody writes any more.

    A separate process checks the segments that `recover` did not open. Until then this process
    must not open them, because reading a damaged segment can crash a process.

    Args:
        folder: the folder of the journal.
        found: the content of the folder after recovery.
        budget: most bytes of the journal.

    Attributes:
        end: the first position after these segments, where the active segment begins.
        damaged: segments that were found damaged or missing.
    """

    def __init__(self, folder: Path, found: RecoveredJournal, budget: int) -> None:
        self.end = found.last + 1
        self.damaged = found.damaged
        self._folder = folder
        self._sizes = found.segments  # (first position, bytes)
        self._budget = budget
        large = [one for one in found.segments if one[1] > budget // 2]
        self._largest = large[-1] if large else (0, 0)
        if large:
            log.warning(
                "journal %s: the segment of record %d has %d bytes, more than half of "
                "journal.budget, which was larger before: until it is deleted, it does not count",
                folder,
                *self._largest,
            )
        starts = [first for first, _ in found.unchecked]
        # First position -> first position of the previous segment, until checked.
        self._unchecked = dict(zip(starts, [0, *starts], strict=False))
        self._check = BackgroundCheck([path for _, path in found.unchecked])

    @property
    def bytes(self) -> int:
        """Bytes on disk."""
        return sum(size for _, size in self._sizes)

    @property
    def left(self) -> int:
        """The bytes of the budget that these segments leave.

        A segment can be deleted only after newer records, which need room. So the newest segment
        of more than half of the budget does not count. The budget was larger when it was written.
        """
        first, size = self._largest
        return self._budget - self.bytes + (size if self.first <= first else 0)

    @property
    def first(self) -> int:
        """The oldest position; `end` if there is none."""
        return self._sizes[0][0] if self._sizes else self.end

    @property
    def newest(self) -> int:
        """The first position of the newest of these segments; 0: there is none."""
        return self._sizes[-1][0] if self._sizes else 0

    def start_of(self, position: int) -> int:
        """Return the first position of the segment that `position` is in; `end`: the active one."""
        return max(first for first in (*self._firsts(), self.end) if first <= position)

    def is_checked(self, start: int) -> bool:
        """Return whether this process may open the segment that begins at `start`."""
        return start not in self._unchecked

    def bytes_from(self, start: int) -> int:
        """Return the bytes on disk of the segment that begins at `start` and of all later ones."""
        return sum(size for first, size in self._sizes if first >= start)

    def add(self, size: int, end: int) -> None:
        """Add the segment of `size` bytes that was active until now; the next begins at `end`."""
        self._sizes.append((self.end, size))
        self.end = end

    def trim(self, before: int, seconds: float, keep_newest: bool) -> int:
        """Delete segments as `Journal.trim` does.

        If `keep_newest` is True, the last one stays, because it has the states of the producers.
        """
        freed, end = 0, time.monotonic() + seconds
        while len(self._sizes) > keep_newest and (not freed or time.monotonic() < end):
            following = self._sizes[1][0] if len(self._sizes) > 1 else self.end
            if following > before:
                break
            first, size = self._sizes[0]
            try:
                delete_segment(segment_path(self._folder, first))
            except OSError as error:
                raise as_journal_error(error, self._folder) from error
            del self._sizes[0]
            freed += size
        return freed

    def take_checked(self, wait: bool = False) -> None:
        """Replace the segments that the background check found damaged; never raises."""
        for checked in self._check.take(wait):
            first = int(checked.path.name.rpartition("-")[2])
            before = self._unchecked.get(first, 0)
            if first not in self._firsts():
                self._unchecked.pop(first, None)  # trimmed in the meantime
            elif checked.fault is not None:
                self._replace_damaged(first, before, checked)
            else:
                del self._unchecked[first]
                self.damaged += bool(before) and is_gap(self._folder, checked.follows, before)

    def close(self) -> None:
        """Stop the background check; the next start checks the rest."""
        self._check.stop()

    def _firsts(self) -> list[int]:
        return [first for first, _ in self._sizes]

    def _replace_damaged(self, first: int, before: int, checked: CheckedSegment) -> None:
        self.damaged += 1
        index = self._firsts().index(first)
        bound = [*self._firsts(), self.end][index + 1]
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
        self._sizes[index : index + 1] = [(first, file_bytes(checked.path))] if kept else []

    def _states_of(self, first: int) -> dict[str, ProducerState]:
        """Return the producer states of the segment at `first`; empty if it cannot be opened."""
        try:
            with closing(Segment(segment_path(self._folder, first))) as segment:
                return segment.states()
        except Damaged:
            return {}
