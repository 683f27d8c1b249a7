"""A run that was killed ends bit-equal to one that was not."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from learning_world import build, differing, steps
from safetensors.torch import load_file

from stream_ssl.ingest.offset import START
from stream_ssl.learning.checkpoint import Checkpointer
from stream_ssl.learning.optimiser import OptimiserSettings
from stream_ssl.learning.pace import Pace

SETTINGS = {
    "plain": dict,
    "replays": lambda: {"pace": Pace(0.3), "reencode": 3},
    "sgd": lambda: {"optimiser": OptimiserSettings("sgd", clip=0.5)},
    "without images": lambda: {"images": False, "pace": Pace(0.1)},
}


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_bit_equal_after_kills_at_random_steps(tmp_path: Path, name: str) -> None:
    make, last = SETTINGS[name], 30
    whole = build(**make())
    steps(whole, last)
    draw = random.Random(name)
    learner = build(**make())
    for _ in range(5):
        checkpointer = Checkpointer(tmp_path, every_seconds=None, every_steps=draw.randint(1, 4))
        found = checkpointer.newest()
        learner = build(found.offset if found else START, **make())
        if found:
            found.restore(learner)
        for _ in range(draw.randint(1, max(1, last - learner.step))):
            if learner.step < last:
                record = steps(learner, 1)[0]
                if checkpointer.due(record):
                    checkpointer.save(learner, {})
    steps(learner, last - learner.step)
    assert learner.step == last
    assert differing(whole, learner) == []


def test_bit_equal_after_sigkill(tmp_path: Path) -> None:
    last, draw, kills = 60, random.Random(0), 0
    run(tmp_path / "whole", last, kill_after=None)
    for _ in range(3):
        kills += run(tmp_path / "killed", last, kill_after=draw.randint(2, 18))
    assert kills == 3
    run(tmp_path / "killed", last, kill_after=None)
    for file in ("model", "optimiser", "memory", "rng"):
        path = Path("final/latest") / f"{file}.safetensors"
        whole, killed = load_file(tmp_path / "whole" / path), load_file(tmp_path / "killed" / path)
        assert set(whole) == set(killed)
        assert [name for name in whole if not whole[name].equal(killed[name])] == []


def run(folder: Path, last: int, kill_after: int | None) -> bool:
    """One process; SIGKILLed after it has told of `kill_after` steps. Whether it was."""
    script = Path(__file__).with_name("learning_killed.py")
    command = [sys.executable, str(script), str(folder), str(last)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for count, _ in enumerate(process.stdout, 1):
            if count == kill_after:
                os.kill(process.pid, signal.SIGKILL)
                break
    assert process.returncode == (0 if kill_after is None else -signal.SIGKILL)
    return kill_after is not None
