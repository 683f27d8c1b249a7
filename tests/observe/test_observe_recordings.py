"""The alerts on what real runs exported: silent where nothing is wrong, and not on a fault.

`record.py` makes the recordings. Where promtool is missing, which is in Debian's package
`prometheus`, they cannot be evaluated; `make prometheus` then fails.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from record import EVERY, notation, plain, told

from stream_ssl.app.scrape import key

RULES = Path(__file__).parents[2] / "deploy" / "prometheus" / "alerts.yml"
LEARNER = {"job": "stream-ssl", "instance": "learner", "role": "learner"}
HOUR = int(3600 / EVERY)
"""Scrapes."""

Series = dict[str, list[float | None]]

needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool here")


def firing(series: Series, folder: Path) -> set[str]:
    """The alerts that fire at some moment, looked at every five minutes."""
    length = max(map(len, series.values()))
    minutes = range(0, int(length * EVERY / 60) + 1, 5)
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
    """The recorded pause, its quiet drawn out by twelve hours; then its restart."""
    recording = told("pause")
    at = recording["marks"]["restarted"]
    found: Series = {}
    for name, values in recording["series"].items():
        every = plain(values)
        found[name] = [*every[:at], *[every[at - 1]] * (12 * HOUR), *every[at:]]
    return found


@needs_promtool
def test_nothing_fires_when_a_stream_ends_nor_in_the_night_nor_at_a_restart(tmp_path: Path) -> None:
    assert firing(idle_night(), tmp_path) == set()


FAULTS = {
    "StreamSslLearnerStuck": ("lag_records", [0.0] * 12 + [9.0] * (2 * HOUR)),
    "StreamSslLag": ("lag_seconds", [EVERY * scrape for scrape in range(2 * HOUR)]),
    "StreamSslCheckpointOld": (
        "checkpoint_lag_seconds",
        [EVERY * scrape for scrape in range(2 * HOUR)],
    ),
    "StreamSslDown": ("up", [1.0] * 12 + [0.0] * HOUR),
}


@needs_promtool
@pytest.mark.parametrize("alert", sorted(FAULTS))
def test_the_same_night_with_a_fault_fires(alert: str, tmp_path: Path) -> None:
    """What the silence above is worth: one series as it would be, were something wrong."""
    name, values = FAULTS[alert]
    fault = key(name if name == "up" else f"stream_ssl_{name}", LEARNER)
    series = {name: values[: 3 * HOUR] for name, values in idle_night().items()}
    assert fault in series
    assert firing(series | {fault: values}, tmp_path) == {alert}


def test_the_recorded_pause_is_one() -> None:
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
def test_a_covered_camera_is_told(tmp_path: Path) -> None:
    """A real run whose camera is covered while its memory is a queue: the stream has changed, the
    memory fills with near-copies, and four in five samples are of one class."""
    recording = told("covered")
    series = {name: plain(values) for name, values in recording["series"].items()}
    before = {name: values[: recording["marks"]["covered"]] for name, values in series.items()}
    alerts = {"StreamSslDrift", "StreamSslNearCopies", "StreamSslCollisions"}
    assert firing(lasting(series), tmp_path) == alerts
    assert firing(lasting(before), tmp_path) == {"StreamSslCollisions"}


def lasting(series: Series) -> Series:
    """What was recorded, and then 45 minutes more of the last one's kind."""
    found = {}
    for name, values in series.items():
        counts = name.partition("{")[0].endswith(("_total", "_bucket", "_sum", "_count"))
        last, before = values[-1], values[-2]
        rise = last - before if counts and last is not None and before is not None else 0.0
        more = [None if last is None else last + rise * n for n in range(1, HOUR * 3 // 4)]
        found[name] = [*values, *more]
    return found
