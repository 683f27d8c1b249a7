"""The ranks of a run side by side, as the page shows them: what each did of late.

Every rank knows it of all: they tell each other with the flags of each turn.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stream_ssl.batch import START, Offset
from stream_ssl.learning.ranks import Work

WINDOW = 10.0
"""Seconds over which rates and means are."""


@dataclass(frozen=True, slots=True)
class Member:
    """What stays as it is from a start of the group to the next.

    Attributes:
        host: its name.
        journal: the id of that which the rank reads; None where it has none yet.
    """

    host: str
    journal: str | None


class GroupView:
    """Thread-safe: the learner's loop gives, the page asks.

    Args:
        members: by rank.
        parked: ids of journals of the run that none of them reads.
        capacity: of the memory, slots of all shards.
        clock: monotonic, seconds.
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
        self._slots, self._offsets = 0, [START] * len(members)

    def consume(
        self, step: int, work: Sequence[Work], slots: int, offsets: Sequence[Offset]
    ) -> None:
        """What ranks have done up to this step.

        Args:
            step: steps so far.
            work: by rank.
            slots: that all shards hold.
            offsets: where each one's stream stands, by rank.
        """
        now = self._clock()
        with self._lock:
            self._slots, self._offsets = slots, list(offsets)
            self._past.append((now, step, work))
            while len(self._past) > 2 and now - self._past[1][0] >= WINDOW:
                self._past.popleft()

    def summary(self) -> dict[str, object]:
        """For JSON. What is per step is None where there was none of late; the slowest rank is the
        one that was busy for longest, None where that is within a tenth of the shortest."""
        with self._lock:
            if not self._past:
                return {"ranks": [], "parked": list(self._parked), "slowest": None}
            (began, first, before), (ended, last, after) = self._past[0], self._past[-1]
            slots, offsets = self._slots, self._offsets
        seconds, steps, size = ended - began, last - first, len(self._members)
        busy = [now.busy - then.busy for then, now in zip(before, after, strict=True)]
        ranks = [
            {
                "rank": rank,
                "host": member.host,
                "samples_per_second": (now.samples - then.samples) / seconds if seconds else None,
                "busy_per_step": busy[rank] / steps if steps else None,
                "waited_per_step": (now.waited - then.waited) / steps if steps else None,
                "sent_bytes_per_step": (now.sent - then.sent) / steps if steps else None,
                "slots": -(-(slots - rank) // size),
                "capacity": self._capacity // size,
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
            "slowest": busy.index(max(busy)) if steps and max(busy) > 1.1 * min(busy) else None,
        }
