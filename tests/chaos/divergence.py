"""A learning rate of 1e12 stops a daemon with good weights, and a lower rate repairs the run."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from harness import BATCH, TINY, Processes, processes, stop, until

KEEP = 2


def run(folder: Path, good: int = 20, samples: int = 120 * BATCH) -> dict[str, Any]:
    """Train for some updates, restart with a rate of 1e12 until it halts, then with the old rate.

    Args:
        folder: scratch.
        good: updates before the fault.
        samples: that come after it.
    """
    settings = TINY | {"checkpoints": {"keep": KEEP, "every_steps": 1, "every_seconds": None}}
    with processes(folder, settings, whole=True) as run:
        daemon = started(run, 1e-3)
        assert run.produce(good * BATCH).wait(60) == 0, run.log("robot")
        until(lambda: run.metric("trained_samples_total") == good * BATCH, lambda: run.log("run"))
        assert stop(daemon) == 0, run.log("run")
        weights = newest(folder).read_bytes()

        began, daemon = time.monotonic(), started(run, 1e12)
        assert run.produce(good * BATCH + samples).wait(60) == 0, run.log("robot")
        until(lambda: run.metric("divergence_reloads_total") > 0, lambda: run.log("run"))
        red = time.monotonic() - began
        until(lambda: run.metric("learner_halted") == 1, lambda: run.log("run"))
        up = daemon.poll() is None and "restart in" not in run.log("run")
        assert stop(daemon) == 0, run.log("run")
        survived = any(
            path.read_bytes() == weights
            for path in (folder / "checkpoints").glob("step-*/model.safetensors")
        )

        daemon = started(run, 1e-3)
        until(
            lambda: run.metric("trained_samples_total") > samples // 2 and run.metric("loss") > 0,
            lambda: run.log("run"),
        )
        repaired = run.metric("learner_halted") == run.metric("skipped_updates_in_a_row") == 0
        assert stop(daemon) == 0, run.log("run")
    return {"red_seconds": round(red, 1), "up": up, "survived": survived, "repaired": repaired}


def started(run: Processes, rate: float) -> Any:
    """Start a daemon with this learning rate."""
    settings = json.loads(run.config.read_text())
    run.config.write_text(json.dumps({**settings, "optimiser": {"learning_rate": rate}}))
    daemon = run.start("run", str(run.config))
    for name in ("steps_total", "received_samples_total"):
        until(lambda name=name: run.metric(name) >= 0, lambda: run.log("run"))
    return daemon


def newest(folder: Path) -> Path:
    """Return the weights of the newest checkpoint."""
    return folder / "checkpoints" / "latest" / "model.safetensors"
