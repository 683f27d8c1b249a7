"""Counts of nearly nothing: very sharp scores over memories of a few slots, in float32.

What is promised there is of rounding alone, so it is judged in float64 by its unit.

Shapes: D embedding, K slots, N samples.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from memory import WorkingMemory
from memory.eviction import MostDuplicated
from memory.scores import Gaussian, Score, Threshold, VonMisesFisher
from tests.naive import STREAMS, IncrementalDuel, unit_rows

SCORES: tuple[Score, ...] = (
    VonMisesFisher(0.02),
    VonMisesFisher(0.001),
    Gaussian(1e-4),
    Threshold(0.99, 0.001),
)


def decided(z_ND: Tensor, capacity: int, score: Score, compete: bool) -> list[int]:
    """The slot that each newcomer of a full memory took over; -1 where it was refused."""
    memory = WorkingMemory(capacity, z_ND.shape[1], MostDuplicated(score, compete))
    ids, slots = torch.arange(len(z_ND)), []
    memory.add(ids[:capacity], z_ND[:capacity])
    held = list(range(capacity))
    for start in range(capacity, len(z_ND), 11):
        part = slice(start, start + 11)
        admission = memory.add(ids[part], z_ND[part])
        gone, refused = iter(admission.evicted.tolist()), set(admission.refused.tolist())
        for newcomer in ids[part].tolist():
            slots.append(-1 if newcomer in refused else held.index(next(gone)))
            if slots[-1] >= 0:
                held[slots[-1]] = newcomer
    return slots


@pytest.mark.parametrize("compete", [False, True], ids=["evict", "compete"])
@pytest.mark.parametrize("capacity", [1, 2, 3, 8])
@pytest.mark.parametrize("score", SCORES, ids=repr)
def test_ties_are_of_rounding_alone(score: Score, capacity: int, compete: bool) -> None:
    for seed, stream in enumerate(STREAMS):
        rng = np.random.default_rng([seed, capacity])
        z_ND = unit_rows(rng, stream, capacity + 33, int(rng.integers(2, 12))).float()
        for dtype in (torch.float32, torch.float64):
            twin = IncrementalDuel(score, z_ND[:capacity], compete)
            slots = decided(z_ND.to(dtype), capacity, score, compete)
            for x_D, slot in zip(z_ND[capacity:], slots, strict=True):
                most = float(twin.judged(x_D.double()).max())
                tie = 4e-7 * (1 + score.slope) * (most + 0.25) + 1e-6 * score.slope
                if dtype == torch.float64:
                    tie = 1e-12 * (1 + score.slope) * capacity
                assert twin.regret(slot, x_D) <= tie
                if slot < 0:
                    assert not twin.holds(x_D)
                else:
                    assert twin.lowest_equal(slot) == slot
                twin.step(x_D, slot)
