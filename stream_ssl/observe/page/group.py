"""The recent work of each rank of a run, as the page shows it.

The ranks exchange their figures with the flags of each turn, so every rank knows all of them.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stream_ssl.batch import START, Offset
from stream_ssl.learning.ranks import Work
from stream_ssl.observe.conditions import SLOWEST_RANK

WINDOW = 10.0
"""Seconds that the rates and means cover."""


@dataclass(frozen=True, slots=True)
class Member:
    """The host of a rank, and the id of the journal that it reads; None if it has none yet."""

    host: str
    journal: str | None


class GroupView:
    """A thread-safe view of the ranks: the learner's loop fills it, and the page reads it.

    Args:
        parked: the ids of the run's journals that no rank reads.
        capacity: the capacity of the memory, in slots of all shards.
    """

    def __init__(
        self,
        members: Sequence[Member],
        parked: Sequence[str],
        capacity: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._members, self._parked, self._capacity = members, parked, capacity
        self._clock, self._lock = clock, threading.Lock()
        self._past: deque[tuple[float, int, Sequence[Work]]] = deque()
        self._slots, self._offsets = [0] * len(members), [START] * len(members)

    def consume(
        self, step: int, work: Sequence[Work], slots: Sequence[int], offsets: Sequence[Offset]
    ) -> None:
        """Record each rank's work so far, occupied slots and offset in its journal."""
        now = self._clock()
        with self._lock:
            self._slots, self._offsets = list(slots), list(offsets)
            self._past.append((now, step, work))
            while len(self._past) > 2 and now - self._past[1][0] >= WINDOW:
                self._past.popleft()

    def summary(self) -> dict[str, object]:
        """Return the figures of the last WINDOW seconds, for JSON.

        Figures per step are None if there was no step. `slowest` is the rank with the longest busy
        time. It is None if no rank was busy SLOWEST_RANK times as long as the least busy rank.
        """
        with self._lock:
            if not self._past:
                return {"ranks": [], "parked": list(self._parked), "slowest": None}
            (began, first, before), (ended, last, after) = self._past[0], self._past[-1]
            slots, offsets = self._slots, self._offsets
        seconds, steps = ended - began, last - first
        busy = [now.busy - then.busy for then, now in zip(before, after, strict=True)]
        ranks = [
            {
                "rank": rank,
                "host": member.host,
                "samples_per_second": (now.samples - then.samples) / seconds if seconds else None,
                "busy_per_step": busy[rank] / steps if steps else None,
                "waited_per_step": (now.waited - then.waited) / steps if steps else None,
                "sent_bytes_per_step": (now.sent - then.sent) / steps if steps else None,
                "slots": slots[rank],
                "capacity": self._capacity // len(self._members),
                "journal": member.journal,
                "record": offsets[rank].record,
            }
            for rank, (member, then, now) in enumerate(
                zip(self._members, before, after, strict=True)
            )
        ]
        return {
            "ranks": ranks,
            "parked": list(self._parked),
            "steps_per_second": steps / seconds if seconds else None,
            "slowest": busy.index(max(busy))
            if steps and max(busy) > SLOWEST_RANK * min(busy)
            else None,
        }
