"""Reads the processes' /metrics, the way a Prometheus does, and keeps what it read."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from stream_ssl.bounded_files import read_text

PREFIX = "stream_ssl_"
Points = Sequence[tuple[float, float]]
"""Moments, seconds, and the values then."""

UNUSED_ENDINGS = (
    "_bucket",
    "_created",
    "config_info",
)  # most of a page, and nothing here reads them


def key(name: str, labels: Mapping[str, str]) -> str:
    """A sample's name as Prometheus writes it, labels in alphabetical order."""
    inner = ",".join(f"{label}={json.dumps(value)}" for label, value in sorted(labels.items()))
    return f"{name}{{{inner}}}" if inner else name


def parse(text: str, role: str) -> dict[str, float]:
    """Samples of one page by key. Names that every process has are labelled with the role."""
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
    """What the processes said at one moment.

    Args:
        time: seconds since the scraper was made.
        values: samples by key.
        up: roles that answered.
    """

    time: float
    values: Mapping[str, float]
    up: tuple[str, ...] = ()


class Scraper:
    """Asks each process for its metrics.

    Args:
        urls: gives the HTTP address by role; called at each scrape, since a restarted process
            has another port.
        timeout: seconds to wait for one process.
        clock: monotonic, seconds.
        token: of http.token_file; None where there is none.
    """

    def __init__(
        self,
        urls: Callable[[], Mapping[str, str]],
        timeout: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
        token: str | None = None,
    ) -> None:
        self._urls = urls
        self._headers = {} if token is None else {"authorization": f"Bearer {token}"}
        self._timeout = timeout
        self._clock = clock
        self._start = clock()

    def scrape(self) -> Snapshot:
        """One snapshot; a process that does not answer is left out."""
        values: dict[str, float] = {}
        up = []
        for role, url in self._urls().items():
            text = self._get(url)
            if text is not None:
                values |= parse(text, role)
                up.append(role)
        return Snapshot(self._clock() - self._start, values, tuple(up))

    def _get(self, url: str) -> str | None:
        address = urlsplit(url).netloc
        connection = http.client.HTTPConnection(address, timeout=self._timeout)
        try:
            connection.request("GET", "/metrics", headers=self._headers)
            response = connection.getresponse()
            body = response.read().decode()
            return body if response.status == http.HTTPStatus.OK else None
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()


@dataclass
class History:
    """Snapshots in order of time."""

    snapshots: list[Snapshot] = field(default_factory=list)

    def append(self, snapshot: Snapshot) -> None:
        self.snapshots.append(snapshot)

    @property
    def elapsed(self) -> float:
        """Time of the last snapshot, seconds."""
        return self.snapshots[-1].time if self.snapshots else 0.0

    def last(self, name: str, default: float = 0.0, **labels: str) -> float:
        """The newest value of a sample; `default` before there is one."""
        wanted = key(name, labels)
        for snapshot in reversed(self.snapshots):
            if wanted in snapshot.values:
                return snapshot.values[wanted]
        return default

    def has(self, name: str, **labels: str) -> bool:
        """Whether any snapshot holds the sample."""
        wanted = key(name, labels)
        return any(wanted in snapshot.values for snapshot in self.snapshots)

    def series(self, name: str, **labels: str) -> list[tuple[float, float]]:
        """(time, value) wherever the sample was there."""
        wanted = key(name, labels)
        return [(s.time, s.values[wanted]) for s in self.snapshots if wanted in s.values]

    def total(self, name: str, **labels: str) -> float:
        """What a counter rose by in all, over restarts of its process."""
        values = [value for _, value in self.series(name, **labels)]
        return sum(_increases(values)) + values[0] if values else 0.0

    def rate(self, name: str, window: float = 5.0, **labels: str) -> float:
        """A counter's rise per second over the last `window` seconds; 0 without two values."""
        return _rate(self.series(name, **labels), window)

    def rates(self, name: str, window: float = 5.0, **labels: str) -> list[tuple[float, float]]:
        """(time, rise per second over the `window` seconds before), from the second value on."""
        points = self.series(name, **labels)
        return [(points[i][0], _rate(points[: i + 1], window)) for i in range(1, len(points))]

    def save(self, path: Path) -> None:
        """Write the snapshots, one JSON object a line."""
        with path.open("w") as file:
            for s in self.snapshots:
                line = {"time": round(s.time, 3), "up": s.up, "values": s.values}
                file.write(json.dumps(line) + "\n")

    @classmethod
    def load(cls, path: Path) -> History:
        """Read what `save` wrote."""
        return cls(list(_read(read_text(path, 256 << 20, links=True).splitlines())))


def _read(lines: Iterable[str]) -> Iterator[Snapshot]:
    for line in lines:
        fields = json.loads(line)
        yield Snapshot(fields["time"], fields["values"], tuple(fields["up"]))


def _increases(values: list[float]) -> Iterator[float]:
    """Rises between neighbours; a counter that fell restarted at 0, as Prometheus takes it."""
    for before, after in pairwise(values):
        yield after - before if after >= before else after


def _rate(points: list[tuple[float, float]], window: float) -> float:
    """Rise per second over the window before the last point."""
    if len(points) < 2:
        return 0.0
    first = len(points) - 2
    while first > 0 and points[-1][0] - points[first][0] < window:
        first -= 1
    seconds = points[-1][0] - points[first][0]
    rise = sum(_increases([value for _, value in points[first:]]))
    return rise / seconds if seconds > 0 else 0.0
