"""DUEL's eviction against its naive twin, step by step.

Shapes: B newcomers, D embedding, K slots.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from memory import WorkingMemory
from memory.eviction import MostDuplicated, linear, shortlist
from memory.scores import Gaussian, Linear, Quadratic, Score, VonMisesFisher
from tests.naive import STREAMS, IncrementalDuel, printed_algorithm_2, unit_rows

SCORES: tuple[Score, ...] = (
    Linear(),
    Quadratic(),
    Gaussian(),
    VonMisesFisher(kappa=0.1),
    VonMisesFisher(kappa=0.02),
)
CASES = 100  # of each stream


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools and shortlists of a few rows, so that every bound is put to the proof at small K."""
    monkeypatch.setattr(linear, "POOL_ROWS", 12)
    monkeypatch.setattr(linear, "SHORTLIST_ROWS", 4)
    monkeypatch.setattr(linear, "NEWCOMERS", 17)
    monkeypatch.setattr(shortlist, "STRIDE", 5)


def replay(memory: WorkingMemory, score: Score, z_ND: Tensor, cuts: list[int]) -> None:
    """Feed the stream in batches and judge every eviction of every batch."""
    ids = torch.arange(len(z_ND))
    capacity = memory.capacity
    tolerance = 1e-9 * capacity if z_ND.dtype == torch.float64 else 1e-4 * capacity
    twin: IncrementalDuel | None = None
    held: list[int] = []
    for start, end in zip([0, *cuts], [*cuts, len(z_ND)], strict=True):
        evicted = iter(memory.add(ids[start:end], z_ND[start:end]).evicted.tolist())
        for newcomer in range(start, end):
            if len(held) < capacity:
                held.append(newcomer)
                continue
            twin = twin or IncrementalDuel(score, z_ND[:capacity])
            slot = held.index(next(evicted))
            assert twin.regret(slot) <= tolerance, f"newcomer {newcomer} evicted slot {slot}"
            assert twin.lowest_equal(slot) == slot, f"newcomer {newcomer}: a tie went to {slot}"
            twin.step(z_ND[newcomer], slot)
            held[slot] = newcomer
        assert next(evicted, None) is None
        assert memory.ids.tolist() == held
        assert torch.equal(memory.embeddings, z_ND[held])
    assert memory.check_valid() == (True, "")
    if twin is not None:
        assert torch.allclose(memory.counts(), twin.counts_anew(), atol=tolerance)


def run_cases(stream: str, score: Score, seeds: range, dtype: torch.dtype = torch.float64) -> None:
    for seed in seeds:
        rng = np.random.default_rng([seed, STREAMS.index(stream)])
        capacity, dim = int(rng.integers(1, 24)), int(rng.integers(1, 12))
        count = int(rng.integers(capacity, 2 * capacity + 16))
        z_ND = unit_rows(rng, stream, count, dim).to(dtype)
        cuts = sorted(rng.integers(0, count, size=int(rng.integers(0, 5))).tolist())
        replay(WorkingMemory(capacity, dim, MostDuplicated(score)), score, z_ND, cuts)


@pytest.mark.parametrize("stream", STREAMS)
def test_every_step_of_linear_evicts_the_largest_count(stream: str) -> None:
    run_cases(stream, Linear(), range(CASES))


@pytest.mark.parametrize("stream", STREAMS)
def test_every_step_holds_through_small_pools(stream: str, narrow: None) -> None:
    run_cases(stream, Linear(), range(CASES, 2 * CASES))


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("score", SCORES[1:], ids=repr)
def test_every_step_of_other_scores_evicts_the_largest_count(stream: str, score: Score) -> None:
    run_cases(stream, score, range(CASES // 5))


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("score", SCORES, ids=repr)
def test_float32_evicts_the_largest_count(stream: str, score: Score, narrow: None) -> None:
    run_cases(stream, score, range(8), torch.float32)


@pytest.mark.parametrize("score", SCORES, ids=repr)
def test_the_sequence_is_that_of_the_printed_algorithm(score: Score) -> None:
    rng = np.random.default_rng(5)
    capacity, count = 60, 200
    z_ND = unit_rows(rng, "clustered", capacity + count, 16)
    memory = WorkingMemory(capacity, 16, MostDuplicated(score))
    memory.add(torch.arange(capacity), z_ND[:capacity])
    admission = memory.add(torch.arange(capacity, capacity + count), z_ND[capacity:])
    held, evicted = list(range(capacity)), []
    for turn, slot in enumerate(printed_algorithm_2(score, z_ND[:capacity], z_ND[capacity:])):
        evicted.append(held[slot])
        held[slot] = capacity + turn
    assert admission.evicted.tolist() == evicted
    assert memory.ids.tolist() == held


@pytest.mark.parametrize("stream", ["uniform", "clustered", "duplicates"])
def test_a_large_memory_evicts_the_same_with_and_without_pools(
    stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(11)
    z_ND = unit_rows(rng, stream, 1400, 32).to(torch.float32)
    outcomes = []
    for pool_rows, shortlist_rows in ((8192, 8192), (256, 32), (64, 16)):
        monkeypatch.setattr(linear, "POOL_ROWS", pool_rows)
        monkeypatch.setattr(linear, "SHORTLIST_ROWS", shortlist_rows)
        memory = WorkingMemory(1000, 32, MostDuplicated())
        memory.add(torch.arange(1000), z_ND[:1000])
        parts = z_ND[1000:].split(150)
        starts = np.cumsum([1000, *[len(part) for part in parts[:-1]]])
        outcomes.append(
            [
                memory.add(torch.arange(start, start + len(part)), part).evicted.tolist()
                for start, part in zip(starts, parts, strict=True)
            ]
        )
    assert outcomes[0] == outcomes[1] == outcomes[2]


@pytest.mark.parametrize("score", SCORES, ids=repr)
def test_refreshed_rows_count_anew(score: Score, narrow: None) -> None:
    rng = np.random.default_rng(3)
    z_ND = unit_rows(rng, "clustered", 120, 6)
    memory = WorkingMemory(40, 6, MostDuplicated(score))
    for start in range(0, 120, 8):
        memory.add(torch.arange(start, start + 8), z_ND[start : start + 8])
        slots = memory.stalest(5)
        memory.refresh(slots, unit_rows(rng, "one class", len(slots), 6))
        assert memory.check_valid() == (True, "")
        twin = IncrementalDuel(score, memory.embeddings)
        assert torch.allclose(memory.counts(), twin.count_K, atol=1e-9)
        if len(memory) == 40:
            step = WorkingMemory(40, 6, MostDuplicated(score))
            step.load_state_dict(memory.state_dict())
            slot = int(step.add([-1], z_ND[:1]).slots)
            assert twin.regret(slot) < 1e-9
