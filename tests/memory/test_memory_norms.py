"""Eviction of rows whose norms differ. More than the memory accepts, so that a bound which took
them for unit rows would be seen to fail.

Shapes: B newcomers, D embedding, R slots refreshed.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from memory import WorkingMemory, checks
from memory.eviction import MostDuplicated, linear, shortlist
from memory.scores import Linear
from tests.naive import IncrementalDuel, unit_rows

CAPACITY, DIM, WIDEST = 150, 2, 1.95


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small pools and shortlists, so that most rows are known by a bound alone."""
    monkeypatch.setattr(checks, "NORM_TOLERANCE", WIDEST - 1)
    monkeypatch.setattr(linear, "POOL_ROWS", 12)
    monkeypatch.setattr(linear, "SHORTLIST_ROWS", 4)
    monkeypatch.setattr(shortlist, "STRIDE", 5)
    monkeypatch.setattr(shortlist, "FEW", 3)


def judge(memory: WorkingMemory, first: int, x_BD: torch.Tensor) -> None:
    """Add these newcomers, and compare every eviction with the naive twin's counts."""
    twin, held = IncrementalDuel(Linear(), memory.embeddings), memory.ids.tolist()
    ids = list(range(first, first + len(x_BD)))
    evicted = memory.add(torch.tensor(ids), x_BD).evicted.tolist()
    for x_D, newcomer, gone in zip(x_BD, ids, evicted, strict=True):
        slot = held.index(gone)
        assert twin.regret(slot, x_D) <= 1e-9 * CAPACITY
        twin.step(x_D, slot)
        held[slot] = newcomer


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("grown", ["refreshed", "newcomers"])
def test_longer_rows_than_any_before_keep_every_step_exact(seed: int, grown: str) -> None:
    rng = np.random.default_rng(seed)
    for case in range(5):
        memory = WorkingMemory(CAPACITY, DIM, MostDuplicated())
        memory.add(torch.arange(CAPACITY), unit_rows(rng, "uniform", CAPACITY, DIM))
        for turn in range(3):
            x_BD = unit_rows(rng, "uniform", 3, DIM)
            longest = WIDEST - 0.01 if grown == "newcomers" and turn else 1.0
            judge(memory, (100 * case + turn + 1) * 1000, x_BD * longest)
            slots = torch.from_numpy(rng.choice(CAPACITY, CAPACITY // 2, replace=False))
            longest = WIDEST - 0.01 if grown == "refreshed" and turn == 1 else 1.0
            alike_RD = unit_rows(rng, "one class", len(slots), DIM)
            memory.refresh(slots, longest * (memory.embeddings[slots] if turn else alike_RD))
            judge(memory, (100 * case + turn + 1) * 1000 + 500, unit_rows(rng, "uniform", 8, DIM))
