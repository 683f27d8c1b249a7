"""Records the metrics that a real run's processes export, for the tests of the alerts.

    PYTHONPATH=tests:tests/app .venv/bin/python tests/observe/record.py pause

starts the daemon on a synthetic stream, scrapes both processes each 15 s like Prometheus, and
writes `recordings/pause.json.gz`: each series in promtool's notation. A scenario takes about ten
minutes; the tests draw its quiet stretches out to hours.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import signal
import socket
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from stream_ssl.daemon.endpoints import load
from stream_ssl.observe.scrape import key

FOLDER = Path(__file__).parent / "recordings"
EVERY = 15.0
"""Seconds between two scrapes, as in deploy/prometheus/prometheus.yml."""

Point = dict[str, float]


def scrape(run: Path) -> Point:
    """Return all samples of one moment by key, with the labels that Prometheus adds."""
    point: Point = {}
    for role in ("receiver", "learner"):
        to = {"job": "stream-ssl", "instance": role, "role": role}
        try:
            with urllib.request.urlopen(f"{load(run)[role]['http']}/metrics", timeout=5) as page:
                text = page.read().decode()
        except (OSError, KeyError):
            point[key("up", to)] = 0.0
            continue
        point[key("up", to)] = 1.0
        for family in text_string_to_metric_families(text):
            if family.name.startswith("stream_ssl_") and family.type != "info":
                point |= {key(s.name, {**s.labels, **to}): float(s.value) for s in family.samples}
    return point


def notation(values: Sequence[float | None]) -> str:
    """Return promtool's notation: `5x2` for three equal values in a row, `_` for none."""
    words = []
    for value, same in groupby(
        None if value is None or not math.isfinite(value) else value for value in values
    ):
        shown, count = "_" if value is None else f"{value:.10g}", len(list(same))
        words.append(shown if count == 1 else f"{shown}x{count - (value is not None)}")
    return " ".join(words)


def save(file: Path, points: Sequence[Point], marks: dict[str, int]) -> None:
    """Write a recording; `marks` are numbers of scrapes."""
    FOLDER.mkdir(exist_ok=True)
    names = sorted({name for point in points for name in point})
    series = {name: notation([point.get(name) for point in points]) for name in names}
    told = {"every": EVERY, "scrapes": len(points), "marks": marks, "series": series}
    file.write_bytes(gzip.compress(json.dumps(told, indent=0).encode(), mtime=0))


class Recorder:
    """Scrapes a run at intervals while a scenario goes on."""

    def __init__(self, run: Path) -> None:
        self.run, self.points, self.marks = run, list[Point](), dict[str, int]()
        self._next = time.monotonic()

    def watch(self, minutes: float) -> None:
        """Scrape for this time."""
        for _ in range(round(minutes * 60 / EVERY)):
            self.points.append(scrape(self.run))
            self._next = max(self._next + EVERY, time.monotonic())
            time.sleep(max(0.0, self._next - time.monotonic()))

    def mark(self, name: str) -> None:
        """Name the next scrape."""
        self.marks[name] = len(self.points)


def pause(run: Any, recorder: Recorder) -> None:
    """A stream ends before a whole batch, with its producer still connected. After four minutes,
    the daemon is restarted.
    """
    import numpy as np
    from harness import stop, until

    from stream_ssl.producers import Producer

    daemon = run.start("run", str(run.config))
    until(lambda: run.metric("steps_total") >= 0, lambda: run.log("run"))
    draw = np.random.default_rng(0)
    with Producer(run.address, name="robot") as producer:
        for _ in range(12):  # three minutes
            for _ in range(54):
                producer.send(draw.integers(0, 256, (16, 16, 1), dtype=np.uint8))
            recorder.watch(EVERY / 60)
        recorder.mark("ended")
        recorder.watch(4)
        assert stop(daemon) == 0, run.log("run")
        daemon = run.start("run", str(run.config))
        recorder.mark("restarted")
        recorder.watch(4)
    assert stop(daemon) == 0, run.log("run")


def covered(run: Any, recorder: Recorder) -> None:
    """A camera shows many things, four in five of one class, and is then covered. From then on, its
    frames are near-duplicates of one frame. The memory is a queue.
    """
    import numpy as np
    from harness import stop, until

    from stream_ssl.producers import Producer

    daemon = run.start("run", str(run.config))
    until(lambda: run.metric("steps_total") >= 0, lambda: run.log("run"))
    draw = np.random.default_rng(0)
    with Producer(run.address, name="robot") as producer:
        for scrape in range(28):  # seven minutes
            for _ in range(1200):
                coarse = draw.integers(0, 200, (4, 4, 1)) if scrape < 16 else np.full((4, 4, 1), 9)
                coarse = coarse + (0 if scrape < 16 else np.arange(4).reshape(4, 1, 1))
                noise = draw.integers(0, 3, (16, 16, 1))
                frame = np.kron(coarse, np.ones((4, 4, 1))) + noise
                producer.send(
                    frame.astype(np.uint8), label=0 if draw.random() < 0.8 else 1 + scrape % 9
                )
            recorder.watch(EVERY / 60)
            if scrape == 15:
                recorder.mark("covered")
    assert stop(daemon) == 0, run.log("run")


def broken(run: Any, recorder: Recorder) -> None:
    """Four producers with labels: `robot` shows many things, `yard` one thing only, `crawler` sends
    files that are no pictures, and `gate` leaves after two minutes. A minute before the end the
    learner is killed, and starts again."""
    import numpy as np
    from harness import stop, until

    from stream_ssl.producers import Producer

    daemon = run.start("run", str(run.config))
    until(lambda: run.metric("steps_total") >= 0, lambda: run.log("run"))
    draw = np.random.default_rng(0)
    same = np.kron(draw.integers(0, 200, (4, 4, 1)), np.ones((4, 4, 1))).astype(np.uint8)
    gate = Producer(run.address, name="gate")
    with ExitStack() as stack:
        names = ("robot", "yard", "crawler")
        producers = [stack.enter_context(Producer(run.address, name=name)) for name in names]
        for scrape in range(24):  # six minutes
            for number in range(300):
                label = int(draw.integers(10))
                coarse = draw.integers(0, 20 * (label + 1), (4, 4, 1))
                frame = np.kron(coarse, np.ones((4, 4, 1))).astype(np.uint8)
                producers[0].send(frame, label=label)
                if scrape < 8:
                    gate.send(frame[::-1].copy(), label=label)
                if number % 3 == 0:
                    producers[1].send(same)
                    producers[2].send(b"\xff\xd8" + draw.bytes(40), codec="jpeg")
            recorder.watch(EVERY / 60)
            if scrape == 7:
                gate.close()
                recorder.mark("left")
            if scrape == 19:
                os.kill(load(run.folder)["learner"]["pid"], signal.SIGKILL)
                recorder.mark("killed")
    assert stop(daemon) == 0, run.log("run")


QUEUE = {"memory": {"capacity": 64, "eviction": {"class_path": "oldest"}}}
OBSERVED = {
    "learner": {"threads": 1, "novelty": "auto"},
    "shadows": {"queue": {"class_path": "stream_ssl.memory.eviction.Oldest"}},
    "observe": {
        "held_out": {
            "every": 50,
            "references_per_class": 10,
            "queries_per_class": 5,
            "source": {
                "class_path": "stream_ssl.producers.sources.Synthetic",
                "init_args": {"count": 400, "size": 16, "channels": 1, "seed": 4},
            },
        }
    },
}
SCENARIOS: dict[str, tuple[Callable[[Any, Recorder], None], dict[str, Any]]] = {
    "pause": (pause, {}),
    "covered": (covered, QUEUE),
    "broken": (broken, OBSERVED),
}


def main(name: str) -> None:
    from harness import TINY, processes

    scenario, other = SCENARIOS[name]

    with socket.create_server(("127.0.0.1", 0)) as server:  # one that a restart binds again
        port = server.getsockname()[1]
    bind = {"receiver": {"bind": f"tcp://127.0.0.1:{port}"}}
    settings = TINY | bind | {"checkpoints": {"every_seconds": 60.0}} | other
    with (
        TemporaryDirectory() as folder,
        processes(Path(folder) / "run", settings, whole=True) as run,
    ):
        recorder = Recorder(run.folder)
        scenario(run, recorder)
        save(FOLDER / f"{name}.json.gz", recorder.points, recorder.marks)


def told(name: str) -> dict[str, Any]:
    """Return a recording."""
    found: dict[str, Any] = json.loads(gzip.decompress((FOLDER / f"{name}.json.gz").read_bytes()))
    return found


def plain(values: str) -> list[float | None]:
    """Return the values that `notation` wrote."""
    found: list[float | None] = []
    for word in values.split():
        shown, _, times = word.partition("x")
        value = None if shown == "_" else float(shown)
        found += [value] * (int(times or value is None) + (value is not None))
    return found


if __name__ == "__main__":
    main(sys.argv[1])
