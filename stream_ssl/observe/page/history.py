"""The figures of a process over time, for the page's charts, read from its own metrics.

Two tracks hold the same series in bounded memory. The track "recent" has the last half hour at full
resolution. The track "whole" has all of the time, and halves its resolution whenever it is full.
"""

from __future__ import annotations

import math
import threading
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from prometheus_client import CollectorRegistry

from stream_ssl.observe.catalogue import CATALOGUE, WORKING
from stream_ssl.observe.metric_spec import PREFIX, Role
from stream_ssl.observe.trends import Figures

POINT_SECONDS = 2.0
"""Seconds between two points of the track "recent"."""
RATE_SECONDS = 10.0
"""Seconds that a rate of a chart covers. A slow learner's updates then do not look like pauses."""
LATELY = 60.0
"""Seconds that the newest rates and the answers cover: the last minute."""
POINTS = 900
"""The maximum number of points of a track: half an hour for the track "recent"."""


Row = tuple[float, Sequence[float]]
"""The time of a look at the metrics, and the value of each series."""


@dataclass(frozen=True)
class Series:
    """One line of a chart: a metric, or with `rate` the rise per second of a counter."""

    metric: str
    labels: Mapping[str, str] = field(default_factory=dict)
    rate: bool = False


def _memory(metric: str, rate: bool = False, **labels: str) -> Series:
    return Series(metric, {"memory": WORKING, **labels}, rate)


SERIES: Mapping[Role, Mapping[str, Series]] = {
    "receiver": {
        "received": Series("received_samples_total", rate=True),
        "bytes": Series("received_bytes_total", rate=True),
        "repeated": Series("duplicate_samples_total", rate=True),
        "producers": Series("producers_connected"),
        "credit": Series("credit_bytes"),
        "journal": Series("journal_bytes"),
        "room": Series("journal_room_bytes"),
        "lag_bytes": Series("lag_bytes"),
    },
    "learner": {
        "trained": Series("trained_samples_total", rate=True),
        "replayed": Series("replayed_samples_total", rate=True),
        "steps": Series("steps_total", rate=True),
        "lag": Series("lag_seconds"),
        "loss": Series("loss"),
        "learning_rate": Series("learning_rate"),
        "gradient": Series("gradient_norm"),
        "held_out": Series("held_out_accuracy"),
        "held_out_linear": Series("held_out_linear_accuracy"),
        "linear": Series("prequential_accuracy", {"classifier": "linear"}),
        "knn": Series("prequential_accuracy", {"classifier": "knn"}),
        "majority": Series("prequential_accuracy", {"classifier": "majority"}),
        "slots": _memory("memory_slots"),
        "capacity": _memory("memory_capacity_slots"),
        "inserted": _memory("memory_inserted_total", rate=True),
        "refused": _memory("memory_refused_total", rate=True),
        "turnover": _memory("memory_turnover_ratio"),
        "memory_rank": _memory("memory_effective_rank"),
        "stream_rank": Series("stream_effective_rank"),
        "duplicates_p50": _memory("memory_slot_duplicates", percentile="50"),
        "duplicates_p90": _memory("memory_slot_duplicates", percentile="90"),
        "duplicates_max": _memory("memory_slot_duplicates", percentile="100"),
        "age_p50": _memory("memory_age_samples", percentile="50"),
        "age_p90": _memory("memory_age_samples", percentile="90"),
        "age_max": _memory("memory_age_samples", percentile="100"),
        "collisions": Series("collision_probability", {"kind": "calibrated"}),
        "collisions_true": Series("collision_probability", {"kind": "true"}),
        "near_duplicates": Series("memory_near_duplicates_ratio"),
        "checkpoint_age": Series("checkpoint_age_seconds"),
        "checkpoint_step": Series("checkpoint_step"),
        "drifts": Series("drift_detections_total", {"signal": "image"}),
    },
}

SENTENCES = {spec.name: spec.help.partition(". ")[0].rstrip(".") + "." for spec in CATALOGUE}
HELP: Mapping[str, tuple[str, str]] = {
    f"{role}/{name}": (PREFIX + series.metric, SENTENCES[series.metric])
    for role, by_name in SERIES.items()
    for name, series in by_name.items()
}
"""The metric of each series and a sentence on it, by "ROLE/NAME"."""


class Track:
    """At most `points` rows of values over time.

    Args:
        points: the maximum number of rows, an even number.
        every: the least seconds between two rows.
        whole: True keeps all of the time, and halves the resolution whenever the track is full.
            False keeps the newest rows.
    """

    def __init__(self, points: int, every: float, whole: bool) -> None:
        self.every = every
        self._points, self._whole = points, whole
        self._rows: list[Row] = []

    def append(self, at: float, values: Sequence[float]) -> None:
        """Add a row, unless the last row is less than `every` seconds old."""
        if self._rows and at - self._rows[-1][0] < 0.99 * self.every:
            return
        self._rows.append((at, values))
        if len(self._rows) > self._points:
            if self._whole:
                del self._rows[1::2]
                self.every *= 2
            else:
                del self._rows[0]

    def rows(self, since: float) -> list[Row]:
        """Return the rows after `since`, and the row before them, which rates need."""
        behind = sum(at > since for at, _ in self._rows)
        return self._rows[max(0, len(self._rows) - behind - 1) :]


class FigureHistory:
    """The values of a process's metrics over time. Call `sample` every POINT_SECONDS seconds.

    Args:
        role: the role, which chooses the SERIES.
        clock: returns monotonic seconds, so that a change of the system clock has no effect.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        role: Role,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.series = SERIES[role]
        self._registry = registry
        self._clock, self._wall, self._begun = clock, wall, clock()
        self._lock = threading.Lock()
        self._tracks = {
            "recent": Track(POINTS, POINT_SECONDS, whole=False),
            "whole": Track(POINTS, POINT_SECONDS, whole=True),
        }

    def sample(self) -> None:
        """Read the metrics once."""
        figures = Figures(self._registry)
        row = array("d", (figures.get(one.metric, **one.labels) for one in self.series.values()))
        with self._lock:
            for track in self._tracks.values():
                track.append(self._clock(), row)

    def read(self, track: str, since: float = 0.0) -> dict[str, object]:
        """Return columns for JSON: `time`, and each series with None for missing values.

        `every` is the resolution in seconds. `epoch` is the Unix time at which `time` is 0,
        computed from the current system clock.

        Args:
            track: "recent" or "whole", which also ends with the newest row.
            since: a value of `time`; the result has only later rows.
        """
        with self._lock:
            rows = self._tracks[track].rows(since - RATE_SECONDS)
            newest = self._tracks["recent"].rows(math.inf)
            every = self._tracks[track].every
        rows += [row for row in newest if rows and row[0] > rows[-1][0]]
        columns: dict[str, object] = {"every": every, "epoch": self._wall() - self._clock()}
        shown: list[tuple[Row, Row]] = []
        first = 0
        for number, row in enumerate(rows):
            while first < number - 1 and rows[first][0] < row[0] - RATE_SECONDS:
                first += 1
            if row[0] > since:
                shown.append((rows[first], row))
        columns["time"] = [round(at, 2) for _, (at, _) in shown]
        for number, (name, series) in enumerate(self.series.items()):
            value = _rate if series.rate else _value
            columns[name] = [value(before, row, number) for before, row in shown]
        return columns

    def values(self, name: str, seconds: float) -> list[tuple[float, float]]:
        """Return (time, value) of a series within the last `seconds`; missing values are left out.

        The last pair is the newest value.
        """
        number, rows = list(self.series).index(name), self._rows(self._clock() - seconds)
        return [(at, row[number]) for at, row in rows if math.isfinite(row[number])]

    def rise(self, name: str, seconds: float) -> tuple[float, float]:
        """Return the rise of a counter within the last `seconds`, and the seconds that it covers.

        Every counter starts at 0 with its process.
        """
        number, since = list(self.series).index(name), self._clock() - seconds
        with self._lock:
            rows = self._tracks["recent"].rows(since)
        if not rows:
            return 0.0, 0.0
        began, before = rows[0][0], rows[0][1][number]
        if began > since:
            began, before = self._begun, 0.0
        ended, last = rows[-1][0], rows[-1][1][number]
        rise = last - (before if math.isfinite(before) else 0.0)
        return max(0.0, rise) if math.isfinite(rise) else 0.0, ended - began

    def unchanged(self, name: str) -> float:
        """Return for how many seconds a series has had its value.

        After half an hour, the result may be less by the resolution of the track "whole".
        """
        number, now = list(self.series).index(name), self._clock()
        rows = self._rows(-math.inf)
        since = now
        for at, row in reversed(rows):
            if row[number] != rows[-1][1][number]:
                break
            since = at
        return now - since

    @property
    def age(self) -> float:
        """Seconds since the history began, at the start of the process."""
        return self._clock() - self._begun

    def _rows(self, since: float) -> list[Row]:
        """Return the rows after `since` in order, from both tracks.

        Only "whole" has all of the time, and after some hours only "recent" has the last minute.
        """
        with self._lock:
            tracks = [track.rows(since) for track in self._tracks.values()]
        return sorted((row for rows in tracks for row in rows if row[0] > since), key=itemgetter(0))

    def latest(self) -> dict[str, float | None]:
        """Return the newest value of each series. Rates cover the last minute."""
        with self._lock:
            rows = self._tracks["recent"].rows(self._clock() - LATELY)
        return {
            name: (_rate if series.rate else _value)(rows[0], rows[-1], number) if rows else None
            for number, (name, series) in enumerate(self.series.items())
        }


def _value(_: Row, row: Row, number: int) -> float | None:
    value = row[1][number]
    return value if math.isfinite(value) else None


def _rate(before: Row, row: Row, number: int) -> float | None:
    seconds = row[0] - before[0]
    rise = row[1][number] - before[1][number]
    return max(0.0, rise) / seconds if seconds > 0 and math.isfinite(rise) else None
