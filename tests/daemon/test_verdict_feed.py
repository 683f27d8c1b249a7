"""A producer gets the learner's verdicts on its samples, over real processes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from harness import BATCH, processes, until

from stream_ssl.producers import Producer, Verdict

pytestmark = pytest.mark.timeout(300)


def test_a_producer_gets_verdicts_when_its_samples_are_kept_and_evicted(tmp_path: Path) -> None:
    told: list[Verdict] = []
    with processes(tmp_path / "run") as run:
        run.role("receiver")
        with Producer(run.address, "robot", on_verdict=told.append) as producer:
            producer.connect()
            until((run.folder / "verdicts.sock").exists, lambda: run.log("receiver"))
            run.role("learner")
            draw = np.random.default_rng(0)
            for number in range(12 * BATCH):
                pixels = draw.integers(0, 256, (16, 16, 1), np.uint8)
                producer.send(pixels, id=f"frame-{number}")
            producer.flush()
            until(
                lambda: {verdict.what for verdict in told} == {"kept", "evicted"},
                lambda: f"{told[-3:]} {run.log('learner')}",
            )
        first = told[0]
        assert (first.source, first.id, first.what) == ("robot", "frame-0", "kept")
        counted = [verdict for verdict in told if verdict.what == "kept"]
        assert all(verdict.duplicates is not None for verdict in counted)
        assert all((v.age or 0) > 0 for v in told if v.what == "evicted")
        until(lambda: not (run.folder / "verdicts.sock").exists(), lambda: run.log("receiver"))
