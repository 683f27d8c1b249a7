"""Tests of the collisions that `add` measures: a call before `add` returns the same numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from stream_ssl.memory import Duplicates, WorkingMemory
from stream_ssl.memory.duel.exact import ExactCounts
from stream_ssl.memory.eviction import (
    Duel,
    MinimumRedundancy,
    MostDuplicated,
    Oldest,
    Policy,
    Redundant,
    Reservoir,
)
from stream_ssl.memory.scores import Linear, VonMisesFisher

POLICIES: dict[str, Callable[[], Policy]] = {
    "duel": Duel,
    "linear": lambda: MostDuplicated(Linear()),
    "ivf": lambda: Duel(index="ivf"),
    "compete": lambda: MostDuplicated(VonMisesFisher(0.1), compete=True),
    "redundant": Redundant,
    "minred": MinimumRedundancy,
    "reservoir": Reservoir,
    "queue": Oldest,
}
SLOTS, DIM = 60, 8


def batches(sizes: tuple[int, ...]) -> list[tuple[Tensor, Tensor, list[str]]]:
    generator, first, made = torch.Generator().manual_seed(1), 0, []
    for size in sizes:
        z_BD = normalize(torch.randn(size, DIM, generator=generator), dim=1)
        z_BD[size // 2 :] = z_BD[: size - size // 2].clone()  # copies
        names = [f"camera-{number % 3}" for number in range(size)]
        made.append((torch.arange(first, first + size), z_BD, names))
        first += size
    return made


@pytest.mark.parametrize("shares", [None, 0.5])
@pytest.mark.parametrize("name", POLICIES)
def test_measured_collisions_equal_those_of_a_call_before_add(
    name: str, shares: float | None
) -> None:
    measured, plain = (WorkingMemory(SLOTS, DIM, POLICIES[name](), shares=shares) for _ in "ab")
    for ids_B, z_BD, names in batches((0, 40, 40, 1, 2, 33, 0, 16, 100)):
        expected_B = plain.collisions(z_BD)
        without = plain.add(ids_B, z_BD, producers=names)
        found = measured.add(ids_B, z_BD, producers=names, measure=True)
        assert without.collisions is None
        assert found.collisions is not None
        torch.testing.assert_close(found.collisions, expected_B, rtol=1e-6, atol=1e-9)
        assert torch.equal(found.slots, without.slots)
        assert torch.equal(found.evicted, without.evicted)
    assert torch.equal(measured.counts(), plain.counts())
    assert measured.check_valid() == (True, "")


def test_collisions_of_refused_near_duplicates_are_measured_too() -> None:
    duplicates = Duplicates(0.99, "refuse")
    measured, plain = (WorkingMemory(SLOTS, DIM, Duel(), duplicates=duplicates) for _ in "ab")
    for ids_B, z_BD, _ in batches((60, 60, 30, 30)):
        expected_B = plain.collisions(z_BD)
        without = plain.add(ids_B, z_BD)
        found = measured.add(ids_B, z_BD, measure=True)
        assert len(found.refused) > 0
        assert found.collisions is not None
        torch.testing.assert_close(found.collisions, expected_B, rtol=1e-6, atol=1e-9)
        assert torch.equal(found.slots, without.slots)


def test_measuring_collisions_computes_no_second_product(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = WorkingMemory(SLOTS, DIM, Duel())
    rounds = batches((60, 20, 20))
    memory.add(*rounds[0][:2])
    totals: list[int] = []
    total = ExactCounts.total

    def counted(self: ExactCounts, descriptor_BA: Tensor) -> Tensor:
        totals.append(len(descriptor_BA))
        return total(self, descriptor_BA)

    monkeypatch.setattr(ExactCounts, "total", counted)
    for ids_B, z_BD, _ in rounds[1:]:
        memory.add(ids_B, z_BD, measure=True)
    assert 20 not in totals


class Unsteady(Duel):
    """A policy that fails when it should choose."""

    fails = False

    def choose(self, rows: object) -> Tensor:
        if self.fails:
            raise ValueError("no slots today")
        return super().choose(rows)  # type: ignore[arg-type]


def test_a_batch_that_failed_leaves_no_similarities_behind() -> None:
    memory = WorkingMemory(SLOTS, DIM, Unsteady())
    rounds = batches((60, 20, 20, 20))
    memory.add(*rounds[0][:2])
    policy = memory.eviction
    assert isinstance(policy, Unsteady)
    policy.fails = True
    with pytest.raises(ValueError, match="no slots today"):
        memory.add(*rounds[1][:2], measure=True)
    policy.fails = False
    twin = WorkingMemory(SLOTS, DIM, Unsteady())
    twin.load_state_dict(memory.state_dict())
    for ids_B, z_BD, _ in rounds[2:]:
        assert torch.equal(memory.add(ids_B, z_BD).evicted, twin.add(ids_B, z_BD).evicted)
