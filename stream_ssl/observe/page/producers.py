"""The producers as the page shows them: sorted, filtered and with rates.

The receiver's thread copies its table at most once a second while a viewer asks, and otherwise once
in PAST_EVERY seconds.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stream_ssl.receiver.sessions import ProducerRecord

EVERY = 1.0
"""The least seconds between two copies of the table."""
WATCHED = 30.0
"""Seconds for which the table is copied after the last question."""
WINDOW = 10.0
"""Seconds that the rates cover."""

PAST_EVERY, PAST = 30.0, 20
"""Seconds between two points of a producer's past, and the number of points: ten minutes.

The table is copied this often also while nobody watches."""

SORTS = ("silent", "name", "rate", "samples", "rejected", "repeated", "newest")


class ProducersView:
    """The last copies of the receiver's table of producers.

    Args:
        clock: returns monotonic seconds; the same clock as that of the records.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._watched_until = self._next = 0.0
        self._newest: tuple[float, list[ProducerRecord]] | None = None
        self._samples: deque[tuple[float, dict[str, int]]] = deque(maxlen=32)  # by name, by time
        self._past: deque[tuple[float, Sequence[str], NDArray[np.int64]]] = deque(maxlen=PAST + 1)

    def offer(self, table: Callable[[], list[ProducerRecord]]) -> None:
        """Copy the table if a viewer asked recently and EVERY seconds have passed, or for the past.

        Only the receiver's thread calls this method.
        """
        now = self._clock()
        old = not self._past or now >= self._past[-1][0] + PAST_EVERY
        if not old and (now >= self._watched_until or now < self._next):
            return
        self._next = now + EVERY
        records = table()
        if old:
            counts = np.fromiter((one.samples for one in records), np.int64, len(records))
            self._past.append((now, [one.name for one in records], counts))
        with self._changed:
            while self._samples and now - self._samples[0][0] > 2 * WINDOW:
                self._samples.popleft()
            self._samples.append((now, {record.name: record.samples for record in records}))
            self._newest = (now, records)
            self._changed.notify_all()

    def listing(
        self, sort: str, find: str, offset: int, limit: int, name: str | None = None
    ) -> dict[str, Any]:
        """Return up to `limit` producers in order, and the number of producers.

        Args:
            sort: one of SORTS.
            find: a part of the name; upper and lower case are the same.
            offset: the number of the first producer, from 0.
            name: the whole name of the only producer; None: all producers.
        """
        at, records, earlier = self._read()
        found = [
            _row(record, at, earlier)
            for record in records
            if find.lower() in record.name.lower() and name in (None, record.name)
        ]
        found.sort(key=_KEYS[sort])
        shown = found[offset : offset + limit]
        past = self._rates([row["name"] for row in shown])
        return {
            "total": len(records),
            "connected": sum(record.connected is not None for record in records),
            "found": len(found),
            "past_every": PAST_EVERY,
            "producers": [{**row, "past": past[row["name"]]} for row in shown],
        }

    def _rates(self, names: Sequence[str]) -> dict[str, list[float]]:
        """Return the past rates of each producer, oldest first, from its first appearance on."""
        wanted = dict.fromkeys(names)
        before: dict[str, tuple[float, int]] = {}
        found: dict[str, list[float]] = {name: [] for name in names}
        for at, known, counts in list(self._past):
            here = {
                name: (at, int(count))
                for name, count in zip(known, counts.tolist(), strict=True)
                if name in wanted
            }
            for name in here.keys() & before.keys():
                then, had = before[name]
                rise = max(0, here[name][1] - had) / max(EVERY, at - then)
                found[name].append(float(f"{rise:.3g}"))
            before = here
        return found

    def _read(self) -> tuple[float, Sequence[ProducerRecord], tuple[float, dict[str, int]]]:
        """Return the newest copy, and the samples by name from about WINDOW seconds before it."""
        with self._changed:
            now = self._clock()
            self._watched_until = now + WATCHED
            self._changed.wait_for(
                lambda: self._newest is not None and now - self._newest[0] < 3 * EVERY, timeout=3.0
            )
            if self._newest is None:
                return now, (), (now, {})
            at, records = self._newest
            return at, records, min(self._samples, key=lambda old: abs(at - old[0] - WINDOW))


def _row(
    record: ProducerRecord, at: float, earlier: tuple[float, dict[str, int]]
) -> dict[str, Any]:
    rise, seconds = record.samples - earlier[1].get(record.name, 0), at - earlier[0]
    return {
        "name": record.name,
        "key": record.key,
        "agent": record.agent,
        "connected": record.connected is not None,
        "since": round(at - record.since, 1),
        "silent": round(at - record.last_received, 1),
        "hellos": record.hellos,
        "samples": record.samples,
        "bytes": record.bytes,
        "rate": round(rise / seconds, 2) if seconds >= EVERY else None,
        "repeated": record.duplicates,
        "rejected": dict(record.rejected.most_common(8)),
        "credit": record.credit,
    }


_KEYS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "silent": lambda row: -row["silent"],
    "name": lambda row: row["name"],
    "rate": lambda row: -(row["rate"] or 0.0),
    "samples": lambda row: -row["samples"],
    "rejected": lambda row: -sum(row["rejected"].values()),
    "repeated": lambda row: -row["repeated"],
    "newest": lambda row: row["since"],
}
