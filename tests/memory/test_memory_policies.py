"""Tests of the rules of every eviction policy, and of the distributions of single policies.

Shapes: B newcomers, D embedding, K slots.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from safetensors.torch import load, save
from table import table
from torch import Tensor

from stream_ssl.memory import WorkingMemory
from stream_ssl.memory.columns import Rows
from stream_ssl.memory.eviction import (
    POLICIES,
    MostDuplicated,
    Oldest,
    Policy,
    Random,
    Redundant,
    Reservoir,
)
from stream_ssl.memory.scores import VonMisesFisher
from tests.naive import STREAMS, Queue, replay_ids, reservoir_law, unit_rows

MAKERS: dict[str, Callable[[], Policy]] = {
    **POLICIES,
    "most-duplicated, sharp": lambda: MostDuplicated(VonMisesFisher(0.1)),
    "redundant, often": lambda: Redundant(VonMisesFisher(0.1), 1.5),
}


@pytest.fixture(params=sorted(MAKERS))
def maker(request: pytest.FixtureRequest) -> Callable[[], Policy]:
    return MAKERS[request.param]


@pytest.fixture
def policy(maker: Callable[[], Policy]) -> Policy:
    return maker()


def stream(seed: int, count: int, dim: int = 6, kind: str = "clustered") -> tuple[Tensor, Tensor]:
    return torch.arange(count), unit_rows(np.random.default_rng(seed), kind, count, dim)


def states_equal(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("name", sorted(MAKERS))
def test_a_batch_is_admitted_as_single_samples_are(name: str) -> None:
    ids, z_ND = stream(0, 150)
    labels = ids * ids % 5 - 1
    together = WorkingMemory(20, 6, MAKERS[name](), seed=4)
    single = WorkingMemory(20, 6, MAKERS[name](), seed=4)
    admission = together.add(ids, z_ND, labels=labels)
    one_by_one = [
        single.add(ids[n : n + 1], z_ND[n : n + 1], labels=labels[n : n + 1]) for n in range(150)
    ]
    assert admission.evicted.tolist() == [i for one in one_by_one for i in one.evicted.tolist()]
    assert admission.refused.tolist() == [i for one in one_by_one for i in one.refused.tolist()]
    assert admission.ages.tolist() == [age for one in one_by_one for age in one.ages.tolist()]
    assert torch.equal(together.ids, single.ids)
    assert torch.equal(together.born, single.born)


@table("name", sorted(MAKERS))
def test_an_admission_accounts_for_every_newcomer(name: str) -> None:
    kind = STREAMS[sorted(MAKERS).index(name) % len(STREAMS)]
    ids, z_ND = stream(1, 400, kind=kind)
    memory = WorkingMemory(32, 6, MAKERS[name]())
    for start, end in ((0, 20), (20, 20), (20, 90), (90, 91), (91, 400)):
        held = set(memory.ids.tolist())
        admission = memory.add(ids[start:end], z_ND[start:end])
        offered = set(range(start, end))
        gone, refused = set(admission.evicted.tolist()), set(admission.refused.tolist())
        assert set(memory.ids.tolist()) == (held | offered) - gone - refused
        assert refused <= offered
        assert admission.inserted == end - start - len(refused)
        for newcomer, slot in zip(range(start, end), admission.slots.tolist(), strict=True):
            assert (slot == -1) == (newcomer in gone | refused)
            assert slot == -1 or int(memory.ids[slot]) == newcomer
        ages = dict(zip(admission.evicted.tolist(), admission.ages.tolist(), strict=True))
        assert all(1 <= age <= end - 1 - born for born, age in ages.items())
        assert memory.check_valid() == (True, "")
    assert torch.equal(memory.embeddings, z_ND[memory.ids])


def test_a_loaded_memory_continues_bit_equal(maker: Callable[[], Policy]) -> None:
    ids, z_ND = stream(2, 500)
    memory = WorkingMemory(50, 6, maker(), seed=9, image_shape=(1, 2, 2))
    images = torch.arange(500 * 4).to(torch.uint8).reshape(500, 1, 2, 2)
    start = 0
    for cut in (30, 100, 300, 400):
        memory.add(ids[start:cut], z_ND[start:cut], images[start:cut])
        memory.refresh(memory.stalest(3), z_ND[:3])
        state = memory.state_dict()
        loaded = WorkingMemory(50, 6, maker(), seed=1, image_shape=(1, 2, 2))
        loaded.load_state_dict(load(save(state)))
        assert states_equal(loaded.state_dict(), state)
        assert loaded.check_valid() == (True, "")
        start = cut + 60
        for each in (memory, loaded):
            each.negatives(5)
            each.sample(4)
            each.add(ids[cut:start], z_ND[cut:start], images[cut:start])
        assert states_equal(loaded.state_dict(), memory.state_dict())
        memory = loaded


@table("number", range(len(MAKERS)), ids=sorted(MAKERS))
def test_every_policy_counts_refreshed_rows(number: int) -> None:
    ids, z_ND = stream(8, 300, kind=("duplicates", "uniform")[number % 2])
    memory = WorkingMemory(16, 6, MAKERS[sorted(MAKERS)[number]]())
    for start in range(0, 300, 25):
        memory.add(ids[start : start + 25], z_ND[start : start + 25])
        slots = memory.stalest(6).flip(0)
        memory.refresh(slots, z_ND[300 - start - 6 : 300 - start])
        assert memory.check_valid() == (True, "")
        anew_k = memory.eviction.score.counts(memory.embeddings)
        assert torch.allclose(memory.counts(), anew_k, atol=1e-8)
        total_B = memory.eviction.score.total(z_ND[:5], memory.embeddings)
        assert torch.allclose(memory.collisions(z_ND[:5]) * 16, total_B, atol=1e-8)


def test_a_memory_continues_in_float64_after_float32(maker: Callable[[], Policy]) -> None:
    """The memory is cast from float32 to float64 midway. From then on every count is in float64."""
    ids, z_ND = stream(9, 120, dim=2)
    memory = WorkingMemory(12, 2, maker())
    for part in ids.split(20):
        wide = bool(part[0] >= 60)
        memory.add(part, z_ND[part] if wide else z_ND[part].to(torch.float32))
        assert memory.dtype == (torch.float64 if wide else torch.float32)
        assert memory.check_valid() == (True, "")
    anew_k = memory.eviction.score.counts(memory.embeddings)
    assert torch.allclose(memory.counts(), anew_k, atol=1e-10)


def test_a_state_is_a_copy(policy: Policy) -> None:
    ids, z_ND = stream(3, 60)
    memory = WorkingMemory(20, 6, policy)
    memory.add(ids[:30], z_ND[:30])
    state = memory.state_dict()
    kept = {name: value.clone() for name, value in state.items()}
    memory.add(ids[30:], z_ND[30:])
    memory.sample(3)
    assert states_equal(state, kept)


def test_a_policy_serves_one_memory(policy: Policy) -> None:
    WorkingMemory(8, 3, policy)
    with pytest.raises(ValueError, match="serves another memory"):
        WorkingMemory(8, 3, policy)


@table("name", sorted(POLICIES))
def test_a_memory_of_one_slot_holds_the_last_admitted_sample(name: str) -> None:
    ids, z_ND = stream(4, 12)
    memory = WorkingMemory(1, 6, POLICIES[name]())
    admission = memory.add(ids, z_ND)
    assert memory.ids.tolist() == [int(ids[admission.slots == 0])]
    assert admission.inserted - len(admission.evicted) == 1


@table("sizes", [(3, 4, 10, 35, 1), (100,), (10, 10, 10)])
def test_oldest_is_a_queue(sizes: tuple[int, ...]) -> None:
    queue, memory, start = Queue(10), WorkingMemory(10, 6, Oldest()), 0
    ids, z_ND = stream(5, sum(sizes))
    for size in sizes:
        part = slice(start, start + size)
        admission = memory.add(ids[part], z_ND[part])
        assert admission.evicted.tolist() == queue.add(range(start, start + size))
        assert sorted(memory.ids.tolist()) == queue.ids
        start += size


def test_the_reservoir_holds_each_sample_with_equal_probability() -> None:
    """40 samples pass 10 slots in 5,000 runs: 50,000 held samples, chi-square."""
    capacity, seen, runs = 10, 40, 5000
    ids, z_ND = stream(6, seen)
    policy = Reservoir()
    memory = WorkingMemory(capacity, 6, policy)
    memory.add(ids[:capacity], z_ND[:capacity])
    late = ids[capacity:]
    rows = Rows(late, z_ND[capacity:], z_ND[capacity:], late, late, late)
    held_N, pair = torch.zeros(seen), 0
    for seed in range(runs):
        policy.bind(policy.columns, seed)
        joined = list(zip(policy.choose(rows).tolist(), late.tolist(), strict=True))
        plan, newcomers = zip(*[(s, n) for s, n in joined if s >= 0], strict=True)
        held, _ = replay_ids(range(capacity), plan, newcomers)
        held_N[held] += 1
        pair += {0, 1} <= set(held)
    law = reservoir_law(capacity, seen)
    expected = runs * law
    # Held counts are dependent, because their sum is fixed. This scales the statistic by 1 - K / N.
    chi = float(((held_N - expected) ** 2 / (expected * (1 - law))).sum() * (seen - 1) / seen)
    assert chi < 39 + 4.5 * (2 * 39) ** 0.5
    both = runs * capacity * (capacity - 1) / (seen * (seen - 1))
    assert abs(pair - both) < 4.5 * both**0.5


def test_random_evicts_every_slot_with_equal_probability() -> None:
    """Chi-square over 50,000 evictions from 20 slots. Each slot also follows each other
    uniformly.
    """
    memory = WorkingMemory(20, 2, Random(), seed=3)
    ids, z_ND = stream(7, 20, dim=2)
    memory.add(ids, z_ND)
    late = torch.arange(50_000)
    z_BD = z_ND[:1].expand(50_000, 2)
    plan = memory.eviction.choose(Rows(late, z_BD, z_BD, late, late, late))
    seen_K = torch.bincount(plan, minlength=20)
    after_KK = torch.bincount(plan[:-1] * 20 + plan[1:], minlength=400)
    for seen, freedom in ((seen_K, 19), (after_KK, 399)):
        expected = float(seen.sum()) / len(seen)
        chi = float(((seen - expected) ** 2 / expected).sum())
        assert abs(chi - freedom) < 4.5 * (2 * freedom) ** 0.5


def test_slots_of_a_plan_are_evicted_in_order() -> None:
    """If a slot recurs within a batch, each newcomer evicts the newcomer before it."""

    class Fixed(Oldest):
        name = "fixed"
        plan = (2, 2, -1, 0, 2, -1, 0)

        def choose(self, rows: object) -> Tensor:
            del rows
            return torch.tensor(self.plan)

    ids, z_ND = stream(7, 10)
    memory = WorkingMemory(3, 6, Fixed())
    memory.add(ids[:3], z_ND[:3])
    admission = memory.add(ids[3:], z_ND[3:])
    joined = [(slot, 3 + turn) for turn, slot in enumerate(Fixed.plan) if slot >= 0]
    held, evicted = replay_ids([0, 1, 2], *zip(*joined, strict=True))
    assert memory.ids.tolist() == held == [9, 1, 7]
    assert admission.evicted.tolist() == evicted == [2, 3, 0, 4, 6]
    assert admission.ages.tolist() == [1, 1, 6, 3, 3]
    assert admission.refused.tolist() == [5, 8]
    assert admission.slots.tolist() == [-1, -1, -1, -1, 2, -1, 0]
    assert admission.inserted == 5
