"""An image file under a process that is killed while it writes.

Shapes: D embedding, k occupied slots, C H W image.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from image_file_worker import CAPACITY, built, embedding_of, image_of

from memory import WorkingMemory

WORKER = Path(__file__).parent / "image_file_worker.py"
ROOT = Path(__file__).parent.parent.parent


def run_and_kill(folder: Path, linger: float) -> int:
    """Let the worker save twice and add some more; what it last told to be saved when SIGKILL came.

    Args:
        folder: of its files.
        linger: seconds after the second batch that follows the second save.
    """
    worker = subprocess.Popen(
        [sys.executable, str(WORKER), str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert worker.stdout is not None
    try:
        told: list[str] = []
        while told.count("saved") < 2 or told[-4::2] != ["added", "added"]:
            line = worker.stdout.readline().split()
            assert line, "the worker ended by itself"
            told += line
        time.sleep(linger)
    finally:
        worker.kill()
        told += worker.stdout.read().split()
        worker.stdout.close()
        worker.wait(timeout=60)
    assert worker.returncode == -signal.SIGKILL
    return max(int(at) for what, at in itertools.pairwise(told) if what == "saved")


def check_true(memory: WorkingMemory) -> int:
    """Whether all that the memory says is so; how many images it has lost."""
    assert memory.check_valid() == (True, "")
    assert memory.images is not None
    true_kCHW = image_of(memory.ids)
    there = memory._columns.with_images()
    kept = torch.arange(len(memory)) if there is None else there
    lost = torch.ones(len(memory), dtype=torch.bool)
    lost[kept] = False
    assert torch.equal(memory.images[kept], true_kCHW[kept])
    assert int(memory.images[lost].sum()) == 0
    assert torch.allclose(memory.embeddings, embedding_of(true_kCHW), atol=1e-6)
    assert int(lost.sum()) == memory.stats().images_lost
    return int(lost.sum())


@pytest.mark.timeout(180)
def test_what_comes_back_after_a_kill_is_true(tmp_path: Path) -> None:
    lost = 0
    for linger in (0.0, 0.003):
        told = run_and_kill(tmp_path, linger)
        memory = built(tmp_path)
        assert len(memory) == CAPACITY
        # A save that was done but could not be told any more is as good.
        assert memory.stats().added >= told
        lost += check_true(memory)
        at = memory.stats().added
        del memory  # lets go of the file
    assert lost > 0, "no kill came between a save and the next: the test shows nothing"
    memory = built(tmp_path)
    while memory.stats().images_lost:
        ids_B = torch.arange(at, at + 16)
        memory.add(ids_B, embedding_of(image_of(ids_B)), image_of(ids_B))
        at += 16
        assert at < 20_000, "lost images are never replaced"
    assert check_true(memory) == 0
