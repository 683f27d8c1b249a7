"""A small Prometheus client: it reads /metrics of the processes and keeps the snapshots."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from http.client import HTTPException
from itertools import pairwise
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from stream_ssl.observe.ask import ask, bearer
from stream_ssl.observe.metric_spec import PREFIX

Points = Sequence[tuple[float, float]]
"""Pairs of (time in seconds, value)."""
RATE_SECONDS = 5.0
"""Seconds that a rate covers."""

UNUSED_ENDINGS = ("_bucket", "_created", "config_info")
"""Endings of the names of samples that nothing here uses. Such samples fill most of the page."""


def key(name: str, labels: Mapping[str, str]) -> str:
    """Return a sample's name as Prometheus writes it, with the labels in alphabetical order."""
    inner = ",".join(f"{label}={json.dumps(value)}" for label, value in sorted(labels.items()))
    return f"{name}{{{inner}}}" if inner else name


def parse(text: str, role: str) -> dict[str, float]:
    """Return the samples of one /metrics page by key.

    Samples of the client library have the same names in every process. They get the label `job`,
    which is the role.

    Raises:
        ValueError, IndexError: the text is no /metrics page.
    """
    values = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.endswith(UNUSED_ENDINGS):
                continue
            labels = dict(sample.labels)
            if not sample.name.startswith(PREFIX):
                labels["job"] = role
            values[key(sample.name, labels)] = float(sample.value)
    return values


@dataclass(frozen=True)
class Snapshot:
    """The metrics of all processes at one moment.

    Args:
        time: seconds since the scraper was created.
        values: the samples by key.
        up: the roles that answered.
    """

    time: float
    values: Mapping[str, float]
    up: tuple[str, ...] = ()


class Scraper:
    """A client that reads the metrics of each process.

    Args:
        urls: returns the HTTP address by role. It is called at each scrape, because a restarted
            process has another port.
        timeout: seconds to wait for one process.
        token: the token in http.token_file, or None if there is none.
    """

    def __init__(
        self,
        urls: Callable[[], Mapping[str, str]],
        timeout: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
        token: str | None = None,
    ) -> None:
        self._urls = urls
        self._headers = bearer(token)
        self._timeout = timeout
        self._clock = clock
        self._start = clock()

    def scrape(self) -> Snapshot:
        """Return one snapshot. It leaves out processes that do not answer.

        After a process has ended, another program may answer at its address, with other texts.
        """
        values: dict[str, float] = {}
        up = []
        for role, url in self._urls().items():
            with suppress(OSError, HTTPException, ValueError, IndexError):
                status, body = ask(url, "/metrics", self._timeout, self._headers)
                if status == HTTPStatus.OK:
                    values |= parse(body.decode(), role)
                    up.append(role)
        return Snapshot(self._clock() - self._start, values, tuple(up))


@dataclass
class History:
    """A list of snapshots in order of time."""

    snapshots: list[Snapshot] = field(default_factory=list)

    def append(self, snapshot: Snapshot) -> None:
        self.snapshots.append(snapshot)

    def last(self, name: str, **labels: str) -> float:
        """Return the newest value of a sample, or 0 if there is none."""
        wanted = key(name, labels)
        for snapshot in reversed(self.snapshots):
            if wanted in snapshot.values:
                return snapshot.values[wanted]
        return 0.0

    def has(self, name: str, **labels: str) -> bool:
        """Return whether any snapshot has the sample."""
        wanted = key(name, labels)
        return any(wanted in snapshot.values for snapshot in self.snapshots)

    def series(self, name: str, **labels: str) -> list[tuple[float, float]]:
        """Return (time, value) for each snapshot that has the sample."""
        wanted = key(name, labels)
        return [(s.time, s.values[wanted]) for s in self.snapshots if wanted in s.values]

    def total(self, name: str, **labels: str) -> float:
        """Return the total rise of a counter, including rises before its process restarted."""
        values = [value for _, value in self.series(name, **labels)]
        return sum(_increases(values)) + values[0] if values else 0.0

    def rate(self, name: str, **labels: str) -> float:
        """Return a counter's rise per second over the last RATE_SECONDS.

        The rate is 0 if there are fewer than two values.
        """
        return _rate(self.series(name, **labels))

    def rates(self, name: str, **labels: str) -> list[tuple[float, float]]:
        """Return (time, rate) from the second value on, with rates as in `rate`."""
        points = self.series(name, **labels)
        return [(points[i][0], _rate(points[: i + 1])) for i in range(1, len(points))]

    def save(self, path: Path) -> None:
        """Write the snapshots to a file, one JSON object per line."""
        with path.open("w") as file:
            for s in self.snapshots:
                line = {"time": round(s.time, 3), "up": s.up, "values": s.values}
                file.write(json.dumps(line) + "\n")


def _increases(values: list[float]) -> Iterator[float]:
    """Yield the rise between neighbours. A counter that fell restarted at 0, as in Prometheus."""
    for before, after in pairwise(values):
        yield after - before if after >= before else after


def _rate(points: list[tuple[float, float]]) -> float:
    """Return the rise per second over RATE_SECONDS before the last point; 0 without two points."""
    if len(points) < 2:
        return 0.0
    first = len(points) - 2
    while first > 0 and points[-1][0] - points[first][0] < RATE_SECONDS:
        first -= 1
    seconds = points[-1][0] - points[first][0]
    rise = sum(_increases([value for _, value in points[first:]]))
    return rise / seconds if seconds > 0 else 0.0
