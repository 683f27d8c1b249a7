"""Age caps against naive twins.

Shapes: D embedding, K slots.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from memory import WorkingMemory
from memory.columns import Rows
from memory.eviction import (
    Hybrid,
    MinimumRedundancy,
    MostDuplicated,
    Oldest,
    Policy,
)
from memory.eviction.base import Feedback
from memory.scores import Linear, VonMisesFisher
from tests import naive_policies as naive
from tests.naive import STREAMS, unit_rows


class NoOdd(Oldest):
    """Refuses newcomers of odd label, to see refusals through a hybrid."""

    name = "no odd"

    def choose(self, rows: Rows) -> torch.Tensor:
        if int(rows.labels[0]) % 2:
            return torch.tensor([-1])
        return super().choose(rows[:1])


INNER: dict[str, tuple[Callable[[], Policy], naive.Rule]] = {
    "queue": (Oldest, naive.oldest),
    "linear": (MostDuplicated, naive.most_duplicated(Linear())),
    "sharp": (
        lambda: MostDuplicated(VonMisesFisher(0.1)),
        naive.most_duplicated(VonMisesFisher(0.1)),
    ),
    "minred": (MinimumRedundancy, naive.minimum_redundancy),
    "refusing": (NoOdd, naive.refuse_odd(naive.oldest)),
}


def streams(seed: int, stream: str) -> tuple[int, list[naive.Sample], list[int]]:
    """A capacity of at least 5, samples, and where to cut them into batches."""
    rng = np.random.default_rng([seed, STREAMS.index(stream)])
    capacity, dim = int(rng.integers(5, 20)), int(rng.integers(2, 8))
    count = int(rng.integers(capacity, 5 * capacity + 20))
    labels = rng.choice([-1, 0, 1, 2], size=count, p=[0.2, 0.5, 0.2, 0.1]).tolist()
    z_ND = unit_rows(rng, stream, count, dim)
    samples = [naive.Sample(z_D, c, n) for n, (z_D, c) in enumerate(zip(z_ND, labels, strict=True))]
    return capacity, samples, sorted(rng.integers(0, count, size=4).tolist())


def fill(
    policy: Policy, capacity: int, samples: list[naive.Sample], cuts: list[int]
) -> tuple[list[int], WorkingMemory]:
    """The samples through a memory in batches, and who left it, in order."""
    z_ND = torch.stack([sample.z_D for sample in samples])
    labels = torch.tensor([sample.label for sample in samples])
    memory, gone = WorkingMemory(capacity, z_ND.shape[1], policy), []
    for start, end in zip([0, *cuts], [*cuts, len(samples)], strict=True):
        ids = torch.arange(start, end)
        gone += memory.add(ids, z_ND[start:end], labels=labels[start:end]).evicted.tolist()
        assert memory.check_valid() == (True, "")
    return gone, memory


def test_a_refusing_policy_by_itself() -> None:
    make, rule = INNER["refusing"]
    for seed in range(15):
        capacity, samples, cuts = streams(seed, STREAMS[seed % len(STREAMS)])
        gone, memory = fill(make(), capacity, samples, cuts)
        assert memory.ids.tolist() == naive.follow(rule, capacity, samples, gone)


@pytest.mark.parametrize("name", INNER)
def test_an_age_cap(name: str) -> None:
    make, rule = INNER[name]
    for seed in range(10):
        capacity, samples, cuts = streams(seed, STREAMS[seed % len(STREAMS)])
        for cap in (1, capacity, capacity + 3, 2 * capacity):
            gone, memory = fill(Hybrid(make(), age_cap=cap), capacity, samples, cuts)
            held = naive.follow(naive.aged(rule, cap), capacity, samples, gone)
            assert memory.ids.tolist() == held, f"seed {seed}, cap {cap}"


@pytest.mark.parametrize("caps", [(20, 30), (30, 20)])
def test_of_two_age_caps_the_lower_holds(caps: tuple[int, int]) -> None:
    make, rule = INNER["minred"]
    for seed in range(6):
        capacity, samples, cuts = streams(seed, "clustered")
        policy = Hybrid(Hybrid(make(), age_cap=caps[0]), age_cap=caps[1])
        gone, memory = fill(policy, capacity, samples, cuts)
        assert memory.ids.tolist() == naive.follow(naive.aged(rule, 20), capacity, samples, gone)


def test_planted_errors_are_found() -> None:
    z_ND = unit_rows(np.random.default_rng(1), "uniform", 40, 4)
    memory = WorkingMemory(10, 4, Hybrid(Oldest(), age_cap=30))
    memory.add(torch.arange(40), z_ND)
    memory.born[:] = memory.encoded[:] = memory.born.flip(0)
    assert "born otherwise" in memory.check_valid()[1]


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="age_cap is 0: must be at least 1"):
        Hybrid(age_cap=0)


def test_a_queue_goes_on_by_birth_when_another_took_slots() -> None:
    memory = WorkingMemory(4, 2, Oldest())
    memory.add(torch.arange(6), torch.eye(2)[[0] * 6])  # slots were born at 4, 5, 2 and 3
    memory.born[1] = memory.encoded[1] = 6
    memory.eviction.on_replace(torch.tensor([1]), Rows(*([torch.tensor([6])] * 6)), torch.eye(2))
    assert memory.eviction.check() == (True, "")
    rows = Rows(*([torch.arange(7, 12)] * 6))
    assert memory.eviction.choose(rows).tolist() == [2, 3, 0, 1, 2]


def test_feedback_reaches_the_inner_policy() -> None:
    class Listening(Oldest):
        name = "listening"

        def __init__(self) -> None:
            self.heard: list[Feedback] = []

        def update(self, feedback: Feedback) -> None:
            self.heard.append(feedback)

    inner = Listening()
    memory = WorkingMemory(4, 2, Hybrid(inner, age_cap=6))
    z = torch.eye(2)[[0] * 9]
    memory.add(torch.arange(3), z[:3])
    memory.add(torch.arange(9), z)
    assert inner.heard == [Feedback(3, 0, 0, 3), Feedback(9, 8, 0, 12)]
