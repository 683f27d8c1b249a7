"""A run and the export of its encoder, which several files of tests read and none changes."""

from __future__ import annotations

from pathlib import Path

import pytest
from evaluation_run import write_run

from stream_ssl.app import cli


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "run"
    counted = {"class_path": "stream_ssl.memory.eviction.MostDuplicated"}  # by linear counts
    write_run(folder, stages=2, held=40, memory={"capacity": 16, "eviction": counted})
    return folder


@pytest.fixture(scope="session")
def exported(run: Path) -> Path:
    folder = run.parent / "encoder"
    assert cli.main(["export", str(run), "--encoder", str(folder)]) == 0
    return folder
