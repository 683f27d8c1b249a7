"""Linear eviction while the sum of the rows shrinks to nearly nothing under a pool that lives on.

Bounds then compare a long sum with a tiny one, where a difference of squares would cancel.

Shapes: B newcomers, D embedding, K slots.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from memory import WorkingMemory
from memory.eviction import MostDuplicated, linear, sweep
from memory.scores import Linear
from tests.naive import IncrementalDuel

FORMS = pytest.mark.parametrize("compete", [False, True], ids=["evict", "compete"])


class Judged:
    """A memory beside its naive twin."""

    def __init__(self, z_KD: Tensor, compete: bool = False) -> None:
        self.memory = WorkingMemory(len(z_KD), z_KD.shape[1], MostDuplicated(compete=compete))
        self.memory.add(torch.arange(len(z_KD)), z_KD)
        self.compete, self.offered = compete, len(z_KD)

    @property
    def sum_D(self) -> Tensor:
        return self.memory.embeddings.sum(dim=0)

    def add(self, x_BD: Tensor) -> None:
        """Every step must evict the largest count, and of rows equal bit by bit the lowest slot."""
        memory = self.memory
        twin = IncrementalDuel(Linear(), memory.embeddings, self.compete)
        held = memory.ids.tolist()
        ids = range(self.offered, self.offered + len(x_BD))
        self.offered += len(x_BD)
        admission = memory.add(torch.tensor(ids), x_BD)
        refused, evicted = set(admission.refused.tolist()), iter(admission.evicted.tolist())
        for x_D, newcomer in zip(x_BD, ids, strict=True):
            slot = -1 if newcomer in refused else held.index(next(evicted))
            assert twin.regret(slot, x_D) <= 1e-9 * len(held)
            if slot >= 0:
                assert twin.lowest_equal(slot) == slot
                held[slot] = newcomer
            twin.step(x_D, slot)

    def leave(self, rest_D: Tensor, rng: np.random.Generator) -> bool:
        """Refresh two slots so that the sum of all rows is `rest_D`, where two rows can do that."""
        z_KD = self.memory.embeddings
        slots = torch.from_numpy(rng.choice(len(z_KD), 2, replace=False))
        half_D = (rest_D - self.sum_D + z_KD[slots].sum(dim=0)) / 2
        square = float(half_D @ half_D)
        if not 0 < square < 1:
            return False
        across_D = torch.from_numpy(rng.standard_normal(len(half_D)))
        across_D = normalize(across_D - (across_D @ half_D) / square * half_D, dim=0)
        across_D = across_D * (1 - square) ** 0.5
        self.memory.refresh(slots, torch.stack([half_D + across_D, half_D - across_D]))
        return True


@FORMS
@pytest.mark.parametrize("off", [1e-9, 1e-8, 1e-7])
@pytest.mark.parametrize("copies", [10, 100])
def test_newcomers_against_the_sum_find_the_lowest_copy(
    copies: int, off: float, compete: bool
) -> None:
    c, s = np.cos(0.5), np.sin(0.5)
    row_KD = np.array([[1.0, 0.0]] * copies + [[c, s]] * 995 + [[c, -s]] * 995)
    judged = Judged(torch.from_numpy(np.random.default_rng(0).permutation(row_KD)), compete)
    judged.add(normalize(torch.tensor([[-1.0, off]], dtype=torch.float64)).repeat(copies + 60, 1))


@FORMS
@pytest.mark.parametrize("seed", range(8))
def test_a_sum_that_vanishes_under_a_living_pool_keeps_every_step_exact(
    seed: int, compete: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "POOL_ROWS", 24)
    monkeypatch.setattr(linear, "SHORTLIST_ROWS", 6)
    monkeypatch.setattr(linear, "WORTH", 1)
    monkeypatch.setattr(sweep, "ROWS", 16)
    rng, vanished = np.random.default_rng(seed), 0
    for _ in range(12):
        dim, capacity = int(rng.choice([2, 3, 4])), int(rng.choice([30, 60, 120]))
        spread = float(rng.choice([0.2, 0.5, 1.0]))
        row_KD = rng.standard_normal(dim) + spread * rng.standard_normal((capacity, dim))
        z_KD = normalize(torch.from_numpy(row_KD))
        if rng.random() < 0.5:  # copies
            z_KD = z_KD[torch.from_numpy(rng.integers(max(2, capacity // 6), size=capacity))]
        judged = Judged(z_KD, compete)
        for _ in range(6):
            off = float(rng.choice([0, 1e-9, 1e-8, 1e-4]))
            noise_BD = off * rng.standard_normal((int(rng.integers(1, 12)), dim))
            judged.add(normalize(torch.from_numpy(noise_BD) - normalize(judged.sum_D, dim=0)))
            rest_D = float(rng.choice([1e-5, 1e-7, 1e-9])) * rng.standard_normal(dim)
            if judged.leave(torch.from_numpy(rest_D), rng):
                vanished += 1
                some = torch.from_numpy(rng.integers(capacity, size=5))
                fresh_BD = torch.from_numpy(rng.standard_normal((int(rng.integers(1, 9)), dim)))
                judged.add(z_KD[some] if rng.random() < 0.5 else normalize(fresh_BD))
    assert vanished > 3
