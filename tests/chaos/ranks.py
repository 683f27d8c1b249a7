"""Gates 15 and 16: ranks under torchrun, of which one is killed at random, or hangs."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from harness import TINY, processes, stop, until
from safetensors.torch import load_file

BATCH, RANKS = 32, 2
TIMEOUT = 10.0
"""Seconds after which a rank gives up on one that hangs."""
SETTINGS: dict[str, Any] = TINY | {
    "batches": {"batch_size": BATCH},
    "memory": {"capacity": 256, "descriptor": "Thumbnail"},
    "learner": {"threads": 1, "anchors": "memory", "draw": "epochs", "novelty": 0.9},
    "checkpoints": {"every_steps": 20, "every_seconds": None},
    "ranks": {"timeout": TIMEOUT},
}


def kills(folder: Path, count: int, samples: int, seed: int = 0) -> dict[str, int]:
    """Ranks that are killed so often while they read a finite stream, beside ones that are not.

    Returns:
        samples, how many were counted by those that were killed, files of the last checkpoint, and
        how many differ.
    """
    whole, killed = folder / "whole", folder / "killed"
    _fill(whole, samples)
    shutil.copytree(whole, killed)
    (killed / "config.yaml").write_text(json.dumps({**SETTINGS, "run": str(killed)}))
    draw = random.Random(seed)
    _learn(whole, 0, draw)
    _learn(killed, count, draw)
    return {
        "kills": count,
        "samples": samples,
        "counted": json.loads((killed / "checkpoints/latest/state.json").read_text())["samples"],
        **_compared(whole, killed),
    }


def evictions() -> dict[str, int]:
    """Compare evictions of 2 and 4 ranks with those of one process. Count the failures."""
    return {"streams": 210, "ranks": 2 + 4, "failed": sum(map(bool, checked("many evictions")))}


def checked(name: str) -> list[str]:
    """What a check of tests/ranks found wrong, for each number of ranks; "" where all is well."""
    tests = Path(__file__).parents[1]
    paths = [tests.parent, *(tests / folder for folder in ("learning", "losses")), *sys.path]
    found = subprocess.run(
        [sys.executable, tests / "ranks" / "run_checks.py", name],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))},
        stdout=subprocess.PIPE,
        check=True,
    )
    lines = found.stdout.splitlines()  # torch 2.8 prints lines of gloo here, too
    return [json.loads(line)["fault"] for line in lines if not line.startswith(b"[Gloo]")]


def _learn(folder: Path, deaths: int, draw: random.Random) -> None:
    """Read the whole journal while this number of ranks is killed."""
    with torchrun(folder, RANKS, restarts=deaths) as launcher:
        before = 0
        for _ in range(deaths):
            # Not before a checkpoint is newer than the last death: else it might never end.
            until(partial(_step_is_above, folder, before), partial(log_of, folder), 240)
            time.sleep(draw.uniform(0, 1))
            before = step_of(folder)
            draw.choice(_workers(launcher)).kill()
        reading = Reading(folder)
        until(reading.has_ended, partial(log_of, folder), 600)
        stop(launcher)


class Reading:
    """A view of the positions that the ranks publish twice a second."""

    def __init__(self, folder: Path) -> None:
        self._file, self._seen, self._since = folder / "cursor.json", b"", 0.0

    def has_ended(self) -> bool:
        """Return whether the ranks live, and have read no new sample for some seconds."""
        now, told = time.monotonic(), self._file.read_bytes() if self._file.exists() else b""
        alive = told and time.time() - self._file.stat().st_mtime < 2
        if told != self._seen or not alive:
            self._seen, self._since = told, now
        return now - self._since > 5


def hangs(folder: Path, samples: int) -> dict[str, float]:
    """A rank that is stopped (SIGSTOP): seconds until the group has started again and learns."""
    _fill(folder, samples)
    with torchrun(folder, RANKS, restarts=1) as launcher:
        until(lambda: step_of(folder) > 0, lambda: log_of(folder), 240)
        old, before = _workers(launcher), step_of(folder)
        old[-1].suspend()
        began = time.monotonic()
        until(lambda: not any(one.is_running() for one in old), lambda: log_of(folder), 240)
        found = time.monotonic() - began
        until(lambda: step_of(folder) > before, lambda: log_of(folder), 240)
        back = time.monotonic() - began
        stop(launcher)
    return {"timeout": TIMEOUT, "gone": round(found, 1), "learns": round(back, 1)}


def _fill(folder: Path, samples: int) -> None:
    with processes(folder, SETTINGS) as run:
        receiver = run.role("receiver")
        assert run.produce(samples).wait(240) == 0, run.log("robot")
        assert stop(receiver) == 0


@contextmanager
def torchrun(
    folder: Path, ranks: int, restarts: int, *learner: str
) -> Iterator[subprocess.Popen[bytes]]:
    """The ranks of a run; what is left of them is killed when the block is left.

    Args:
        folder: of the run, with its config.yaml.
        learner: a script that learns, and its arguments; without them, ours.
    """
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *(f"--nproc-per-node={ranks}", f"--max-restarts={restarts}", "--monitor-interval=0.2"),
        *(learner or ("-m", "stream_ssl", "learner", str(folder / "config.yaml"))),
    ]
    env = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "NOTES": str(folder / "notes")}
    with (folder / "torchrun.log").open("ab") as log:
        launcher = subprocess.Popen(command, stdout=log, stderr=log, env=env)
    try:
        yield launcher
    finally:
        children = psutil.Process(launcher.pid).children() if launcher.poll() is None else []
        launcher.kill()
        launcher.wait()
        for child in children:
            child.kill()


def _workers(launcher: subprocess.Popen[bytes]) -> list[psutil.Process]:
    found: list[psutil.Process] = until(
        lambda: (
            len(psutil.Process(launcher.pid).children()) == RANKS
            and psutil.Process(launcher.pid).children()
        ),
        lambda: "the ranks are not there",
        240,
    )
    return found


def facts_of(folder: Path) -> dict[str, Any]:
    try:
        facts: dict[str, Any] = json.loads((folder / "checkpoints/latest/state.json").read_text())
    except (OSError, ValueError):
        return {}
    return facts


def step_of(folder: Path) -> int:
    return int(facts_of(folder).get("step", 0))


def _step_is_above(folder: Path, step: int) -> bool:
    return step_of(folder) > step


def _compared(one: Path, other: Path) -> dict[str, int]:
    folders = [path / "checkpoints/latest" for path in (one, other)]
    names = [sorted(path.name for path in folder.glob("*.safetensors")) for folder in folders]
    assert names[0] == names[1]
    unequal = 0
    for name in names[0]:
        ours, theirs = (load_file(folder / name) for folder in folders)
        unequal += ours.keys() != theirs.keys() or any(
            not ours[key].equal(theirs[key]) for key in ours
        )
    steps = [facts_of(path)["step"] for path in (one, other)]
    return {"files": len(names[0]), "unequal": unequal + (steps[0] != steps[1])}


def log_of(folder: Path) -> str:
    return (folder / "torchrun.log").read_text(errors="replace")[-4000:]
