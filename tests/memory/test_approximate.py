"""Tests that approximate counts and evictions are close to the exact ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from table import table

from stream_ssl.memory import WorkingMemory
from stream_ssl.memory.duel.approximate import CROSSOVER, ApproximateCounts, pick
from stream_ssl.memory.duel.linear import LinearCounts
from stream_ssl.memory.eviction import MostDuplicated
from stream_ssl.memory.scores import Gaussian, Linear, Quadratic, Score, VonMisesFisher
from tests.naive import STREAMS
from tests.naive_index import (
    DIM,
    exact_counts,
    filled,
    offer,
    regrets,
    stream,
)

SCORES = [VonMisesFisher(0.1), Gaussian(), Quadratic(), Linear()]


@pytest.mark.parametrize(("capacity", "judged"), [(4096, 256), (16_384, 64)])
def test_the_mean_regret_of_approximate_evictions_is_at_most_two_percent(
    capacity: int, judged: int
) -> None:
    rng = np.random.default_rng(0)
    columns = filled(stream(rng, "ranked", capacity))
    score = VonMisesFisher(0.1)
    tally = ApproximateCounts(columns, score)
    for _ in range(4):
        offer(tally, columns, stream(rng, "ranked", 256).to(torch.float32))
    shadow_KD = columns.embeddings.clone()
    x_BD = stream(rng, "ranked", judged).to(torch.float32)
    found = regrets(score, shadow_KD, offer(tally, columns, x_BD), x_BD)
    assert len(found) == judged
    assert np.mean(found) <= 0.02
    assert torch.equal(shadow_KD, columns.embeddings)


@pytest.mark.parametrize("score", SCORES, ids=repr)
@pytest.mark.parametrize("kind", ["ranked", *STREAMS])
def test_the_stated_error_equals_the_error_of_approximate_counts(score: Score, kind: str) -> None:
    rng = np.random.default_rng(1)
    columns = filled(stream(rng, kind, 1500))
    tally = ApproximateCounts(columns, score)
    offer(tally, columns, stream(rng, kind, 700).to(torch.float32))
    tally._draw_pool(tally._all)  # this also happens by itself at or soon after the next newcomer
    exact_K = exact_counts(score, columns.embeddings)
    off_K = (tally.counts() - exact_K).abs() / exact_K.clamp(min=1)
    error = tally.error(sample=1500)
    assert error.sampled == 1500
    assert error.mean == pytest.approx(float(off_K.mean()), abs=1e-4)
    assert error.worst == pytest.approx(float(off_K.max()), abs=1e-3)
    assert error.mean < 0.08
    assert tally.check() == (True, "")


def test_counts_with_fewer_cells_are_more_exact() -> None:
    columns = filled(stream(np.random.default_rng(2), "ranked", 2000, dim=16))
    score = VonMisesFisher(0.03)
    errors = [ApproximateCounts(columns, score, cells).error(2000).mean for cells in (64, 8, 1)]
    assert errors[0] > errors[1] > errors[2]


def test_counts_with_one_cell_are_exact() -> None:
    rng = np.random.default_rng(3)
    columns = filled(stream(rng, "clustered", 600), dtype=torch.float64)
    tally = ApproximateCounts(columns, VonMisesFisher(0.05), cells=1)
    exact_K = exact_counts(tally._score, columns.embeddings)
    assert torch.allclose(tally.counts(), exact_K, rtol=1e-12)
    offer(tally, columns, stream(rng, "clustered", 100))
    tally._draw_pool(tally._all)
    exact_K = exact_counts(tally._score, columns.embeddings)
    assert torch.allclose(tally.counts(), exact_K, rtol=1e-9)


@table("batch", [1, 7, 256, 1000])
def test_every_newcomer_gets_a_slot_for_any_batch_size(batch: int) -> None:
    rng = np.random.default_rng(4)
    columns = filled(stream(rng, "ranked", 900))
    tally = ApproximateCounts(columns, VonMisesFisher(0.1))
    x_ND = stream(rng, "ranked", batch).to(torch.float32)
    plan = offer(tally, columns, x_ND)
    assert len(plan) == batch
    assert min(plan) >= 0
    assert max(plan) < 900
    newest = {slot: turn for turn, slot in enumerate(plan)}
    for slot, turn in newest.items():
        assert torch.equal(columns.embeddings[slot], x_ND[turn])
    assert tally.check() == (True, "")


def test_competing_newcomers_may_be_refused() -> None:
    """One class fills the memory. Another sample of it is refused if its own count is the
    largest.
    """
    rng = np.random.default_rng(5)
    columns = filled(stream(rng, "uniform", 400), dtype=torch.float64)
    centre_D = columns.embeddings[:200].mean(dim=0)
    score = VonMisesFisher(0.3)
    tally = ApproximateCounts(columns, score, cells=1, compete=True)
    crowd_BD = torch.nn.functional.normalize(centre_D[None].repeat(3, 1), dim=1)
    before = float(exact_counts(score, columns.embeddings).sum())
    assert offer(tally, columns, crowd_BD) == [-1, -1, -1]
    assert offer(tally, columns, stream(rng, "uniform", 64)).count(-1) < 64
    assert float(exact_counts(score, columns.embeddings).sum()) < before
    assert tally.check() == (True, "")


def test_approximate_counts_follow_refreshed_rows() -> None:
    rng = np.random.default_rng(6)
    columns = filled(stream(rng, "ranked", 3000))
    score = VonMisesFisher(0.1)
    tally = ApproximateCounts(columns, score)
    offer(tally, columns, stream(rng, "ranked", 200).to(torch.float32))
    for _ in range(5):
        slots = torch.from_numpy(rng.choice(3000, size=300, replace=False))
        before_RD = columns.embeddings[slots]
        columns.embeddings[slots] = stream(rng, "ranked", 300).to(torch.float32)
        tally.on_update(slots, before_RD)
        assert tally.check() == (True, "")
    assert tally.error(1000).mean < 0.02
    x_BD = stream(rng, "ranked", 100).to(torch.float32)
    shadow_KD = columns.embeddings.clone()
    assert np.mean(regrets(score, shadow_KD, offer(tally, columns, x_BD), x_BD)) < 0.02


def test_approximate_counts_follow_a_memory_while_it_fills() -> None:
    rng = np.random.default_rng(7)
    columns = filled(stream(rng, "ranked", 400), capacity=2000)
    score = VonMisesFisher(0.1)
    tally = ApproximateCounts(columns, score)
    assert len(tally.counts()) == 400
    for _ in range(8):
        x_BD = stream(rng, "ranked", 200).to(torch.float32)
        columns.embeddings[columns.occupied : columns.occupied + 200] = x_BD
        columns.occupied += 200
        tally.on_insert(x_BD)
        assert tally.check() == (True, "")
    exact_K = exact_counts(score, columns.embeddings)
    assert float(((tally.counts() - exact_K).abs() / exact_K).mean()) < 0.04
    x_BD = stream(rng, "ranked", 50).to(torch.float32)
    expected_B = score.total(x_BD, columns.embeddings)
    assert torch.allclose(tally.total(x_BD), expected_B, rtol=0.1)


def test_an_empty_memory_has_no_counts() -> None:
    tally = ApproximateCounts(filled(torch.zeros(0, DIM), capacity=10), VonMisesFisher())
    assert len(tally.counts()) == 0
    assert tally.total(torch.eye(DIM)[:3]).tolist() == [0, 0, 0]
    assert tally.error().sampled == 0
    assert tally.check() == (True, "")


def test_equal_seeds_evict_equal_slots() -> None:
    plans = []
    for _ in range(2):
        rng = np.random.default_rng(10)
        columns = filled(stream(rng, "ranked", 2000))
        tally = ApproximateCounts(columns, VonMisesFisher(0.1), seed=3)
        plans.append(offer(tally, columns, stream(rng, "ranked", 600).to(torch.float32)))
    assert plans[0] == plans[1]


@table("cells", [0, 100_000])
def test_approximate_counts_reject_a_number_of_cells_out_of_range(cells: int) -> None:
    with pytest.raises(ValueError, match=f"{cells} cells: must lie in"):
        ApproximateCounts(filled(torch.eye(4)), VonMisesFisher(), cells=cells)


def test_pick_chooses_the_index_by_capacity_and_device() -> None:
    assert pick(CROSSOVER, torch.device("cpu")) == "ivf"
    assert pick(CROSSOVER - 1, torch.device("cpu")) == "exact"
    assert pick(1 << 20, torch.device("cuda")) == "exact"


@table("index", ["exact", "ivf", "auto"])
def test_linear_counts_are_exact_for_every_option_of_index(index: Any) -> None:
    policy = MostDuplicated(index=index)
    WorkingMemory(CROSSOVER, 2, policy)
    assert isinstance(policy._counts, LinearCounts)
    assert policy.settings()["index"] == "exact"


@pytest.mark.parametrize("compete", [False, True])
def test_a_memory_stays_valid_and_continues_from_its_state(compete: bool) -> None:
    """Fill, replace, refresh, save and continue through the memory itself."""
    rng = np.random.default_rng(13)

    def memory() -> WorkingMemory:
        return WorkingMemory(600, DIM, MostDuplicated(VonMisesFisher(0.1), compete, "ivf"))

    first, second, offered = memory(), memory(), 0
    for batch in (250, 300, 200, 1, 700, 64):
        z_BD = stream(rng, "ranked", batch).to(torch.float32)
        first.add(torch.arange(offered, offered + batch), z_BD)
        offered += batch
        slots = torch.from_numpy(rng.choice(len(first), size=20, replace=False))
        first.refresh(slots, stream(rng, "ranked", 20).to(torch.float32))
        assert first.check_valid() == (True, "")
    second.load_state_dict(first.state_dict())
    z_BD = stream(rng, "ranked", 500).to(torch.float32)
    ids = torch.arange(500) + offered
    assert first.add(ids, z_BD).evicted.tolist() == second.add(ids, z_BD).evicted.tolist()
    assert torch.equal(first.embeddings, second.embeddings)
    assert first.check_valid() == (True, "")
