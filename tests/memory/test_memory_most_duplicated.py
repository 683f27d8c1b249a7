"""DUEL's eviction against its naive twin, step by step.

Shapes: B newcomers, D embedding, K slots.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from memory import WorkingMemory
from memory.eviction import (
    MostDuplicated,
    audit,
    block,
    candidates,
    linear,
    race,
    scored,
    shortlist,
    sweep,
)
from memory.scores import Gaussian, Linear, Quadratic, Score, Threshold, VonMisesFisher
from tests.naive import STREAMS, IncrementalDuel, printed_algorithm_2, unit_rows

SCORES: tuple[Score, ...] = (
    Linear(),
    Quadratic(),
    Gaussian(),
    VonMisesFisher(kappa=0.1),
    VonMisesFisher(kappa=0.02),
    Threshold(),
)
CASES = 16  # of each stream, score and form


FORMS = pytest.mark.parametrize("compete", [False, True], ids=["evict", "compete"])


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools, shortlists, blocks and candidates of a few rows: every proof is needed at small K."""
    monkeypatch.setattr(linear, "POOL_ROWS", 12)
    monkeypatch.setattr(linear, "SHORTLIST_ROWS", 4)
    monkeypatch.setattr(linear, "NEWCOMERS", 17)
    monkeypatch.setattr(linear, "WORTH", 2)
    monkeypatch.setattr(linear, "LONGEST", 7)
    monkeypatch.setattr(sweep, "ROWS", 5)
    monkeypatch.setattr(shortlist, "STRIDE", 5)
    monkeypatch.setattr(shortlist, "FEW", 3)
    monkeypatch.setattr(shortlist, "SPARE", 1)
    monkeypatch.setattr(block, "NEWCOMERS", 13)
    monkeypatch.setattr(block, "FEWEST", 13)
    monkeypatch.setattr(block, "PART_ELEMENTS", 40)
    monkeypatch.setattr(scored, "CANDIDATES", 3)
    monkeypatch.setattr(scored, "MORE", 2)
    monkeypatch.setattr(candidates, "MOST_CANDIDATES", 9)
    monkeypatch.setattr(scored, "FORESEEN", 4)
    monkeypatch.setattr(race, "AHEAD", 2)
    monkeypatch.setattr(race, "ROWS", 1)
    monkeypatch.setattr(scored, "JUDGED", 3)


@pytest.fixture(params=["in turn", "at once"])
def followed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The audit of the host, and that of devices."""
    if request.param == "at once":
        monkeypatch.setattr(audit.Outside, "follow", audit.Outside.follow_at_once)


def replay(
    memory: WorkingMemory, score: Score, z_ND: Tensor, cuts: list[int], compete: bool = False
) -> None:
    """Feed the stream in batches and judge every step of every batch."""
    ids = torch.arange(len(z_ND))
    wide, capacity = z_ND.dtype == torch.float64, memory.capacity
    twin: IncrementalDuel | None = None
    held: list[int] = []
    for start, end in zip([0, *cuts], [*cuts, len(z_ND)], strict=True):
        admission = memory.add(ids[start:end], z_ND[start:end])
        evicted, refused = iter(admission.evicted.tolist()), set(admission.refused.tolist())
        total = None if twin is None else float(twin.count_K.sum())
        for newcomer in range(start, end):
            if len(held) < capacity:
                held.append(newcomer)
                continue
            twin = twin or IncrementalDuel(score, z_ND[:capacity], compete)
            slot = -1 if newcomer in refused else held.index(next(evicted))
            x_D = z_ND[newcomer]
            most = float(twin.judged(x_D).max())
            assert twin.regret(slot, x_D) <= (
                1e-9 * capacity if wide else 1e-4 * most + 1e-7 * score.slope
            )
            if slot < 0:
                assert not twin.holds(x_D), f"newcomer {newcomer} ties with a slot, and was refused"
            else:
                assert twin.lowest_equal(slot) == slot, f"newcomer {newcomer}: a tie went to {slot}"
                held[slot] = newcomer
            twin.step(x_D, slot)
        assert next(evicted, None) is None
        assert memory.ids.tolist() == held
        assert torch.equal(memory.embeddings, z_ND[held])
        if compete and total is not None and twin is not None:
            assert float(twin.count_K.sum()) <= total + (1e-9 if wide else 1e-4) * (1 + total)
    assert memory.check_valid() == (True, "")
    if twin is not None:
        near = {"rtol": 0, "atol": 1e-9 * capacity} if wide else {"rtol": 1e-4, "atol": 1e-5}
        assert torch.allclose(memory.counts(), twin.counts_anew(), **near)


def run_cases(
    stream: str,
    score: Score,
    seeds: range,
    dtype: torch.dtype = torch.float64,
    compete: bool = False,
) -> None:
    for seed in seeds:
        rng = np.random.default_rng([seed, STREAMS.index(stream)])
        capacity, dim = int(rng.integers(1, 24)), int(rng.integers(1, 12))
        count = int(rng.integers(capacity, 4 * capacity + 16))
        z_ND = unit_rows(rng, stream, count, dim).to(dtype)
        cuts = sorted(rng.integers(0, count, size=int(rng.integers(0, 5))).tolist())
        memory = WorkingMemory(capacity, dim, MostDuplicated(score, compete))
        replay(memory, score, z_ND, cuts, compete)


@FORMS
@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("score", SCORES, ids=repr)
def test_every_step_evicts_the_largest_count(stream: str, score: Score, compete: bool) -> None:
    run_cases(stream, score, range(CASES), compete=compete)


@FORMS
@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("score", SCORES, ids=repr)
def test_every_step_holds_with_few_candidates(
    stream: str, score: Score, compete: bool, narrow: None, followed: None
) -> None:
    run_cases(stream, score, range(CASES, CASES + CASES // 2), compete=compete)


@FORMS
@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("score", SCORES, ids=repr)
def test_float32_evicts_the_largest_count(
    stream: str, score: Score, compete: bool, narrow: None
) -> None:
    run_cases(stream, score, range(8), torch.float32, compete)


@FORMS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("stream", STREAMS)
def test_every_step_holds_where_the_column_is_swept(
    stream: str, dtype: torch.dtype, compete: bool, narrow: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "POOL", linear.SWEEP)
    run_cases(stream, Linear(), range(CASES), dtype, compete)


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
    ways = (8192, 8192, 16), (256, 32, 1), (64, 16, 1), (64, 16, 10**9), (64, 16, 16)
    for pool_rows, shortlist_rows, worth in ways:
        monkeypatch.setattr(linear, "POOL_ROWS", pool_rows)
        monkeypatch.setattr(linear, "WORTH", worth)
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
    assert all(outcome == outcomes[0] for outcome in outcomes)


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
            assert twin.regret(slot, z_ND[0]) < 1e-9
