"""Tests of producers' shares of the slots, with every policy, against a naive twin."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load, save
from scipy.stats import chisquare
from torch import Tensor

from stream_ssl.memory import Duplicates, WorkingMemory
from stream_ssl.memory.duel import approximate, exact, linear
from stream_ssl.memory.eviction import (
    POLICIES,
    MinimumRedundancy,
    MostDuplicated,
    Oldest,
    Policy,
    Random,
    Redundant,
    Reservoir,
)
from stream_ssl.memory.eviction.random import TRIES, tries
from stream_ssl.memory.scores import Linear, VonMisesFisher
from stream_ssl.memory.shares import MOST_NAMES, NAMELESS, ProducerNames, key_of
from tests import naive_shares as naive
from tests.naive import unit_rows
from tests.naive_shares import Choice, Sent

SHARP = VonMisesFisher(0.2)

LINEAR = naive.of_largest(naive.counts(Linear()), 1e-8)
COUNTS = naive.of_largest(naive.counts(SHARP), 1e-8)
MAKERS: dict[str, tuple[Callable[[], Policy], Choice, bool]] = {
    "linear": (MostDuplicated, LINEAR, False),
    "sharp": (lambda: MostDuplicated(SHARP), COUNTS, False),
    "linear, compete": (lambda: MostDuplicated(compete=True), naive.compete(Linear()), True),
    "sharp, compete": (lambda: MostDuplicated(SHARP, True), naive.compete(SHARP), True),
    "redundant": (lambda: Redundant(SHARP, 3.0), naive.redundant(SHARP, 3.0, 1e-8), False),
    "ivf": (lambda: MostDuplicated(SHARP, index="ivf"), naive.anyone, False),
    "minred": (MinimumRedundancy, naive.minimum_redundancy, False),
    "oldest": (Oldest, naive.oldest, False),
    "random": (Random, naive.anyone, False),
    "reservoir": (Reservoir, naive.anyone, True),
}


def mixed(seed: int, count: int) -> list[Sent]:
    """Return a stream of several producers: a monotonous one, a late one, one that leaves, None."""
    rng = np.random.default_rng(seed)
    z_ND = unit_rows(rng, "clustered", count, 5)
    fixed_D = torch.nn.functional.normalize(torch.ones(5, dtype=torch.float64), dim=0)
    stream = []
    for born in range(count):
        names: list[str | None] = ["robot", "robot", "yard", "films", None]
        if born > count // 2:
            names += ["late", "late"]
            names.remove("films")
        name = names[int(rng.integers(len(names)))]
        z_D = z_ND[born].double()
        if name == "yard":  # a fixed camera: all its samples are alike
            z_D = torch.nn.functional.normalize(fixed_D + 0.1 * z_D, dim=0)
        stream.append(Sent(z_D, int(rng.integers(4)), born, name))
    return stream


def offer(memory: WorkingMemory, samples: Sequence[Sent]) -> tuple[list[int], list[int]]:
    """Add samples, and return the evicted and the refused ids."""
    admission = memory.add(
        torch.tensor([one.born for one in samples]),
        torch.stack([one.z_D for one in samples]),
        labels=torch.tensor([one.label for one in samples]),
        producers=[one.producer for one in samples],
    )
    return admission.evicted.tolist(), admission.refused.tolist()


def build(policy: Policy, capacity: int, shares: float | dict[str, float] | None) -> WorkingMemory:
    return WorkingMemory(capacity, 5, policy, dtype=torch.float64, shares=shares)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", sorted(MAKERS))
def test_every_policy_chooses_among_open_slots(name: str, seed: int) -> None:
    make, choice, refuses = MAKERS[name]
    rng = np.random.default_rng(seed)
    capacity, stream = int(rng.integers(12, 40)), mixed(seed, 240)
    given: float | dict[str, float] = [0.5, 0.9, {"yard": 3.0, "films": 0.0}, 0.25][seed]
    part, weights = (0.5, given) if isinstance(given, dict) else (given, {})
    memory, gone, refused, start = build(make(), capacity, given), [], set(), 0
    while start < len(stream):
        stop = start + int(rng.integers(1, 60))
        left, never = offer(memory, stream[start:stop])
        gone += left
        refused |= set(never)
        start = stop
    held = naive.follow(choice, capacity, stream, gone, refused, part, weights, refuses)
    assert memory.ids.tolist() == [one.born for one in held]
    assert memory.producers == [one.producer for one in held]
    assert memory.check_valid() == (True, "")


@pytest.mark.parametrize(
    ("name", "size"),
    [("linear", 64), ("sharp", 64), ("ivf", 64), ("linear", 1), ("linear, compete", 1)],
)
def test_small_pools_choose_the_same_slots_as_the_naive_twin(
    name: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Use few candidates and short proposals, which otherwise occur only in large memories."""
    monkeypatch.setattr(linear, "POOL_ROWS", 24)
    monkeypatch.setattr(linear, "CLOSE_ROWS", 4)
    monkeypatch.setattr(linear, "CANDIDATES", 2)
    monkeypatch.setattr(linear, "SEGMENT", 4)
    monkeypatch.setattr(exact, "ON_CPU", replace(exact.ON_CPU, candidates=8))
    monkeypatch.setattr(approximate, "NEWCOMERS", 8)
    monkeypatch.setattr(approximate, "CANDIDATES", 8)
    monkeypatch.setattr(approximate, "FEWEST", 4)
    make, choice, refuses = MAKERS[name]
    for seed in range(3):
        stream, held = mixed(seed, 500), build(make(), 80, 0.5)
        offers = [offer(held, stream[at : at + size]) for at in range(0, 500, size)]
        gone = [one for left, _ in offers for one in left]
        never = {one for _, refused in offers for one in refused}
        twin = naive.follow(choice, 80, stream, gone, never, 0.5, {}, refuses)
        assert held.ids.tolist() == [one.born for one in twin]


@pytest.mark.parametrize("name", sorted(MAKERS))
def test_a_single_producer_gives_the_same_evictions_as_no_shares(name: str) -> None:
    make, _, _ = MAKERS[name]
    stream = [Sent(one.z_D, one.label, one.born, "robot") for one in mixed(3, 200)]
    plain, alone = build(make(), 24, None), build(make(), 24, 0.5)
    for start in range(0, 200, 33):
        left = offer(plain, stream[start : start + 33])
        assert offer(alone, stream[start : start + 33]) == left
    one, two = plain.state_dict(), alone.state_dict()
    assert one.keys() == two.keys()
    assert all(torch.equal(one[entry], two[entry]) for entry in one)


@pytest.mark.parametrize("name", sorted(MAKERS))
def test_a_loaded_state_with_shares_continues_bit_equal(name: str) -> None:
    make, _, _ = MAKERS[name]
    stream, memory = mixed(5, 260), build(make(), 30, 0.5)
    for start in range(0, 130, 26):
        offer(memory, stream[start : start + 26])
    again = build(make(), 30, 0.5)
    again.load_state_dict(load(save(memory.state_dict())))
    assert again.producers == memory.producers
    for start in range(130, 260, 26):
        part = stream[start : start + 26]
        assert offer(memory, part) == offer(again, part)
    one, two = memory.state_dict(), again.state_dict()
    assert all(torch.equal(one[entry], two[entry]) for entry in one)


@pytest.mark.parametrize("name", sorted(MAKERS))
def test_each_producer_keeps_its_guarantee(name: str) -> None:
    """Once the memory is full, a producer with enough admitted samples holds its guarantee."""
    make, _, _ = MAKERS[name]
    stream, memory = mixed(7, 300), build(make(), 32, 0.5)
    reached: set[str | None] = set()
    admitted: Counter[str | None] = Counter()
    for start in range(0, 300, 7):
        part = stream[start : start + 7]
        full = len(memory) == 32
        _, never = offer(memory, part)
        if full:
            admitted += Counter(one.producer for one in part if one.born not in never)
        reached |= {
            who for who, own in memory.holdings().items() if admitted[who] >= own.guaranteed
        }
        for who, own in memory.holdings().items():
            assert who not in reached or own.slots >= own.guaranteed, (start, who, own)
    assert {"robot", "yard", "films", "late"} <= reached
    assert memory.holdings()["films"].guaranteed == 4  # 4 producers have half of the slots


def test_a_batch_under_shares_evicts_as_single_samples() -> None:
    for name in sorted(set(MAKERS) - {"ivf"}):
        make, _, _ = MAKERS[name]
        stream = mixed(9, 160)
        together, single = build(make(), 20, 0.5), build(make(), 20, 0.5)
        offer(together, stream)
        for sample in stream:
            offer(single, [sample])
        assert torch.equal(together.ids, single.ids), name


def test_refused_near_duplicates_hold_no_share() -> None:
    memory = WorkingMemory(
        8, 5, Random(), dtype=torch.float64, shares=0.5, duplicates=Duplicates(0.999, "refuse")
    )
    stream = mixed(1, 100)
    for start in range(0, 100, 30):
        offer(memory, [one for one in stream[start : start + 30] for _ in range(2)])
    assert sum(own.slots for own in memory.holdings().values()) == 8


def test_a_state_of_an_older_version_has_no_producers() -> None:
    memory = build(MostDuplicated(), 10, 0.5)
    offer(memory, mixed(2, 30))
    state = {n: v for n, v in memory.state_dict().items() if "producer" not in n}
    state["counters"][0] = 3
    again = build(MostDuplicated(), 10, 0.5)
    again.load_state_dict(state)
    assert again.producers == [None] * 10
    assert again.holdings()[None] == (10, 0)
    offer(again, mixed(2, 60)[30:])
    assert again.check_valid() == (True, "")


def test_a_policy_from_outside_that_cannot_keep_shares_is_refused() -> None:
    class First(Policy):
        def choose(self, rows: object) -> Tensor:
            return torch.zeros(1, dtype=torch.int64)

    with pytest.raises(ValueError, match=r"First cannot keep shares .*`memory\.shares: null`"):
        WorkingMemory(4, 2, First(), shares=0.5)
    assert all(made().keeps_shares for made in POLICIES.values())


@pytest.mark.parametrize(
    ("shares", "reason"),
    [
        (1.0, "shares is 1.0: must be at least 0 and below 1"),
        (-0.1, "at least 0 and below 1"),
        (float("nan"), "must be a finite number"),
        ("half", "must be a finite number"),
        ({"yard": -1}, "the share of yard is -1: must be at least 0"),
        ({"": 1}, "name a producer ''"),
    ],
)
def test_the_memory_rejects_wrong_shares(shares: object, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        WorkingMemory(4, 2, shares=shares)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("producers", "reason"),
    [
        ("ab", "producers are 'ab'"),
        (["a"], "1 producers for 2 rows"),
        (["a", 3], "a producer is 3"),
    ],
)
def test_add_rejects_wrong_producers(producers: object, reason: str) -> None:
    memory = WorkingMemory(4, 2)
    with pytest.raises(ValueError, match=reason):
        memory.add([0, 1], torch.eye(2), producers=producers)  # type: ignore[arg-type]
    assert len(memory) == 0


def test_names_of_producers_without_a_slot_are_forgotten() -> None:
    names = ProducerNames(["kept"])
    held_k = torch.tensor([key_of("kept"), NAMELESS])
    for start in range(0, MOST_NAMES + 100, 500):
        names.keys([f"camera {start + number}" for number in range(500)], 500, held_k)
    names.keys(["last"], 1, held_k)
    assert names.of(key_of("kept")) == "kept"
    assert names.of(key_of("last")) == "last"
    assert names.of(key_of("camera 0")) == f"{key_of('camera 0'):016x}"


def test_producers_without_a_slot_are_forgotten() -> None:
    memory = build(Oldest(), 4, 0.0)
    for start in range(0, 3000, 500):
        stream = mixed(0, 500)
        offer(memory, [Sent(s.z_D, s.label, s.born, f"{start + s.born}") for s in stream])
    assert memory._holdings is not None
    assert len(memory._holdings.held_P) <= 2 * 4 + 1024 + 500


def test_tries_are_uniform_and_independent() -> None:
    number_B = torch.rand(20_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    slot_BR = np.array(tries(number_B, 20))
    assert np.array_equal(slot_BR[:, 0], (number_B * 20).long().numpy())
    for column in range(1, TRIES):
        pairs = np.bincount(slot_BR[:, 0] * 20 + slot_BR[:, column], minlength=400)
        assert chisquare(pairs).pvalue > 1e-5


def test_a_newcomer_takes_any_open_slot_and_no_barred_slot() -> None:
    """The 62 slots of producer a are open, and the two slots of producer b are barred."""
    counts: Counter[int] = Counter()
    for seed in range(200):
        memory = WorkingMemory(64, 2, Random(), seed=seed, shares=0.98)
        names = ["a"] * 62 + ["b"] * 2
        memory.add(torch.arange(64), torch.eye(2)[[0] * 64], producers=names)
        counts += Counter(
            memory.add(torch.tensor([64]), torch.eye(2)[[0]], producers=["b"]).evicted.tolist()
        )
    assert set(counts) <= set(range(62))
    assert len(counts) > 50


@pytest.mark.parametrize(
    "policy",
    [
        lambda: Redundant(VonMisesFisher(0.01)),
        lambda: MostDuplicated(VonMisesFisher(0.1)),
        lambda: MostDuplicated(),
    ],
)
def test_a_new_producer_opens_slots_of_producers_at_their_guarantee(policy: Callable) -> None:
    """Its first sample lowers the others' guarantees, so it may take the largest count of all."""
    slots, rng = 1000, np.random.default_rng(0)
    z_ND = unit_rows(rng, "uniform", slots + 1, 64).double()
    held = int(0.9 * slots / 2)  # the guarantee of the first producer
    for near in range(1, 200):  # it has the near-copies
        near_D = z_ND[0] + 0.001 * torch.from_numpy(rng.normal(size=64))
        z_ND[near] = near_D / near_D.norm()
    memory = WorkingMemory(slots, 64, policy(), dtype=torch.float64, shares=0.9)
    names = ["first"] * held + ["second"] * (slots - held)
    memory.add(torch.arange(slots), z_ND[:slots], producers=names)
    most = int(memory.counts().argmax())
    assert most < held
    evicted = memory.add(torch.tensor([slots]), z_ND[slots:], producers=["new"]).evicted
    assert evicted.tolist() == [most]


def test_a_batch_that_uses_up_the_candidates_takes_no_guaranteed_slot() -> None:
    """After some newcomers, the only open candidates are samples that have already left."""
    rng = np.random.default_rng(0)
    names = [None] * 4 + [[None, "yard", "robot", "films"][n] for n in rng.integers(0, 4, 16)]
    z_ND = unit_rows(rng, "uniform", len(names), 5).double()
    stream = [Sent(z_ND[n], 0, n, name) for n, name in enumerate(names)]
    memory = build(MostDuplicated(SHARP, index="ivf"), 4, 0.9)
    gone = [one for part in (stream[:4], stream[4:]) for one in offer(memory, part)[0]]
    held = naive.follow(naive.anyone, 4, stream, gone, set(), 0.9, {}, False)
    assert memory.ids.tolist() == [one.born for one in held]
