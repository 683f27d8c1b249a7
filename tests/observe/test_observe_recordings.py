"""Conditions and alerts on what real runs exported, without a fault and with one.

`record.py` makes the recordings. The watch of each process reads them as its own metrics, and
promtool evaluates the alerts on what the watch then exports. Without promtool, which is in Debian's
package `prometheus`, they cannot be evaluated; `make prometheus` then fails.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from record import EVERY, notation, plain, told

from stream_ssl.observe.health import Health
from stream_ssl.observe.scrape import key
from stream_ssl.observe.watch import Watch

RULES = Path(__file__).parents[2] / "deploy" / "prometheus" / "alerts.yml"
LEARNER = {"job": "stream-ssl", "instance": "learner", "role": "learner"}
HOUR = int(3600 / EVERY)
"""Scrapes."""

Series = dict[str, list[float | None]]

needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool here")


def present_in(series: Series) -> Series:
    """Return the series of stream_ssl_condition that both processes would have exported."""
    length = max(map(len, series.values()))
    found: Series = {}
    by_role: dict[str, dict[int, list[Any]]] = {"receiver": {}, "learner": {}}
    for name, values in series.items():
        metric, _, inner = name.partition("{")
        labels = dict(re.findall(r'(\w+)="([^"]*)"', inner))
        points = by_role[labels.get("role", "learner")]
        for at, value in enumerate(values):
            if value is not None and metric != "up":
                points.setdefault(at, []).append(
                    SimpleNamespace(name=metric, labels=labels, value=value)
                )
    for role, points in by_role.items():
        process = Replayed(role, points)
        for at in range(length):
            if at in points:
                for name, producer in process.look(at):
                    full = {"job": "stream-ssl", "instance": role, "role": role}
                    one = key("stream_ssl_condition", {**full, "name": name, "producer": producer})
                    found.setdefault(one, [0.0] * length)[at] = 1.0
            else:
                process = Replayed(role, points)  # the process was down, and starts again
    return found


class Replayed:
    """A process whose metrics are those of a recording."""

    def __init__(self, role: Any, points: dict[int, list[Any]]) -> None:
        self._points, self._at = points, 0
        self._present: Iterable[tuple[str, str]] = ()
        clock = lambda: self._at * EVERY  # noqa: E731

        def export(present: Any) -> None:
            self._present = present

        self._watch = Watch(role, self, Health(clock), export, clock=clock, wall=clock)  # type: ignore[arg-type]

    def restricted_registry(self, names: Iterable[str]) -> Any:
        samples = [one for one in self._points.get(self._at, []) if one.name in names]
        return SimpleNamespace(collect=lambda: [SimpleNamespace(samples=samples)])

    def look(self, at: int) -> Iterable[tuple[str, str]]:
        self._at = at
        self._watch.look()
        return self._present


def firing(series: Series, folder: Path) -> set[str]:
    """Return the alerts that fire at some minute."""
    series = series | present_in(series)
    length = max(map(len, series.values()))
    minutes = range(int(length * EVERY / 60) + 1)
    ask = [
        {"expr": 'ALERTS{alertstate="firing"}', "eval_time": f"{minute}m", "exp_samples": []}
        for minute in minutes
    ]
    given = [{"series": name, "values": notation(values)} for name, values in series.items()]
    test = {"interval": f"{EVERY:g}s", "input_series": given, "promql_expr_test": ask}
    file = folder / "test.yml"  # JSON is YAML
    suite = {"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [test]}
    file.write_text(json.dumps(suite))
    done = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True)
    found = set(re.findall(r'alertname=\\?"(\w+)', done.stdout + done.stderr))
    assert (done.returncode == 0) == (not found), done.stdout + done.stderr
    return found


def idle_night() -> Series:
    """Return the recorded pause, made three quiet hours longer, and its restart."""
    recording = told("pause")
    at = recording["marks"]["restarted"]
    found: Series = {}
    for name, values in recording["series"].items():
        every = plain(values)
        found[name] = [*every[:at], *[every[at - 1]] * (3 * HOUR), *every[at:]]
    return found


@needs_promtool
def test_a_night_without_samples_fires_one_alert_and_a_restart_none(tmp_path: Path) -> None:
    night = idle_night()
    assert firing(night, tmp_path) == {"StreamSslNothingReceived"}
    ended = told("pause")["marks"]["ended"]
    assert firing({name: values[:ended] for name, values in night.items()}, tmp_path) == set()


FAULTS = {
    "StreamSslLearnerStuck": ("lag_records", [0.0] * 12 + [9.0] * HOUR),
    "StreamSslLag": ("lag_seconds", [EVERY * scrape for scrape in range(2 * HOUR)]),
    "StreamSslCheckpointOld": (
        "checkpoint_lag_seconds",
        [EVERY * scrape for scrape in range(2 * HOUR)],
    ),
    "StreamSslDown": ("up", [1.0] * 12 + [0.0] * HOUR),
}


@needs_promtool
@pytest.mark.parametrize("alerts", [sorted(FAULTS)[::2], sorted(FAULTS)[1::2]], ids="-".join)
def test_the_same_night_with_two_faults_fires_their_alerts(
    alerts: list[str], tmp_path: Path
) -> None:
    """Two series have a fault, which proves that the alerts above could have fired."""
    series = {name: values[: 2 * HOUR] for name, values in idle_night().items()}
    for name, values in map(FAULTS.get, alerts):
        fault = key(name if name == "up" else f"stream_ssl_{name}", LEARNER)
        assert fault in series
        series[fault] = values
    assert firing(series, tmp_path) == {*alerts, "StreamSslNothingReceived"}


def test_the_learner_of_the_recorded_pause_is_idle_and_has_saved_all_updates() -> None:
    recording = told("pause")
    idle = recording["marks"]["restarted"] - 1
    names = ("trained_samples_total", "pending_samples", "lag_records", "checkpoint_step")
    at = {n: plain(recording["series"][key(f"stream_ssl_{n}", LEARNER)])[idle] for n in names}
    assert at == {
        "trained_samples_total": 640,
        "pending_samples": 8,
        "lag_records": 0,
        "checkpoint_step": 40,
    }


@needs_promtool
def test_a_recorded_covered_camera_fires_its_alerts(tmp_path: Path) -> None:
    """A real run whose camera is covered while its memory is a queue: the stream has changed, the
    memory fills with near-duplicates, and four in five samples are of one class."""
    recording = told("covered")
    series = {name: plain(values) for name, values in recording["series"].items()}
    before = {name: values[: recording["marks"]["covered"]] for name, values in series.items()}
    alerts = {"StreamSslDrift", "StreamSslNearDuplicates", "StreamSslCollisions"}
    assert firing(lasting(series), tmp_path) == alerts
    assert firing(lasting(before), tmp_path) == {"StreamSslCollisions"}


@needs_promtool
def test_a_recorded_broken_run_fires_the_alert_of_each_fault(tmp_path: Path) -> None:
    """A real run: `yard` sends one picture, `crawler` sends no pictures, and the learner is killed.
    Everything else works well."""
    recording = told("broken")
    series = {name: plain(values) for name, values in recording["series"].items()}
    present = set()
    for name, values in series.items():
        if name.startswith("stream_ssl_condition{") and 1.0 in values:
            labels = dict(re.findall(r'(\w+)="([^"]*)"', name))
            present.add((labels["name"], labels["producer"]))
    assert present == {
        ("bad-samples", "crawler"),
        ("everything-dropped", "yard"),
        ("restarting", ""),
    }
    before = {name: values[: recording["marks"]["killed"]] for name, values in series.items()}
    of_producers = {"StreamSslBadSamples", "StreamSslEverythingDropped"}
    assert firing(lasting(before), tmp_path) == of_producers
    assert firing(lasting(series), tmp_path) == of_producers | {"StreamSslRestarting"}


def lasting(series: Series) -> Series:
    """Return the recording, continued for 45 minutes at its last rates."""
    found = {}
    for name, values in series.items():
        counts = name.partition("{")[0].endswith(("_total", "_bucket", "_sum", "_count"))
        last, before = values[-1], values[-2]
        rise = last - before if counts and last is not None and before is not None else 0.0
        more = [None if last is None else last + rise * n for n in range(1, HOUR * 3 // 4)]
        found[name] = [*values, *more]
    return found
