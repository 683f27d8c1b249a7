"""Tests of the memory's statistics against loops over its content.

Shapes: C cells, D embedding, K slots, k occupied slots.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from table import table

from stream_ssl.memory import Duplicates, WorkingMemory
from stream_ssl.memory import stats as module
from stream_ssl.memory.eviction import POLICIES, MostDuplicated, Oldest, Policy, Reservoir
from stream_ssl.memory.scores import Linear, Quadratic, Score, VonMisesFisher
from stream_ssl.memory.stats import effective_cells, effective_rank
from tests.naive import unit_rows
from tests.naive_memory import nearest_rank


def fed(policy: Policy, counts: tuple[int, ...] = (17, 23, 40), **options: Any) -> WorkingMemory:
    memory = WorkingMemory(30, 5, policy, dtype=torch.float64, seed=1, **options)
    rng, start = np.random.default_rng(3), 0
    for count in counts:
        ids = torch.arange(start, start + count)
        memory.add(ids, unit_rows(rng, "clustered", count, 5))
        memory.refresh(memory.stalest(4), unit_rows(rng, "uniform", min(4, len(memory)), 5))
        start += count
    return memory


@table("name", sorted(POLICIES))
@table("counts", [(9,), (17, 23, 40)], ids=["filling", "full"])
def test_stats_equal_loops_over_the_slots(name: str, counts: tuple[int, ...]) -> None:
    memory = fed(POLICIES[name](), counts)
    stats, k, added = memory.stats(), len(memory), sum(counts)
    score: Score = memory.eviction.score
    near_kk = score(memory.embeddings @ memory.embeddings.T)
    count_k = [float(near_kk[j].sum() - near_kk[j, j]) for j in range(k)]
    age_k = [added - born for born in memory.born.tolist()]
    stale_k = [added - encoded for encoded in memory.encoded.tolist()]
    for share, at in ((0.5, "p50"), (0.9, "p90"), (1.0, "max")):
        assert getattr(stats, f"age_{at}") == nearest_rank(age_k, share)
        assert getattr(stats, f"stale_{at}") == nearest_rank(stale_k, share)
        assert getattr(stats, f"count_{at}") == pytest.approx(nearest_rank(count_k, share))
    assert stats.count_mean == pytest.approx(sum(count_k) / k)
    assert stats.expected_collisions == pytest.approx(sum(count_k) / (k * (k - 1)))
    assert stats.counted == k
    assert stats.turnover == sum(age <= 30 for age in age_k) / k
    assert stats.multiplicity_mean == 1
    assert stats.inserted + stats.refused == stats.added == added
    assert stats.inserted - stats.evicted == stats.occupancy == k
    assert stats.duplicates == stats.merged == 0


def test_the_turnover_is_1_for_a_queue_and_0_if_all_samples_are_refused() -> None:
    assert fed(Oldest()).stats().turnover == 1
    held = fed(Oldest(), (30,), duplicates=Duplicates(-0.9999, "refuse"))
    assert held.stats().turnover == 1
    rng = np.random.default_rng(0)
    held.add(torch.arange(60), held.embeddings[torch.from_numpy(rng.integers(0, len(held), 60))])
    assert held.stats().turnover == 0
    assert held.stats().refused >= 60


def test_outcomes_of_admission_are_counted() -> None:
    memory = WorkingMemory(30, 5, Reservoir(), duplicates=Duplicates(0.9, "merge"))
    rng, told = np.random.default_rng(1), np.zeros(5, int)
    for _ in range(8):
        one = memory.add(torch.arange(50), unit_rows(rng, "duplicates", 50, 5))
        lists = one.evicted, one.refused, one.duplicates, one.merged
        told += [one.inserted, *map(len, lists)]
    stats = memory.stats()
    found = stats.inserted, stats.evicted, stats.refused, stats.duplicates, stats.merged
    assert found == tuple(told)
    assert stats.refused > stats.duplicates == stats.merged > 0
    assert stats.multiplicity_mean == sum(memory.multiplicity.tolist()) / len(memory) > 1


def test_the_stats_of_an_empty_memory_are_0() -> None:
    stats = WorkingMemory(3, 2).stats()
    assert (stats.occupancy, stats.count_mean, stats.expected_collisions) == (0, 0, 0)
    assert (stats.turnover, stats.stale_max, stats.multiplicity_mean, stats.counted) == (0, 0, 0, 0)
    assert stats.effective_rank == WorkingMemory(3, 2).effective_cells() == 0


class Sharp(Oldest):
    """A queue that keeps no counts, and whose counts are expensive."""

    name = "sharp"
    score = VonMisesFisher(0.5)


@table(
    ("policy", "limit", "counted"),
    [
        (Sharp, {"MOST_PAIRS": 40_000}, 100),
        (lambda: MostDuplicated(VonMisesFisher(0.5)), {"MOST_PAIRS": 40_000}, 400),  # kept
        (MostDuplicated, {"MOST_ROWS": 100}, 100),
        (Oldest, {"MOST_ROWS": 100}, 100),
    ],
    ids=["dear", "kept", "linear", "queue"],
)
def test_expensive_counts_are_sampled(
    policy: Callable[[], Policy],
    limit: dict[str, int],
    counted: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = WorkingMemory(400, 6, policy())
    memory.add(torch.arange(400), unit_rows(np.random.default_rng(0), "clustered", 400, 6))
    exact = memory.stats()
    assert exact.counted == 400
    for name, value in limit.items():
        monkeypatch.setattr(module, name, value)
    sampled = memory.stats()
    some_S = memory.counts()[:: 400 // counted]
    assert sampled.counted == counted
    assert sampled.count_mean == pytest.approx(float(some_S.mean()))
    assert sampled.count_max == pytest.approx(float(some_S.max()))
    assert sampled.expected_collisions == pytest.approx(exact.expected_collisions, rel=0.1)


def compare(*_: object) -> None:
    raise AssertionError("compared all pairs")


@table("policy", [MostDuplicated, Oldest, lambda: MostDuplicated(VonMisesFisher(0.1))])
def test_stats_do_not_compare_all_pairs(
    policy: Callable[[], Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, z_BD = fed(policy()), unit_rows(np.random.default_rng(9), "uniform", 3, 5)
    stats, collision_B = memory.stats(), memory.collisions(z_BD)
    monkeypatch.setattr(Score, "total", compare)
    assert memory.stats() == stats
    if isinstance(memory.eviction.score, Linear):
        assert torch.equal(memory.collisions(z_BD), collision_B)


def test_effective_cells_and_rank_are_the_exponential_of_an_entropy() -> None:
    share_C = np.array([0.5, 0.25, 0.15, 0.1])
    rows = np.repeat(np.arange(4), (share_C * 40).astype(int))
    z_kD = torch.eye(4)[torch.from_numpy(rows)]
    expected = math.exp(-float((share_C * np.log(share_C)).sum()))
    assert effective_cells(z_kD, 4, seed=0) == pytest.approx(expected)
    assert effective_rank(z_kD) == pytest.approx(expected, rel=1e-6)
    memory = WorkingMemory(40, 4, Oldest())
    memory.add(torch.arange(40), z_kD)
    assert memory.effective_cells(4) == pytest.approx(expected)
    assert memory.effective_cells(1) == 1


def test_the_effective_rank_of_float32_rows_equals_that_of_float64_rows() -> None:
    z_kD = unit_rows(np.random.default_rng(2), "clustered", 3000, 32)
    wide = effective_rank(z_kD)
    assert effective_rank(z_kD.to(torch.float32)) == pytest.approx(wide, rel=1e-5)
    share_D = torch.linalg.svdvals(z_kD).square() / 3000
    assert wide == pytest.approx(math.exp(float(torch.special.entr(share_D).sum())), rel=1e-9)


@table("score", [Linear(), Quadratic(), VonMisesFisher(0.1)], ids=repr)
@table("by", ["policy", "measured_by"])
def test_collisions_and_the_prior_equal_loops(score: Score, by: str) -> None:
    z_BD = unit_rows(np.random.default_rng(8), "uniform", 3, 5)
    memory = fed(MostDuplicated(score)) if by == "policy" else fed(Oldest(), measured_by=score)
    for z_D, *found in zip(z_BD, memory.collisions(z_BD), memory.prior(z_BD), strict=True):
        mean = sum(float(score((z_D @ row_D)[None])) for row_D in memory.embeddings) / 30
        assert found == pytest.approx([mean, mean], abs=1e-9)
    assert WorkingMemory(3, 5, MostDuplicated(score)).collisions(z_BD).tolist() == [0, 0, 0]


@table("score", [Linear(), Quadratic(), VonMisesFisher(0.1)], ids=repr)
@table("by", ["policy", "measured_by"])
def test_the_prior_leaves_out_the_slot_of_the_anchor(score: Score, by: str) -> None:
    memory = fed(MostDuplicated(score)) if by == "policy" else fed(Oldest(), measured_by=score)
    z_BD, absent = memory.embeddings[[7, 0, 29, 3]], 10**6
    ids = [int(memory.ids[7]), absent, int(memory.ids[29]), int(memory.ids[4])]
    for z_D, own, found in zip(z_BD, ids, memory.prior(z_BD, ids), strict=True):
        slots = zip(memory.embeddings, memory.ids.tolist(), strict=True)
        others = [row for row, each in slots if each != own]
        assert len(others) == (30 if own == absent else 29)
        mean = sum(float(score((z_D @ row_D)[None])) for row_D in others) / len(others)
        assert float(found) == pytest.approx(mean, abs=1e-9)
    empty = WorkingMemory(3, 5, MostDuplicated(score))
    assert empty.prior(z_BD, ids).tolist() == [0, 0, 0, 0]
    with pytest.raises(ValueError, match=r"anchor ids have shape \(3,\): must be \[4\]"):
        memory.prior(z_BD, ids[:3])


def test_the_prior_leaves_out_every_slot_with_the_id_of_the_anchor() -> None:
    """A sample that is sent again keeps its id, so several slots may hold one id."""
    memory, row_ND = (
        WorkingMemory(6, 5, dtype=torch.float64),
        unit_rows(np.random.default_rng(4), "uniform", 8, 5),
    )
    memory.add([1, 7, 1, 2, 1, 7], row_ND[:6])
    found = memory.prior(row_ND[6:][[0, 1, 0]], [1, 7, 9])
    for z_D, kept, value in zip(
        row_ND[[6, 7, 6]], ([1, 3, 5], [0, 2, 3, 4], range(6)), found, strict=True
    ):
        expected = sum((1 + float(z_D @ row_ND[slot])) / 2 for slot in kept) / len(kept)
        assert float(value) == pytest.approx(expected, abs=1e-9)
