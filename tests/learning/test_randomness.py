"""Tests of random generators that are swapped in and out, saved and restored."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from stream_ssl.learning.randomness import OwnRandomness, seed_everything, set_threads

CPU = torch.device("cpu")


def draw() -> list[float]:
    """Draw from every generator, including the cached second half of a Gaussian pair."""
    return [
        float(torch.randn(3).sum()),
        random.gauss(0, 1),
        random.random(),
        float(np.random.normal()),
        float(np.random.rand()),
    ]


def test_a_seed_fixes_every_generator() -> None:
    seed_everything(4)
    first = draw()
    seed_everything(4)
    assert draw() == first
    seed_everything(5)
    assert all(a != b for a, b in zip(draw(), first, strict=True))


def test_own_draws_and_outer_draws_are_independent() -> None:
    seed_everything(1)
    outer = [draw(), draw()]
    own = OwnRandomness(2, CPU)
    with own:
        inner = [draw(), draw()]
    seed_everything(1)
    again = OwnRandomness(2, CPU)
    seen = [draw()]
    with again:
        assert draw() == inner[0]
    seen.append(draw())
    with again:
        assert draw() == inner[1]
    assert seen == outer


def test_own_randomness_resumes_from_its_state() -> None:
    own, other = OwnRandomness(2, CPU), OwnRandomness(3, CPU)
    with own:
        draw()
    other.load_state_dict(own.state_dict())
    with own:
        expected = draw()
    with other:
        assert draw() == expected


def test_set_threads_rejects_no_threads_and_a_million_threads() -> None:
    before = torch.get_num_threads()
    set_threads(1)
    set_threads(None)
    assert torch.get_num_threads() == 1
    set_threads(before)
    for threads in (0, 1_000_000):  # torch would end the process
        with pytest.raises(ValueError, match=f"threads is {threads}: must be from 1 to 1,024"):
            set_threads(threads)
