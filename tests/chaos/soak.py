"""Gate 12: a daemon for an hour or for days; does its memory grow, do descriptors and threads?

    make chaos GATES=soak SOAK_MINUTES=20160     # 14 days

A daemon with a checkpoint each minute; producers that come, send, and go, one killed now and then.
Each line of FOLDER/soak.csv is a look at one process; started again, it goes on with the same run
and file. The slope is of memory that is the process's own (Anonymous in smaps_rollup): what is
mapped of the journal's files comes and goes with their pages. Warm-up, half of the time, is left
out.
"""

from __future__ import annotations

import contextlib
import csv
import itertools
import random
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from harness import TINY, Processes, processes, stop, until

from stream_ssl.daemon.endpoints import load

SETTINGS = TINY | {
    "journal": {"budget": 256 << 20},
    "checkpoints": {"every_seconds": 60.0, "every_steps": None},
    "batches": {"batch_size": 256},
    "memory": {"capacity": 1024},
}
FIELDS = ("at", "role", "pid", "anonymous", "rss", "descriptors", "threads", "scrape", "samples")
ROLES = ("receiver", "learner")
WARM_UP = 0.5


def soak(folder: Path, seconds: float, every: float = 10.0, rate: float = 400.0) -> None:
    """Run for so long, and write down what is seen; a run that is there goes on.

    Args:
        folder: of the run, and of soak.csv.
        seconds: how long.
        every: seconds between two looks.
        rate: samples a second of each of three producers.
    """
    draw = random.Random(0)
    with processes(folder, SETTINGS, whole=True) as run:
        daemon = run.start("run", str(run.config))
        until(lambda: answers(folder), lambda: run.log("run"), 300)
        names = itertools.cycle(f"robot-{n}" for n in range(12))
        sending: dict[str, subprocess.Popen[bytes]] = {}
        end, totals = time.monotonic() + seconds, dict[str, int]()
        # One client, as Prometheus keeps its connection: to make one takes longer than a scrape.
        with (folder / "soak.csv").open("a", newline="") as file, httpx.Client(timeout=30.0) as web:
            table = csv.DictWriter(file, FIELDS)
            if not file.tell():
                table.writeheader()
            while time.monotonic() < end:
                assert daemon.poll() is None, run.log("run")[-2000:]
                tend(run, sending, names, totals, rate, draw)
                for role in ROLES:
                    table.writerow(look(run, web, folder, role))
                file.flush()
                time.sleep(every)
        for producer in sending.values():
            producer.terminate()
        for producer in sending.values():
            producer.wait(60)
        assert stop(daemon) == 0, run.log("run")[-2000:]


def answers(folder: Path) -> bool:
    """Return whether all processes answer. A resumed run may first have its former addresses."""
    entries = load(folder)
    with contextlib.suppress(httpx.TransportError):
        return set(entries) >= set(ROLES) and all(
            httpx.get(f"{entries[role]['http']}/healthz", timeout=5.0).is_success for role in ROLES
        )
    return False


def tend(
    run: Processes,
    sending: dict[str, subprocess.Popen[bytes]],
    names: Any,
    totals: dict[str, int],
    rate: float,
    draw: random.Random,
) -> None:
    """Three producers send at any time; each ends after a minute or so, a few are killed."""
    for name, producer in list(sending.items()):
        if producer.poll() is not None:
            del sending[name]
        elif draw.random() < 0.01:
            producer.kill()
            producer.wait()
            del sending[name]
    while len(sending) < 3:
        name = next(name for name in names if name not in sending)
        totals[name] = totals.get(name, 0) + int(rate * draw.uniform(30, 90))
        sending[name] = run.produce(totals[name], "--shape.rate", str(rate), name=name)


def look(run: Processes, web: httpx.Client, folder: Path, role: str) -> dict[str, float | str]:
    """Return one line of the table."""
    entry = load(folder)[role]
    pid = int(entry["pid"])
    began = time.monotonic()
    web.get(f"{entry['http']}/metrics").raise_for_status()
    scrape = time.monotonic() - began
    process = Path(f"/proc/{pid}")
    rollup = dict(
        line.split(":", 1) for line in (process / "smaps_rollup").read_text().splitlines()[1:]
    )
    return {
        "at": round(time.time(), 1),
        "role": role,
        "pid": pid,
        "anonymous": 1024 * int(rollup["Anonymous"].split()[0]),
        "rss": 1024 * int(rollup["Rss"].split()[0]),
        "descriptors": len(list((process / "fd").iterdir())),
        "threads": len(list((process / "task").iterdir())),
        "scrape": round(scrape, 4),
        "samples": run.metric(
            "acked_samples_total" if role == "receiver" else "trained_samples_total"
        ),
    }


def findings(folder: Path) -> list[dict[str, Any]]:
    """Return a row for each process. One checkpoint must not tilt its Theil-Sen slopes."""
    with (folder / "soak.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    rows = []
    for role in ROLES:
        looks = [line for line in lines if line["role"] == role]
        at = np.array([float(line["at"]) for line in looks])
        warm = at >= at[0] + WARM_UP * (at[-1] - at[0])
        columns = {
            name: np.array([float(line[name] or "nan") for line in looks])[warm]
            for name in FIELDS
            if name != "role"
        }
        hours = (columns["at"] - columns["at"][0]) / 3600
        slope = theil_sen(hours, columns["anonymous"] / 1e6)
        rows.append(
            {
                "process": role,
                "minutes": (at[-1] - at[0]) / 60,
                "samples": int(columns["samples"].max()),
                "anonymous_mb": float(np.median(columns["anonymous"])) / 1e6,
                "mb_per_hour": slope,
                "rss_mb": float(np.median(columns["rss"])) / 1e6,
                **{
                    name: f"{columns[name].min():.0f}..{columns[name].max():.0f}"
                    for name in ("descriptors", "threads")
                },
                "scrape_ms": 1000 * float(np.nanmedian(columns["scrape"])),
                "restarts": len(set(columns["pid"])) - 1,
            }
        )
    return rows


def holds(row: dict[str, Any]) -> bool:
    """Return whether the figures of a process do not grow."""
    flat = all(_spread(row[name]) <= 16 for name in ("descriptors", "threads"))
    return bool(flat and row["mb_per_hour"] <= 1 and row["scrape_ms"] < 50)


def _spread(told: str) -> int:
    least, _, most = told.partition("..")
    return int(most) - int(least)


def theil_sen(x: np.ndarray, y: np.ndarray) -> float:
    """Return the median of the slopes between all pairs."""
    left, right = np.triu_indices(len(x), 1)
    run = x[right] - x[left]
    return float(np.median((y[right] - y[left])[run > 0] / run[run > 0])) if len(x) > 1 else 0.0
