"""Tests of near-duplicates at admission, against a queue that decides one by one.

Shapes: B newcomers, D embedding, K slots.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from table import table
from torch import Tensor

from stream_ssl.memory import Duplicates, WorkingMemory
from stream_ssl.memory.eviction import MostDuplicated, Oldest, Policy, Reservoir
from stream_ssl.memory.scores import VonMisesFisher
from tests.naive import STREAMS, unit_rows
from tests.naive_memory import DeduplicatedQueue

ACTIONS = ("count", "refuse", "merge")


def compare(memory: WorkingMemory, twin: DeduplicatedQueue, z_ND: Tensor, cuts: list[int]) -> None:
    """Feed both in batches. Every result and every slot must be equal."""
    for start, end in zip([0, *cuts], [*cuts, len(z_ND)], strict=True):
        ids = torch.arange(start, end) * 10
        admission = memory.add(ids, z_ND[start:end])
        outcome = twin.add(ids.tolist(), z_ND[start:end])
        for name in ("slots", "evicted", "refused", "duplicates", "merged"):
            assert getattr(admission, name).tolist() == getattr(outcome, name), name
        assert admission.inserted == end - start - len(outcome.refused)
        assert memory.ids.tolist() == [slot.name for slot in twin.held]
        assert memory.multiplicity.tolist() == [slot.stands_for for slot in twin.held]
        assert memory.check_valid() == (True, "")


def beyond_rounding(z_ND: Tensor, threshold: float, unit: float, merging: bool) -> bool:
    """Return whether the rounding of cosines cannot change any decision, on any machine."""
    near_NN = z_ND.double() @ z_ND.double().T
    if (near_NN - threshold + unit).abs().min() < unit / 3:
        return False
    gap_NNN = near_NN[:, :, None] - near_NN[:, None, :]
    return not merging or bool((gap_NNN.abs() - unit).abs().min() > unit / 3)


def run_cases(action: str, stream: str, dtype: torch.dtype, seeds: range) -> int:
    """Compare random streams, and return the number of duplicates in all of them."""
    found = tried = 0
    for seed in seeds:
        rng = np.random.default_rng([seed, STREAMS.index(stream), ACTIONS.index(action)])
        capacity, dim = int(rng.integers(1, 20)), int(rng.integers(2, 8))
        z_ND = unit_rows(rng, stream, int(rng.integers(1, 70)), dim).to(dtype)
        threshold = float(rng.choice([1.0, 0.98, 0.9, 0.5]))
        rule = Duplicates(threshold, action)  # type: ignore[arg-type]
        memory = WorkingMemory(capacity, dim, Oldest(), duplicates=rule)
        unit = 1e-12 if dtype == torch.float64 else 1e-6
        if not beyond_rounding(z_ND, threshold, unit, action == "merge"):
            continue
        tried += 1
        cuts = sorted(rng.integers(0, len(z_ND), size=int(rng.integers(0, 6))).tolist())
        compare(memory, DeduplicatedQueue(capacity, threshold, action, unit), z_ND, cuts)
        found += memory.stats().duplicates
    assert tried >= 3
    return found


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_decisions_on_a_batch_equal_decisions_one_by_one(
    action: str, stream: str, dtype: torch.dtype
) -> None:
    assert run_cases(action, stream, dtype, range(25)) > 0


@pytest.mark.parametrize("action", ACTIONS)
def test_small_blocks_do_not_change_the_decisions(
    action: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stream_ssl.memory.duplicates.BLOCK_ELEMENTS", 70)
    monkeypatch.setattr("stream_ssl.memory.compute.CACHED_ELEMENTS", 50)
    assert run_cases(action, "duplicates", torch.float64, range(100, 140)) > 0


def test_duplicates_are_found_by_cosines_although_norms_differ_from_1() -> None:
    near = torch.tensor([0.99985, (1 - 0.99985**2) ** 0.5])
    for norm in (0.9991, 1.0009):  # the largest deviation from unit norm that rows may have
        memory = WorkingMemory(9, 2, duplicates=Duplicates(1.0, "refuse"))
        row_BD = norm * torch.stack([torch.eye(2)[0], torch.eye(2)[0], near])
        memory.add([0, 1, 2], row_BD)
        assert memory.ids.tolist() == [0, 2]
        assert memory.add([3, 4], row_BD[[2, 0]]).refused.tolist() == [3, 4]


def test_only_admitted_newcomers_make_others_duplicates() -> None:
    """The rows: b is near a, c is near b but not near a."""
    angle = torch.tensor([0.0, 0.15, 0.30], dtype=torch.float64)
    z_BD = torch.stack([angle.cos(), angle.sin()], dim=1)
    expected = {"count": [1, 2], "refuse": [1], "merge": [1]}
    for action in ACTIONS:
        memory = WorkingMemory(5, 2, duplicates=Duplicates(0.98, action))
        assert memory.add([], z_BD[:0]).merged.tolist() == []
        assert memory.add(torch.arange(3), z_BD).duplicates.tolist() == expected[action]
        assert memory.ids.tolist() == ([0, 1, 2] if action == "count" else [0, 2])


@table("score", [None, VonMisesFisher(0.1)], ids=repr)
@table("action", ["refuse", "merge"])
def test_no_two_slots_hold_near_duplicates(action: Any, score: Any) -> None:
    rng = np.random.default_rng(4)
    memory = WorkingMemory(30, 4, MostDuplicated(score), duplicates=Duplicates(0.9, action), seed=1)
    for start in range(0, 600, 75):
        memory.add(torch.arange(start, start + 75), unit_rows(rng, "clustered", 75, 4))
        near_kk = memory.embeddings @ memory.embeddings.T
        near_kk.fill_diagonal_(-1)
        assert float(near_kk.max()) < 0.9
        assert memory.check_valid() == (True, "")
    stats = memory.stats()
    assert stats.refused == stats.duplicates > 100
    assert stats.merged == (stats.refused if action == "merge" else 0)
    assert stats.added == 600 == stats.inserted + stats.refused


class Reluctant(Oldest):
    """A queue that refuses every second newcomer."""

    name = "reluctant"

    def choose(self, rows: Any) -> Tensor:
        plan = super().choose(rows)
        plan[1::2] = -1
        return plan


def test_duplicates_of_a_refused_newcomer_are_refused_without_a_merge() -> None:
    memory = WorkingMemory(2, 4, Reluctant(), duplicates=Duplicates(0.9, "merge"))
    row = torch.eye(4, dtype=torch.float64)
    memory.add([0, 1], row[:2])
    # 2 takes slot 0, the policy refuses 3, and the others are near-duplicates of 3, 2, 0 and 1.
    admission = memory.add([2, 3, 4, 5, 6, 7], row[[2, 3, 3, 2, 0, 1]])
    assert admission.slots.tolist() == [0, -1, -1, -1, -1, -1]
    assert admission.refused.tolist() == [3, 4, 5, 6, 7]
    assert admission.duplicates.tolist() == [4, 5, 6, 7]
    assert admission.merged.tolist() == [-1, 0, -1, 1]
    assert admission.evicted.tolist() == [0]
    assert memory.multiplicity.tolist() == [2, 2]


@table("policy", [MostDuplicated, Oldest, Reservoir])
def test_counting_duplicates_changes_no_admission(policy: type[Policy]) -> None:
    z_ND = unit_rows(np.random.default_rng(2), "duplicates", 200, 5)
    plain = WorkingMemory(20, 5, policy(), seed=3)
    counted = WorkingMemory(20, 5, policy(), seed=3, duplicates=Duplicates(0.99))
    found = 0
    for start in range(0, 200, 40):
        ids = torch.arange(start, start + 40)
        one, two = (m.add(ids, z_ND[start : start + 40]) for m in (plain, counted))
        for name in ("slots", "evicted", "ages", "refused", "inserted", "merged"):
            assert bool(torch.as_tensor(getattr(one, name) == getattr(two, name)).all()), name
        assert len(one.duplicates) == 0
        found += len(two.duplicates)
    assert found == counted.stats().duplicates > 50
    assert torch.equal(plain.embeddings, counted.embeddings)


@table("held", [1, 2])
@table(("turn", "expected"), [(0, [2, 1]), (1e-3, [1, 2])])
def test_a_duplicate_is_merged_into_the_closest_slot_and_in_ties_the_lowest(
    turn: float, expected: list[int], held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stream_ssl.memory.compute.CACHED_ELEMENTS", 1)
    angle_B = torch.tensor([0.0, 0.8, 0.4 + turn], dtype=torch.float64)
    z_BD = torch.stack([angle_B.cos(), angle_B.sin()], dim=1)
    memory = WorkingMemory(4, 2, duplicates=Duplicates(threshold=0.9, action="merge"))
    memory.add(torch.arange(held), z_BD[:held])
    admission = memory.add(torch.arange(held, 3), z_BD[held:])
    assert admission.refused.tolist() == [2]
    assert memory.multiplicity.tolist() == expected


def test_a_newcomer_is_merged_if_only_another_newcomer_reaches_the_threshold() -> None:
    """The cosines with the slot and with the other newcomer differ by less than the rounding."""
    slot, near = 0.0, math.acos(0.9 - 1.5e-12)
    other = near + math.acos(0.9 - 0.7e-12)
    angle_N = torch.tensor([slot, other, near], dtype=torch.float64)
    z_ND = torch.stack([angle_N.cos(), angle_N.sin()], dim=1)
    memory = WorkingMemory(4, 2, duplicates=Duplicates(0.9, "merge"))
    memory.add([0], z_ND[:1])
    admission = memory.add([1, 2], z_ND[1:])
    assert (admission.refused.tolist(), admission.merged.tolist()) == ([2], [1])
    assert memory.multiplicity.tolist() == [1, 2]
