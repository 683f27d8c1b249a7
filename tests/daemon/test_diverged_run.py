"""A daemon whose learning rate is far too high says so, keeps good weights, and can be repaired."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
from harness import BATCH, TINY, processes, stop, until

from stream_ssl.daemon.endpoints import load
from stream_ssl.learning.divergence import ROW

pytestmark = pytest.mark.timeout(600)

REMEDY = "lower optimiser.learning_rate"


def test_a_daemon_halts_at_too_high_a_rate_and_continues_at_a_lower_rate(tmp_path: Path) -> None:
    until_halted, samples = 3 * (ROW + 1) * BATCH, 80 * BATCH
    settings = TINY | {
        "optimiser": {"learning_rate": 1e12},
        "checkpoints": {"keep": 2, "every_steps": 1, "every_seconds": None},
    }
    with processes(tmp_path / "run", settings) as run:
        receiver, learner = run.role("receiver"), run.role("learner")
        assert run.produce(samples).wait(60) == 0, run.log("robot")
        until(lambda: run.metric("learner_halted") == 1, lambda: run.log("learner"))
        assert run.metric("divergence_reloads_total") == 3
        assert run.metric("loss") == -1, "no stale loss"
        ready = httpx.get(f"{load(run.folder)['learner']['http']}/readyz")
        assert ready.status_code == 503
        assert REMEDY in ready.text
        assert REMEDY in run.log("learner")
        trained = run.metric("trained_samples_total")
        assert trained == 3 * BATCH
        skipped = sum(
            run.metric(f'skipped_samples_total{{reason="{reason}"}}')
            for reason in ("loss", "gradient", "keys")
        )
        assert trained + skipped == until_halted
        assert learner.poll() is None
        assert stop(learner) == 0, run.log("learner")
        latest = run.folder / "checkpoints" / "latest" / "state.json"
        assert json.loads(latest.read_text())["step"] == 0, "the weights before the fault"

        run.config.write_text(
            json.dumps({**settings, "optimiser": {"learning_rate": 1e-3}, "run": str(run.folder)})
        )
        learner = run.role("learner")
        until(
            lambda: run.metric("trained_samples_total") > samples - 3 * (ROW + 1) * BATCH,
            lambda: run.log("learner"),
        )
        assert run.metric("learner_halted") == 0
        assert run.metric("skipped_updates_in_a_row") == 0
        assert run.metric("loss") > 0
        assert stop(learner) == 0, run.log("learner")
        assert stop(receiver) == 0
