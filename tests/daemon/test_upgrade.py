"""A run folder of an earlier release, carried to another machine: docs/upgrade.md.

The folder in runs/ was made by the commit before version 3 of the memory's state: 20 steps of 16
samples, a checkpoint, and 160 samples behind it in the journal.
"""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path

import pytest
from harness import TINY, processes, stop, until

import stream_ssl

EARLIER = Path(__file__).parent / "runs" / "2026-11-22-memory-2.tar.xz"
SETTINGS = TINY | {"checkpoints": {"every_steps": 10, "every_seconds": None, "keep": 1}}


@pytest.mark.parametrize(
    ("backup", "trained"),
    [("all of it", 640), ("without its journal", 320 + 640)],
)
def test_a_run_of_an_earlier_release_continues(tmp_path: Path, backup: str, trained: int) -> None:
    with tarfile.open(EARLIER) as archive:
        # The documentation of tarfile advises this, because Python before 3.11.4 has no filters.
        archive.extraction_filter = getattr(tarfile, "data_filter", lambda member, path: member)
        archive.extractall(tmp_path)
    folder = tmp_path / "run"
    if backup == "without its journal":
        shutil.rmtree(folder / "journal")
    assert stream_ssl.load_encoder(folder).size == 16
    with processes(folder, SETTINGS) as run:
        receiver, learner = run.role("receiver"), run.role("learner")
        assert run.produce(640).wait(60) == 0, run.log("robot")
        done = f"checkpoint at step {trained // 16}"
        until(lambda: done in run.log("learner"), lambda: run.log("learner"))
        assert stop(learner) == stop(receiver) == 0
        said = run.log("learner")
        assert "continuing at step 20" in said
        assert "skipped damaged" not in said
        assert "the journal is a new one" not in said
        state = json.loads((folder / "checkpoints" / "latest" / "state.json").read_text())
        assert (state["samples"], state["step"]) == (trained, trained // 16)
        identity = (folder / "journal" / "id").read_text().split()
        assert identity == 2 * [state["journal"]]
        if backup == "all of it":
            return
        # Only the checkpoint stays, beside a new journal that is longer than its position.
        shutil.rmtree(folder / "journal")
        (folder / "cursor.json").unlink()
        receiver = run.role("receiver")
        assert run.produce(1280).wait(60) == 0, run.log("robot")
        learner = run.role("learner")
        done = f"checkpoint at step {(trained + 1280) // 16}"
        until(lambda: done in run.log("learner"), lambda: run.log("learner"))
        assert stop(learner) == stop(receiver) == 0
        assert "reading all that it has" in run.log("learner")
    state = json.loads((folder / "checkpoints" / "latest" / "state.json").read_text())
    assert (state["samples"], state["step"]) == (trained + 1280, (trained + 1280) // 16)
    assert identity != 2 * [state["journal"]]
