"""A journal that is full of records for older checkpoints blocks the run only for a while."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness import TINY, processes, stop, until

from stream_ssl.producers import Producer
from stream_ssl.wire import Sample

pytestmark = pytest.mark.timeout(400)

BATCH = 64
SMALL: dict[str, Any] = {
    **TINY,
    "batches": {"batch_size": BATCH},
    "journal": {"budget": 1 << 20},
    "receiver": {**TINY["receiver"], "max_packet": 1 << 16},
}
LARGE = ("--source.size", "48")  # the learner decodes these images to fewer pixels
SAMPLES = 14 * BATCH  # twice what the journal holds of them


@pytest.mark.parametrize(
    "checkpoints",
    [
        {"every_steps": 10_000, "every_seconds": None, "keep": 1},  # no checkpoint would be due
        {"every_steps": 2, "every_seconds": None, "keep": 5},  # the oldest checkpoint would stay
    ],
    ids=["seldom", "many"],
)
def test_a_stream_larger_than_the_journal_is_learned(
    checkpoints: dict[str, Any], tmp_path: Path
) -> None:
    with processes(tmp_path / "run", {**SMALL, "checkpoints": checkpoints}) as run:
        run.role("receiver")
        learner = run.role("learner")
        producer = run.produce(SAMPLES, *LARGE)
        until(
            lambda: run.metric("trained_samples_total") == SAMPLES,
            lambda: run.log("learner"),
            seconds=150,
        )
        assert producer.wait(30) == 0, run.log("robot")
        assert "the journal is full" in run.log("learner")
        assert stop(learner) == 0
        again = run.role("learner")  # it continues with the rest of the journal
        assert run.produce(SAMPLES + 2 * BATCH, *LARGE).wait(90) == 0, run.log("robot")
        # A counter begins anew with its process.
        until(lambda: run.metric("trained_samples_total") == 2 * BATCH, lambda: run.log("learner"))
        assert stop(again) == 0


def test_samples_that_cannot_be_decoded_do_not_block_a_full_journal(tmp_path: Path) -> None:
    with processes(tmp_path / "run", SMALL) as run:
        run.role("receiver")
        run.role("learner")
        rubbish = b"\xff\xd8" + bytes(10_000)
        with Producer(run.address, "garbage") as producer:
            for number in range(160):  # more than the journal holds
                producer.send(Sample(str(number), rubbish, "jpeg"), timeout=60)
            producer.flush(60)
        good = run.produce(2 * BATCH)
        until(lambda: run.metric("trained_samples_total") == 2 * BATCH, lambda: run.log("learner"))
        assert good.wait(30) == 0, run.log("robot")
        assert "full of samples that cannot be decoded" in run.log("learner")


def test_a_batch_may_be_larger_than_max_lag_bytes(tmp_path: Path) -> None:
    packet = 1 << 16
    limits = {**SMALL["receiver"], "max_lag_bytes": packet}
    settings = {**SMALL, "receiver": limits, "batches": {"batch_size": 320}}
    with processes(tmp_path / "run", settings) as run:
        run.role("receiver")
        run.role("learner")
        assert packet < 320 * 16 * 16
        good = run.produce(3 * 320)
        until(lambda: run.metric("trained_samples_total") == 3 * 320, lambda: run.log("learner"))
        assert good.wait(30) == 0, run.log("robot")
