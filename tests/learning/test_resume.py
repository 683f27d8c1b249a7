"""A run that was killed ends bit-equal to one that was not."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest
from learning_world import build, differing, steps

from stream_ssl.ingest.offset import START
from stream_ssl.learning.checkpoint import Checkpointer
from stream_ssl.learning.optimiser import OptimiserSettings
from stream_ssl.learning.pace import Pace

SETTINGS = {
    "plain": dict,
    "replays": lambda: {"pace": Pace(0.3), "reencode": 3},
    "from the memory": lambda: {"anchors": "memory", "pace": Pace(0.2), "reencode": 2},
    "rare ones first": lambda: {"anchors": "memory", "draw": "inverse-count"},
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
    last, kills = 60, 6
    script = Path(__file__).with_name("learning_killed.py")
    command = [sys.executable, str(script), str(tmp_path), str(last), "0", str(kills)]
    subprocess.run(command, check=True, timeout=150)
    found = Checkpointer(tmp_path).newest()
    killed = build(found.offset, pace=Pace(0.2), reencode=2)
    found.restore(killed)
    whole = build(pace=Pace(0.2), reencode=2)
    steps(whole, last)
    assert killed.step == last
    assert differing(whole, killed) == []
