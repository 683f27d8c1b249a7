"""A process's metrics over time: rises, silences, and how long a condition has been true."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry

from stream_ssl.observe import conditions as at
from stream_ssl.observe.metric_spec import PREFIX
from stream_ssl.observe.wording import duration, percent

LOOK_SECONDS = 2.0
"""Seconds between two looks at the metrics; see `watch.py`."""
GAPS_KEPT, LEAST_GAPS = 64, 3

Finding = tuple[str, str, str]
"""(condition's name, producer or "", sentence).

An empty sentence stands for the condition's summary."""


class Figures:
    """The metrics of a process at one moment. Each is read when it is first asked for.

    The rest of the registry is not read, because collecting all series can take 50 ms.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._samples: dict[str, Sequence[tuple[Mapping[str, str], float]]] = {}

    def get(self, name: str, **labels: str) -> float:
        """Return the sum over the series with these labels; NaN if there is none."""
        found = [
            value
            for given, value in self.each(name)
            if all(given.get(label) == wanted for label, wanted in labels.items())
        ]
        return sum(found) if found else math.nan

    def by(self, name: str, label: str, **only: str) -> dict[str, float]:
        """Return the sums of a metric by the values of one label, over the series with `only`."""
        sums: dict[str, float] = defaultdict(float)
        for labels, value in self.each(name):
            if all(labels.get(other) == wanted for other, wanted in only.items()):
                sums[labels.get(label, "")] += value
        return dict(sums)

    def each(self, name: str) -> Sequence[tuple[Mapping[str, str], float]]:
        """Return the labels and the value of each series of a metric."""
        if name not in self._samples:
            families = self._registry.restricted_registry([PREFIX + name]).collect()
            self._samples[name] = [
                (sample.labels, float(sample.value))
                for family in families
                for sample in family.samples
            ]
        return self._samples[name]


class Rise:
    """The rise of counters within a sliding window.

    Every counter starts at 0 with its process. Events before the first look count as a rise, such
    as damage that is found while the journal is opened.

    Args:
        seconds: the length of the window.
        clock: returns monotonic seconds.
    """

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self._seconds, self._clock = seconds, clock
        self._old: deque[tuple[float, Mapping[str, float]]] = deque([(clock(), {})])

    def __call__(self, totals: Mapping[str, float]) -> dict[str, float]:
        """Take the current totals, and return the rises. A total of NaN has a rise of NaN."""
        now = self._clock()
        while len(self._old) > 1 and self._old[1][0] <= now - self._seconds:
            self._old.popleft()
        before = self._old[0][1]
        if len(self._old) == 1 or now - self._old[-1][0] >= self._seconds / 24:
            known = {key: value for key, value in totals.items() if not math.isnan(value)}
            self._old.append((now, known))
        return {key: value - before.get(key, 0.0) for key, value in totals.items()}

    @property
    def span(self) -> float:
        """Seconds that the rises cover."""
        return self._clock() - self._old[0][0]


class Silence:
    """The time since each counter last changed, and the usual time between two changes.

    Args:
        clock: returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._taken = clock()
        self._last: dict[str, tuple[float, float]] = {}  # (value, time of change)
        self._gaps: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=GAPS_KEPT))

    def take(self, totals: Mapping[str, float], paused: bool = False) -> None:
        """Take the current totals. If `paused`, the time since the last call does not count."""
        now = self._clock()
        if paused:
            self._last = {
                key: (value, at + now - self._taken) for key, (value, at) in self._last.items()
            }
        self._taken = now
        for key, value in totals.items():
            before = self._last.get(key)
            if before is None or value != before[0]:
                if before is not None:  # an outage must not count as a usual gap
                    self._gaps[key].append(min(now - before[1], self._limit(key)))
                self._last[key] = (value, now)

    def restart(self, key: str) -> None:
        """Start the silence of one counter again from now."""
        if key in self._last:
            self._last[key] = (self._last[key][0], self._clock())

    def usual(self, key: str) -> float | None:
        """Return the mean of the last gaps in seconds; None if there were fewer than LEAST_GAPS."""
        gaps = self._gaps[key]
        return statistics.fmean(gaps) if len(gaps) >= LEAST_GAPS else None

    def too_long(self, key: str) -> float:
        """Return the seconds of a silence that is too long; 0 if it is not."""
        if key not in self._last:
            return 0.0
        silent = self._clock() - self._last[key][1]
        return silent if silent > self._limit(key) else 0.0

    def _limit(self, key: str) -> float:
        usual = self.usual(key)
        if usual is None:
            return at.UNKNOWN_GAP_SECONDS
        return max(at.SILENT_SECONDS, at.GAPS * usual)


class Trends:
    """The rises and the held conditions of a process, by key.

    Args:
        clock: returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._rises: dict[str, Rise] = {}
        self._since: dict[str, float] = {}

    def held(self, key: str, true: bool) -> float:
        """Take the current state of a key, and return for how many seconds it has been true."""
        if not true:
            self._since.pop(key, None)
            return 0.0
        return self._clock() - self._since.setdefault(key, self._clock())

    def rise(self, key: str, window: float, totals: Mapping[str, float]) -> dict[str, float]:
        """Return the rises of counters within `window` seconds. The key names the counters."""
        if key not in self._rises:
            self._rises[key] = Rise(window, self._clock)
        return self._rises[key](totals)

    def rise_of(self, name: str, figures: Figures, window: float) -> float:
        """Return the rise of one counter within `window` seconds; NaN if there is none."""
        return self.rise(name, window, {name: figures.get(name)})[name]

    def span(self, key: str) -> float:
        """Return the seconds that the rises of a key cover."""
        return self._rises[key].span

    def shares(
        self, name: str, bad: Mapping[str, float], good: Mapping[str, float], says: str
    ) -> Iterator[Finding]:
        """Yield a finding for each producer whose share of bad samples is too large."""
        worse = self.rise(f"{name} bad", at.BAD_SECONDS, bad)
        better = self.rise(f"{name} good", at.BAD_SECONDS, good)
        span = duration(max(LOOK_SECONDS, self.span(f"{name} bad")))
        for who, count in worse.items():
            samples = max(1.0, count + better.get(who, 0.0))
            usual = at.BAD_SHARE * samples
            if count >= at.BAD_SAMPLES and count > usual + at.BAD_DEVIATIONS * math.sqrt(usual):
                share = percent(count / samples)
                yield name, who, says.format(share=share, who=who, span=span)
