"""The working memory against a dict of rows, and what can be read of it.

Shapes: B newcomers, D embedding, K slots, N negatives.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import Tensor

from memory import WorkingMemory
from memory.eviction import POLICIES, MostDuplicated, Oldest
from memory.scores import Gaussian, Linear, Quadratic, Score, VonMisesFisher
from tests.naive import unit_rows

SCORES: tuple[Score, ...] = (Linear(), Quadratic(), Gaussian(0.5), VonMisesFisher(0.1))


def filled(capacity: int = 8, count: int = 8, dim: int = 4, **options: Any) -> WorkingMemory:
    memory = WorkingMemory(capacity, dim, **options)
    z_ND = unit_rows(np.random.default_rng(count), "uniform", count, dim)
    memory.add(torch.arange(count) + 100, z_ND, hashes=torch.arange(count) % 3)
    return memory


class AgainstDict(RuleBasedStateMachine):
    """Any sequence of operations leaves each slot holding what a dict of rows says it holds."""

    @initialize(policy=st.sampled_from(sorted(POLICIES)), capacity=st.integers(1, 9))
    def build(self, policy: str, capacity: int) -> None:
        self.memory = WorkingMemory(capacity, 3, POLICIES[policy](), image_shape=(1, 1, 2))
        self.rows: dict[int, dict[str, Tensor]] = {}
        self.rng = np.random.default_rng(capacity)
        self.added = 0

    @rule(count=st.integers(0, 25), first=st.integers(0, 5))
    def add(self, count: int, first: int) -> None:
        rows = {
            "ids": torch.arange(first, first + count),  # so ids recur
            "embeddings": unit_rows(self.rng, "duplicates", count, 3),
            "labels": torch.from_numpy(self.rng.integers(-1, 4, count)),
            "hashes": torch.from_numpy(self.rng.integers(0, 4, count)),
            "images": torch.from_numpy(self.rng.integers(0, 256, (count, 1, 1, 2), np.uint8)),
        }
        admission = self.memory.add(
            rows["ids"], rows["embeddings"], rows["images"], rows["labels"], rows["hashes"]
        )
        for turn, slot in enumerate(admission.slots.tolist()):
            if slot >= 0:
                self.rows[slot] = {name: column[turn] for name, column in rows.items()}
                self.rows[slot]["born"] = torch.tensor(self.added + turn)
                self.rows[slot]["encoded"] = torch.tensor(self.added + turn)
                self.rows[slot]["multiplicity"] = torch.tensor(1)
        self.added += count

    @rule(count=st.integers(0, 4))
    def refresh(self, count: int) -> None:
        slots = self.memory.stalest(count)
        z_RD = unit_rows(self.rng, "uniform", len(slots), 3)
        before_RD = self.memory.embeddings[slots].clone()
        drift_R = self.memory.refresh(slots, z_RD)
        if len(slots):
            assert torch.allclose(drift_R, (before_RD * z_RD).sum(dim=1).double(), atol=1e-6)
        for slot, z_D in zip(slots.tolist(), z_RD, strict=True):
            self.rows[slot]["embeddings"] = z_D
            self.rows[slot]["encoded"] = torch.tensor(self.added)

    @rule()
    def save_and_load(self) -> None:
        state = self.memory.state_dict()
        policy = type(self.memory.eviction)()
        self.memory = WorkingMemory(self.memory.capacity, 3, policy, image_shape=(1, 1, 2))
        self.memory.load_state_dict(state)

    @invariant()
    def holds_what_the_dict_holds(self) -> None:
        if not hasattr(self, "memory"):
            return
        assert self.memory.check_valid() == (True, "")
        assert len(self.memory) == len(self.rows) == min(self.added, self.memory.capacity)
        names = (
            "ids",
            "embeddings",
            "labels",
            "hashes",
            "images",
            "born",
            "encoded",
            "multiplicity",
        )
        for slot, row in self.rows.items():
            for name in names:
                assert torch.equal(getattr(self.memory, name)[slot], row[name]), name


TestAgainstDict = AgainstDict.TestCase
TestAgainstDict.settings = settings(
    max_examples=40, stateful_step_count=12, deadline=None, derandomize=True
)


def test_negatives_are_uniform_and_distinct() -> None:
    """5,000 draws of 10 of 25 slots, 50,000 in all: each slot and each first place alike."""
    memory = filled(25, 25, seed=3)
    seen_K, first_K = torch.zeros(25), torch.zeros(25)
    for _ in range(5000):
        drawn = memory.negatives(10)
        assert len(set(drawn.ids_N.tolist())) == 10
        seen_K[drawn.ids_N - 100] += 1
        first_K[drawn.ids_N[0] - 100] += 1
    expected = 5000 * 10 / 25
    chi_seen = float(((seen_K - expected) ** 2 / (expected * (1 - 10 / 25))).sum() * 24 / 25)
    chi_first = float(((first_K - 200) ** 2 / 200).sum())
    assert max(chi_seen, chi_first) < 24 + 4.5 * 48**0.5


def test_negatives_carry_the_rows_of_their_ids() -> None:
    memory = filled(9, 7)
    row = {int(i): z for i, z in zip(memory.ids, memory.embeddings, strict=True)}
    for drawn in (memory.negatives(), memory.negatives(4), memory.negatives(50)):
        for i, z_D, h in zip(drawn.ids_N.tolist(), drawn.z_ND, drawn.hashes_N, strict=True):
            assert torch.equal(z_D, row[i])
            assert int(h) == (i - 100) % 3
    assert len(memory.negatives()) == len(memory.negatives(50)) == 7
    assert WorkingMemory(3, 2).negatives().z_ND.shape == (0, 2)
    assert WorkingMemory(3, 2).negatives(2).z_ND.shape == (0, 2)


def test_draws_follow_the_generator_given() -> None:
    memory = filled(20, 20)
    draws = [memory.negatives(8, torch.Generator().manual_seed(5)).ids_N for _ in range(2)]
    assert torch.equal(*draws)
    assert not torch.equal(memory.negatives(8).ids_N, memory.negatives(8).ids_N)


def test_mask_leaves_out_the_same_id_and_the_same_content() -> None:
    memory = filled(6, 6)  # ids 100..105, hashes 0 1 2 0 1 2
    ids, hashes = torch.tensor([100, 7, 7]), torch.tensor([0, 1, 0])
    expected = torch.zeros(3, 6, dtype=torch.bool)
    expected[0, 0] = True
    assert torch.equal(memory.mask(ids), expected)
    expected[1, 1] = expected[1, 4] = True
    assert torch.equal(memory.mask(ids, hashes), expected)  # hash 0 stands for none
    drawn = memory.negatives(4)
    chosen = expected[:, drawn.ids_N - 100]
    assert torch.equal(memory.mask(ids, hashes, drawn), chosen)
    assert torch.equal(memory.mask(ids.numpy(), hashes.numpy(), negatives=drawn), chosen)


def test_samples_are_distinct_while_they_can_be() -> None:
    memory = filled(6, 6, seed=1)
    draw = memory.sample(6)
    assert sorted(draw.slots.tolist()) == list(range(6))
    assert torch.equal(draw.ids, memory.ids[draw.slots])
    assert draw.images is None
    assert len(memory.sample(40).slots) == 40
    with pytest.raises(ValueError, match="empty memory"):
        WorkingMemory(3, 2).sample(1)


def test_stalest_are_those_encoded_first() -> None:
    memory = filled(5, 5)
    assert memory.stalest(2).tolist() == [0, 1]
    memory.refresh([0, 3], memory.embeddings[[3, 0]].clone())
    assert memory.stalest(3).tolist() == [1, 2, 4]
    assert memory.stalest(9).tolist() == [1, 2, 4, 0, 3]


def test_drift_is_the_cosine_of_old_and_new() -> None:
    memory = filled(5, 5, dtype=torch.float64)
    old_RD = memory.embeddings[[1, 4]].clone()
    drift_R = memory.refresh([1, 4], torch.stack([old_RD[0], -old_RD[1]]))
    assert torch.allclose(drift_R, torch.tensor([1.0, -1.0], dtype=torch.float64))


@pytest.mark.parametrize("score", SCORES, ids=repr)
def test_collisions_counts_and_stats_are_loops(score: Score) -> None:
    memory = filled(7, 20, eviction=MostDuplicated(score))
    z_BD = unit_rows(np.random.default_rng(8), "uniform", 3, 4)

    def h(a_D: Tensor, b_D: Tensor) -> float:
        return float(score((a_D @ b_D)[None]))

    rows = list(memory.embeddings)
    mean_B = [sum(h(z_D, row_D) for row_D in rows) / 7 for z_D in z_BD]
    count_k = [sum(h(a, b) for j, b in enumerate(rows) if j != i) for i, a in enumerate(rows)]
    assert np.allclose(memory.collisions(z_BD), mean_B, atol=1e-9)
    assert np.allclose(memory.counts(), count_k, atol=1e-9)
    stats = memory.stats()
    assert stats.expected_collisions == pytest.approx(sum(count_k) / 42)
    assert (stats.occupancy, stats.capacity, stats.added) == (7, 7, 20)
    assert (stats.inserted, stats.evicted, stats.refused) == (20, 13, 0)


def test_stats_know_ages_and_classes() -> None:
    memory = WorkingMemory(10, 5, Oldest())
    memory.add(np.arange(25), torch.eye(5).repeat(5, 1))
    stats = memory.stats()
    assert stats.effective_classes == pytest.approx(5)
    assert (stats.age_p50, stats.age_p90, stats.age_max) == (5, 9, 10)
    assert WorkingMemory(3, 2).stats().effective_classes == 0


def test_the_score_has_its_ends_and_never_falls() -> None:
    x = torch.linspace(-1, 1, 2001, dtype=torch.float64)
    for score in (*SCORES, Gaussian(20.0), VonMisesFisher(5.0), VonMisesFisher(0.01)):
        h = score(x)
        assert abs(float(h[0])) < 1e-12
        assert abs(float(h[-1]) - 1) < 1e-12
        assert bool((h.diff() >= 0).all())
        assert h is not x
        assert torch.equal(score.apply_(x.clone()), h)
    with pytest.raises(ValueError, match="kappa is -1"):
        VonMisesFisher(-1)


def test_float64_in_gives_float64() -> None:
    memory = WorkingMemory(4, 3)
    memory.add([1], torch.eye(3)[:1])
    assert memory.dtype == torch.float32
    memory.add([2], torch.eye(3, dtype=torch.float64)[1:2])
    assert memory.dtype == torch.float64
    assert memory.check_valid() == (True, "")
    fixed = WorkingMemory(4, 3, dtype=torch.float32)
    fixed.add([2], torch.eye(3, dtype=torch.float64)[1:2])
    assert fixed.dtype == torch.float32
