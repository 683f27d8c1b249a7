"""Tests of eviction by counts if anything is duplicated, and at random otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from stream_ssl.memory import WorkingMemory
from stream_ssl.memory.duel import exact
from stream_ssl.memory.eviction import Redundant
from stream_ssl.memory.scores import Linear, Score, VonMisesFisher
from tests.naive import unit_rows


def by_loop(
    score: Score,
    at_least: float,
    capacity: int,
    z_ND: Tensor,
    drawn: Tensor,
    left: Sequence[int],
) -> int:
    """Check every eviction, and return how many were at random. AssertionError for a wrong one."""
    held, by_chance = list(range(capacity)), 0
    for newcomer, gone in zip(range(capacity, len(z_ND)), left, strict=True):
        z_KD = z_ND[held]
        count_K = score(z_KD @ z_KD.T).fill_diagonal_(0).sum(dim=1)
        slot = held.index(gone)
        if count_K.max() >= at_least:
            assert count_K[slot] >= count_K.max() - 1e-9 * capacity, newcomer
        else:
            assert slot == int(drawn[newcomer - capacity] * capacity), newcomer
            by_chance += 1
        held[slot] = newcomer
    return by_chance


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("score", "at_least"),
    [(VonMisesFisher(0.1), 1.2), (VonMisesFisher(0.02), 0.2), (Linear(), 12.3)],
)
def test_every_eviction_equals_that_of_a_loop(
    score: Score, at_least: float, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Few candidates, so that slots that are no candidates can decide.
    monkeypatch.setattr(exact, "ON_CPU", replace(exact.ON_CPU, candidates=6, steps=16))
    rng, capacity = np.random.default_rng(seed), 24
    z_ND = unit_rows(rng, "uniform", 300, 4).double()
    policy = Redundant(score, at_least)
    memory = WorkingMemory(capacity, 4, policy, dtype=torch.float64, seed=seed)
    generator = torch.Generator()
    generator.set_state(policy.state()["chance.generator"])
    drawn = torch.rand(300 - capacity, generator=generator, dtype=torch.float64)
    left, start = [], 0
    while start < len(z_ND):
        stop = min(len(z_ND), start + int(rng.integers(1, 70)))
        left += memory.add(torch.arange(start, stop), z_ND[start:stop]).evicted.tolist()
        start = stop
    by_chance = by_loop(score, at_least, capacity, z_ND, drawn, left)
    assert 20 < by_chance < 256
    assert memory.check_valid() == (True, "")


def test_odd_pictures_are_evicted_in_time_if_nothing_is_duplicated() -> None:
    """Under MostDuplicated odd pictures would stay forever: all others have larger counts."""
    z_ND = unit_rows(np.random.default_rng(0), "uniform", 2000, 64).double()
    memory = WorkingMemory(40, 64, Redundant(), dtype=torch.float64)
    memory.add(torch.arange(2000), z_ND)
    assert int(memory.ids.min()) > 1000


def test_copies_are_evicted_before_all_other_samples() -> None:
    z_ND = torch.eye(64, dtype=torch.float64)[[*range(40), *[0] * 10, *range(40, 50)]]
    memory = WorkingMemory(50, 64, Redundant(), dtype=torch.float64)
    memory.add(torch.arange(60), z_ND)
    assert memory.stats().evicted == 10
    assert torch.unique(memory.embeddings, dim=0).shape[0] == 50


@pytest.mark.parametrize("at_least", [0, -1.0, float("nan"), "many"])
def test_redundant_rejects_a_limit_that_is_no_positive_number(at_least: object) -> None:
    with pytest.raises(ValueError, match="must be a number of expected duplicates"):
        Redundant(at_least=at_least)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(8))
def test_a_batch_under_shares_evicts_as_single_newcomers(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts and draws decide in turn, and producers reach and leave their guarantees."""
    monkeypatch.setattr(exact, "ON_CPU", replace(exact.ON_CPU, candidates=6, steps=16))
    rng, capacity, total = np.random.default_rng(seed), 24, 220
    z_ND = unit_rows(rng, "uniform", total, 4).double()
    copied = rng.random(total) < 0.5  # copies of an earlier sample, nearly all by producer c
    for number in np.flatnonzero(copied):
        near_D = z_ND[int(rng.integers(0, number + 1))] + 0.02 * torch.from_numpy(
            rng.normal(size=4)
        )
        z_ND[number] = near_D / near_D.norm()
    names = np.where(copied & (rng.random(total) < 0.9), "c", rng.choice([*"aab"], total)).tolist()
    memories, left, counted = [], [[], []], []
    for alone, gone in zip((True, False), left, strict=True):
        policy = Redundant(VonMisesFisher(0.05), 0.6)
        memory = WorkingMemory(capacity, 4, policy, dtype=torch.float64, seed=seed, shares=0.9)
        start = 0
        while start < total:
            stop = min(total, start + (1 if alone else int(rng.integers(1, 70))))
            batch = slice(start, stop)
            ids_B = torch.arange(start, stop)
            if alone and len(memory) == capacity:
                counted.append(float(memory.counts().max()) >= 0.6)
            gone += memory.add(ids_B, z_ND[batch], producers=names[batch]).evicted.tolist()
            start = stop
        memories.append(memory)
        assert memory.check_valid() == (True, "")
    assert left[0] == left[1]
    assert 20 < sum(counted) < len(counted) - 20
    assert torch.equal(memories[0].ids, memories[1].ids)


def test_copies_among_new_pictures_need_few_proposals(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proposal holds steps by count and steps by draw, so a copy does not end it."""
    proposals = 0
    choose = exact.ExactCounts.choose

    def counted(*arguments: object) -> Tensor:
        nonlocal proposals
        proposals += 1
        return choose(*arguments)

    rng = np.random.default_rng(0)
    z_ND = unit_rows(rng, "uniform", 4096, 64)
    z_ND[1::4] = z_ND[0::4]  # each fourth sample repeats the one before
    memory = WorkingMemory(2048, 64, Redundant(), seed=0)
    memory.add(torch.arange(2048), z_ND[:2048])
    monkeypatch.setattr(exact.ExactCounts, "choose", counted)
    memory.add(torch.arange(2048, 4096), z_ND[2048:])
    assert 2048 // exact.ON_CPU.steps <= proposals <= 40
