"""Numbers of a memory against loops over what it holds.

Shapes: C cells, D embedding, K slots, k occupied slots.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from memory import Duplicates, WorkingMemory
from memory import stats as module
from memory.eviction import POLICIES, MostDuplicated, Oldest, Policy, Reservoir
from memory.scores import Score, VonMisesFisher
from memory.stats import effective_cells, effective_classes
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


@pytest.mark.parametrize("name", sorted(POLICIES))
@pytest.mark.parametrize("counts", [(9,), (17, 23, 40)], ids=["filling", "full"])
def test_stats_are_loops_over_the_slots(name: str, counts: tuple[int, ...]) -> None:
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
    assert stats.images_lost == stats.duplicates == stats.merged == 0


def test_the_turnover_of_a_queue_is_all_and_of_what_refuses_is_none() -> None:
    assert fed(Oldest()).stats().turnover == 1
    held = fed(Oldest(), (30,), duplicates=Duplicates(-0.9999, "refuse"))
    assert held.stats().turnover == 1
    rng = np.random.default_rng(0)
    held.add(torch.arange(60), held.embeddings[torch.from_numpy(rng.integers(0, len(held), 60))])
    assert held.stats().turnover == 0
    assert held.stats().refused >= 60


def test_outcomes_of_admission_are_counted() -> None:
    rule = Duplicates(0.9, "merge")
    memory = WorkingMemory(30, 5, Reservoir(), duplicates=rule)
    rng = np.random.default_rng(1)
    inserted = evicted = refused = duplicates = merged = 0
    for start in range(0, 400, 50):
        ids = torch.arange(start, start + 50)
        admission = memory.add(ids, unit_rows(rng, "duplicates", 50, 5))
        inserted += admission.inserted
        evicted += len(admission.evicted)
        refused += len(admission.refused)
        duplicates += len(admission.duplicates)
        merged += len(admission.merged)
    stats = memory.stats()
    assert (stats.inserted, stats.evicted, stats.refused) == (inserted, evicted, refused)
    assert (stats.duplicates, stats.merged) == (duplicates, merged)
    assert refused > duplicates == merged > 0
    assert stats.multiplicity_mean == sum(memory.multiplicity.tolist()) / len(memory) > 1


def test_an_empty_memory_has_numbers() -> None:
    stats = WorkingMemory(3, 2).stats()
    assert (stats.occupancy, stats.count_mean, stats.expected_collisions) == (0, 0, 0)
    assert (stats.turnover, stats.stale_max, stats.multiplicity_mean, stats.counted) == (0, 0, 0, 0)
    assert WorkingMemory(3, 2).effective_cells() == 0


class Sharp(Oldest):
    """A queue that keeps no counts, and whose counts are dear."""

    name = "sharp"
    score = VonMisesFisher(0.5)


def test_dear_counts_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    z_kD = unit_rows(np.random.default_rng(0), "clustered", 400, 6)
    memory = WorkingMemory(400, 6, Sharp())
    memory.add(torch.arange(400), z_kD)
    exact = memory.stats()
    assert exact.counted == 400
    monkeypatch.setattr(module, "MOST_PAIRS", 40_000)
    sampled = memory.stats()
    assert sampled.counted == 100
    assert sampled.count_mean == pytest.approx(float(memory.counts()[::4].mean()))
    assert sampled.expected_collisions == pytest.approx(exact.expected_collisions, rel=0.1)
    assert sampled.count_max <= exact.count_max
    # What is kept costs nothing: it is never sampled.
    kept = WorkingMemory(400, 6, MostDuplicated(VonMisesFisher(0.5)))
    kept.add(torch.arange(400), z_kD)
    assert kept.stats().counted == 400


@pytest.mark.parametrize("policy", [MostDuplicated, Oldest])
def test_linear_counts_of_many_slots_are_sampled(
    policy: type[Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = WorkingMemory(300, 6, policy())
    memory.add(torch.arange(300), unit_rows(np.random.default_rng(0), "clustered", 300, 6))
    assert memory.stats().counted == 300
    monkeypatch.setattr(module, "MOST_ROWS", 100)
    stats = memory.stats()
    assert stats.counted == 100
    assert stats.count_mean == pytest.approx(float(memory.counts()[::3].mean()))
    assert stats.count_max == pytest.approx(float(memory.counts()[::3].max()))


@pytest.mark.parametrize("name", ["most-duplicated, sharp", "most-duplicated", "oldest"])
def test_stats_never_compare_all_pairs_that_are_kept(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = MostDuplicated(VonMisesFisher(0.1)) if "sharp" in name else POLICIES[name]()
    memory = fed(made)
    expected = memory.stats()

    def compare(*_: object) -> None:
        raise AssertionError("compared all pairs")

    monkeypatch.setattr(Score, "total", compare)
    assert memory.stats() == expected


def test_cells_are_the_exponential_of_an_entropy() -> None:
    share_C = np.array([0.5, 0.25, 0.15, 0.1])
    rows = np.repeat(np.arange(4), (share_C * 40).astype(int))
    z_kD = torch.eye(4)[torch.from_numpy(rows)]
    expected = math.exp(-float((share_C * np.log(share_C)).sum()))
    assert effective_cells(z_kD, 4, seed=0) == pytest.approx(expected)
    assert effective_classes(z_kD) == pytest.approx(expected, rel=1e-6)
    memory = WorkingMemory(40, 4, Oldest())
    memory.add(torch.arange(40), z_kD)
    assert memory.effective_cells(4) == pytest.approx(expected)
    assert memory.effective_cells(1) == 1
    with pytest.raises(ValueError, match="cells is 0"):
        memory.effective_cells(0)


def test_the_spectrum_of_float32_rows_is_that_of_float64() -> None:
    z_kD = unit_rows(np.random.default_rng(2), "clustered", 3000, 32)
    wide = effective_classes(z_kD)
    assert effective_classes(z_kD.to(torch.float32)) == pytest.approx(wide, rel=1e-5)
    share_D = torch.linalg.svdvals(z_kD).square() / 3000
    assert wide == pytest.approx(math.exp(float(torch.special.entr(share_D).sum())), rel=1e-9)


@pytest.mark.parametrize("kind", ["linear", "queue"])
def test_collisions_of_linear_h_compare_no_pairs(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = fed(MostDuplicated() if kind == "linear" else Oldest())
    z_BD = unit_rows(np.random.default_rng(9), "uniform", 3, 5)
    expected_B = (0.5 * (1 + z_BD @ memory.embeddings.T)).mean(dim=1)

    def compare(*_: object) -> None:
        raise AssertionError("compared all pairs")

    monkeypatch.setattr(Score, "total", compare)
    assert torch.allclose(memory.collisions(z_BD), expected_B, atol=1e-12)


def test_collisions_are_measured_by_a_score_of_their_own() -> None:
    z_KD = unit_rows(np.random.default_rng(0), "uniform", 8, 4)
    score = VonMisesFisher(0.3)
    by_policy = WorkingMemory(16, 4, Oldest())
    by_score = WorkingMemory(16, 4, Oldest(), measured_by=score)
    for memory in (by_policy, by_score):
        memory.add(torch.arange(8), z_KD)
    wanted_B = torch.stack([torch.stack([score(a @ b) for b in z_KD]).mean() for a in z_KD])
    torch.testing.assert_close(by_score.collisions(z_KD), wanted_B)
    torch.testing.assert_close(by_policy.collisions(z_KD), 0.5 + 0.5 * (z_KD @ z_KD.T).mean(1))
    with pytest.raises(ValueError, match=r"must be an instance of memory.scores.Score; build it"):
        WorkingMemory(16, 4, measured_by=VonMisesFisher)  # type: ignore[arg-type]
