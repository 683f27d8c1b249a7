"""Tests that a killed run ends bit-equal to one that was not killed."""

from __future__ import annotations

import random
from itertools import cycle
from pathlib import Path

import pytest
from forked import Forked
from learning_killed import live_and_die
from learning_world import build, differing, steps

from stream_ssl.batch import START
from stream_ssl.learning.checkpoint import Checkpointer
from stream_ssl.learning.optimiser import OptimiserSettings
from stream_ssl.learning.pace import Pace
from stream_ssl.losses import Debiased, InfoNCE, Ramp
from stream_ssl.memory.descriptors import Embedding, Features, Thumbnail, Weighted
from stream_ssl.methods import METHODS

SETTINGS = {  # each option occurs once or twice, beside independent options
    "replays, sgd": lambda: {
        "pace": Pace(0.3),
        "reencode": 3,
        "optimiser": OptimiserSettings("sgd", clip=0.5),
    },
    "rare ones first, rising prior": lambda: {
        "anchors": "memory",
        "draw": "inverse-count",
        "loss": Debiased(prior=Ramp(0.3, steps=20)),
    },
    "new ones by epochs": lambda: {
        "anchors": "memory",
        "draw": "epochs",
        "novelty": 0.2,
        "descriptor": Thumbnail(4),
        "pace": Pace(0.2, counts="new"),
        "reencode": 2,
    },
    "counts on features": lambda: {
        "anchors": "memory",
        "draw": "epochs",
        "descriptor": Features(5),
        "plain_keys": True,
        "pace": Pace(0.2),
    },
    "counts on features, the stream": lambda: {"descriptor": Features(9), "reencode": 2},
    "counts on embeddings and features": lambda: {
        "anchors": "memory",
        "descriptor": Weighted([Embedding(), Features(5)]),
        "plain_keys": True,
    },
    "without images": lambda: {"images": False, "pace": Pace(0.1)},
    "an oracle": lambda: {
        "pace": Pace(0.2),
        "loss": InfoNCE(0.2, false_negatives="exclude"),
    },
    "a prior of the memory": lambda: {
        "pace": Pace(0.2),
        "loss": Debiased(prior="memory"),
    },
    **{  # every method, and both kinds of anchors
        f"{kind} {how}": lambda kind=kind, how=how: {"kind": kind, "anchors": how}
        for kind, how in zip(METHODS, cycle(("stream", "memory")), strict=False)
    },
}


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_a_run_that_restarts_at_random_steps_ends_bit_equal(tmp_path: Path, name: str) -> None:
    make, last = SETTINGS[name], 12
    whole = build(**make())
    steps(whole, last)
    draw = random.Random(name)
    learner = build(**make())
    for _ in range(3):
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


def test_a_run_that_sigkill_ends_repeatedly_finishes_bit_equal(tmp_path: Path) -> None:
    last, kills, output = 40, 4, tmp_path / "lives.log"
    lives = Forked(live_and_die, tmp_path / "saved", last, 0, kills, output=output)
    assert lives.wait(150) == 0, output.read_text()
    found = Checkpointer(tmp_path / "saved").newest()
    killed = build(found.offset, pace=Pace(0.2), reencode=2)
    found.restore(killed)
    whole = build(pace=Pace(0.2), reencode=2)
    steps(whole, last)
    assert killed.step == last
    assert differing(whole, killed) == []
