"""Tests of DUEL's eviction against its naive twin, step by step, with every exact engine.

Ties may fall either way. Therefore each step is judged by its regret: how far the evicted slot's
count is below the largest count. Only rounding may cause a regret.

Shapes: B newcomers, D embedding, K slots, N samples, R slots refreshed, T steps, W columns.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from memory_stream import equal
from table import table
from torch import Tensor
from torch.nn.functional import normalize

from stream_ssl.memory import WorkingMemory, checks
from stream_ssl.memory.duel.exact import ON_CPU, ON_GPU, ExactCounts
from stream_ssl.memory.duel.linear import EveryStep, LinearCounts, Pool
from stream_ssl.memory.duel.simulate import kept_steps, simulate
from stream_ssl.memory.eviction import MostDuplicated
from stream_ssl.memory.scores import Gaussian, Linear, Quadratic, Score, Threshold, VonMisesFisher
from tests.naive import STREAMS, IncrementalDuel, printed_algorithm_2, unit_rows

OTHERS: tuple[Score, ...] = (
    Quadratic(),
    Gaussian(),
    VonMisesFisher(kappa=0.1),
    VonMisesFisher(kappa=0.02),
    Threshold(),
)
SHARP = VonMisesFisher(0.02), VonMisesFisher(0.001), Gaussian(1e-4), Threshold(0.99, 0.001)
COARSE = {"stream_ssl.memory.duel.linear.fast_in_bfloat16": lambda device: True}
NARROW = {"stream_ssl.memory.duel.linear.fast_in_bfloat16": lambda device: False}
LINEAR: dict[str, dict[str, Any]] = {
    "as it is": {},
    "pools": {
        "stream_ssl.memory.duel.linear.POOL_ROWS": 12,
        "stream_ssl.memory.duel.linear.CLOSE_ROWS": 4,
    },
    "candidates": {
        "stream_ssl.memory.duel.linear.CANDIDATES": 1,
        "stream_ssl.memory.duel.linear.STEPS": 5,
    },
    "segments": {
        "stream_ssl.memory.duel.linear.CLOSE_ROWS": 2,
        "stream_ssl.memory.duel.linear.SEGMENT": 3,
    },
    "short scans": {
        "stream_ssl.memory.duel.linear.STEPS": 2,
        "stream_ssl.memory.duel.linear.POOL_ROWS": 4,
    },
    "scans": {
        "stream_ssl.memory.duel.linear.POOL_ROWS": 4,
        "stream_ssl.memory.duel.linear.POOL_WORTH": 10**9,
    }
    | NARROW,
    "scans in bfloat16": {
        "stream_ssl.memory.duel.linear.POOL_ROWS": 4,
        "stream_ssl.memory.duel.linear.CLOSE_ROWS": 3,
    }
    | COARSE,
    "in parts": {
        "stream_ssl.memory.duel.linear.POOL_ROWS": 4,
        "stream_ssl.memory.duel.linear.LARGEST_PART": 90,
    },
}
LARGE = {
    "pools": {
        "stream_ssl.memory.duel.linear.POOL_ROWS": 100,
        "stream_ssl.memory.duel.linear.CLOSE_ROWS": 16,
    },
    "pools alone": {
        "stream_ssl.memory.duel.linear.POOL_ROWS": 100,
        "stream_ssl.memory.duel.linear.POOL_WORTH": 1,
    },
    "close rows": {
        "stream_ssl.memory.duel.linear.CLOSE_ROWS": 2,
        "stream_ssl.memory.duel.linear.STEPS": 20,
    },
}
POOLS = [
    (LARGE["pools"], {"another pool", "no more pools", "scan"}),
    (LARGE["pools alone"], {"another pool"}),
]
"""The constants, and the branches that they lead to."""
EXACT = {
    "as it is": {},
    "candidates": {"stream_ssl.memory.duel.exact.ON_CPU": replace(ON_CPU, candidates=3)},
    "sizes of a GPU": {"stream_ssl.memory.duel.exact.ON_CPU": ON_GPU},
    "blocks": {
        "stream_ssl.memory.duel.exact.ON_CPU": replace(ON_CPU, elements=30),
        "stream_ssl.memory.duel.exact.BLOCK_ELEMENTS": 30,
        "stream_ssl.memory.compute.CACHED_ELEMENTS": 50,
    },
}
FORMS = pytest.mark.parametrize("compete", [False, True], ids=["evict", "compete"])


@pytest.fixture
def narrow(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set constants so small that every branch is needed at small K."""
    for path, value in request.param.items():
        monkeypatch.setattr(path, value)


def narrowed(settings: dict[str, dict[str, Any]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("narrow", settings.values(), ids=list(settings), indirect=True)


class Judge:
    """A memory and its naive twin, which judges every step."""

    def __init__(self, capacity: int, dim: int, score: Score, compete: bool = False) -> None:
        self.memory = WorkingMemory(capacity, dim, MostDuplicated(score, compete))
        self.held: list[int] = []
        self.plan: list[int] = []
        self.again()

    def again(self) -> None:
        """Let the twin count the current rows again."""
        policy: Any = self.memory.eviction
        self.twin = IncrementalDuel(policy.score, self.memory.embeddings, policy.compete)

    def reload(self) -> None:
        """Continue with a memory that has loaded the state of this one."""
        policy: Any = self.memory.eviction
        again = MostDuplicated(policy.score, policy.compete)
        other = WorkingMemory(self.memory.capacity, self.memory.dim, again)
        other.load_state_dict(self.memory.state_dict())
        assert equal(other.state_dict(), self.memory.state_dict())
        self.memory = other

    def add(self, z_BD: Tensor) -> None:
        """Add a batch. AssertionError if the regret of a step is larger than rounding."""
        start, free = self.memory.added, self.memory.capacity - len(self.held)
        if free:
            self.twin.z_KD = torch.cat([self.twin.z_KD, z_BD[:free].double()])
            self.twin.count_K = self.twin.counts_anew()
        admission = self.memory.add(torch.arange(start, start + len(z_BD)), z_BD)
        evicted, refused = iter(admission.evicted.tolist()), set(admission.refused.tolist())
        self.held += range(start, start + min(free, len(z_BD)))
        for newcomer, x_D in enumerate(z_BD[free:], start + free):
            slot = -1 if newcomer in refused else self.held.index(next(evicted))
            judged = self.twin.judged(x_D)
            most = float(judged.max())
            assert most - float(judged[slot]) <= self.rounding(most), (newcomer, slot)
            self.twin.step(x_D, slot)
            if slot >= 0:
                self.held[slot] = newcomer
            self.plan.append(slot)
        assert self.memory.ids.tolist() == self.held

    def rounding(self, most: float) -> float:
        """Return how much two counts may differ by rounding if the larger is `most`."""
        slope = self.memory.eviction.score.slope
        if self.memory.dtype == torch.float64:
            return 1e-13 * (1 + slope) * self.memory.capacity
        return 5e-7 * (1 + slope) * (most + 0.25) + 1e-6 * slope

    def check(self) -> None:
        """Check that the memory's counts are the counts of its rows."""
        assert self.memory.check_valid() == (True, "")
        again_K = self.twin.counts_anew()
        off = float((self.memory.counts() - again_K).abs().max())
        assert off <= self.rounding(float(again_K.max()))


def run_cases(stream: str, scores: tuple[Score, ...], cases: int, largest: int = 40) -> None:
    """Run random streams through memories of 1 to `largest` slots, for both dtypes and forms."""
    for seed in range(cases):
        rng = np.random.default_rng([seed, STREAMS.index(stream)])
        capacity, dim = int(rng.integers(1, largest)), int(rng.integers(1, 12))
        count = int(rng.integers(capacity, 4 * capacity + 16))
        dtype = (torch.float32, torch.float64)[seed // len(scores) % 2]
        compete = bool(seed // len(scores) // 2 % 2)
        z_ND = unit_rows(rng, stream, count, dim).to(dtype)
        judge = Judge(capacity, dim, scores[seed % len(scores)], compete)
        for part_BD in z_ND.tensor_split(sorted(rng.integers(0, count, seed % 5).tolist())):
            full, total = len(judge.memory) == capacity, float(judge.twin.count_K.sum())
            judge.add(part_BD)
            if compete and full:
                assert float(judge.twin.count_K.sum()) <= total + judge.rounding(total)
        judge.check()


@pytest.mark.parametrize("stream", STREAMS)
@narrowed(LINEAR)
def test_linear_counts_evict_a_most_duplicated_slot_at_every_step(
    stream: str, narrow: None
) -> None:
    run_cases(stream, (Linear(),), 8)


@pytest.mark.parametrize("stream", STREAMS)
@narrowed(EXACT)
def test_exact_counts_evict_a_most_duplicated_slot_at_every_step(stream: str, narrow: None) -> None:
    run_cases(stream, OTHERS, 20)


@pytest.mark.parametrize("stream", STREAMS)
def test_single_newcomers_evict_a_most_duplicated_slot_at_every_step(stream: str) -> None:
    for seed in range(24):
        rng = np.random.default_rng([seed, STREAMS.index(stream)])
        capacity, dtype = int(rng.integers(1, 20)), (torch.float32, torch.float64)[seed % 2]
        z_ND = unit_rows(rng, stream, 4 * capacity + 16, 5).to(dtype)
        score = Linear() if seed < 8 else OTHERS[seed % len(OTHERS)]
        judge = Judge(capacity, 5, score, compete=bool(seed // 2 % 2))
        for row, z_D in enumerate(z_ND):
            judge.add(z_D[None])
            if row % 16 == 15:
                judge.reload()
        judge.check()


@FORMS
@pytest.mark.parametrize(
    ("narrow", "expected"),
    POOLS,
    ids=list(LARGE)[:2],
    indirect=["narrow"],
)
def test_single_newcomers_of_a_memory_larger_than_a_pool_evict_as_the_naive_twin(
    narrow: None, expected: set[str], compete: bool, ways: Counter[str]
) -> None:
    for stream, dtype in (("clustered", torch.float64), ("uniform", torch.float32)):
        z_ND = unit_rows(np.random.default_rng(0), stream, 480, 6).to(dtype)
        judge, loaded = (Judge(240, 6, Linear(), compete) for _ in range(2))
        for turn, part_BD in enumerate(z_ND.split([240, *[1] * 100, 40, *[1] * 100])):
            judge.add(part_BD)
            loaded.add(part_BD)
            if turn % 16 == 15:
                loaded.reload()
        assert loaded.plan == judge.plan
        judge.check()
    assert expected <= set(ways)


@pytest.mark.parametrize("stream", STREAMS)
def test_very_sharp_scores_evict_a_most_duplicated_slot_at_every_step(stream: str) -> None:
    run_cases(stream, SHARP, 32, largest=9)


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the branches that searches for the largest count took."""
    seen: Counter[str] = Counter()

    def watch(engine: type, name: str, look: Any) -> None:
        method = getattr(engine, name)

        def watched(self: Any, *given: Any, **named: Any) -> Any:
            before = dict(vars(self))
            result = method(self, *given, **named)
            given += tuple(named.values())
            seen.update(way for way, taken in look(before, self, given, result).items() if taken)
            return result

        monkeypatch.setattr(engine, name, watched)

    def adapted(_: Any, now: Any, given: Any, __: Any) -> dict[str, bool]:
        turns, held, _, outside, unsure = given
        ended = held < turns
        return {
            "proposal": True,
            "another pool": ended and outside and not now._scans,
            "no more pools": ended and outside and now._scans > 0,
            "compare more": ended and unsure and not outside,
            "overruled": ended and not unsure and not outside,
            "compare all": ended and not held and not unsure and not outside,
            "scan": not outside and now._scans > 0,
        }

    def placed(_: Any, __: Any, given: Any, ___: Any) -> dict[str, bool]:
        return {"overruled": given[1].held < len(given[3]), "proposal": True}

    watch(LinearCounts, "_adapt", adapted)
    watch(ExactCounts, "_place", placed)
    return seen


@pytest.mark.parametrize("narrow", [LINEAR["candidates"]], indirect=True, ids=["candidates"])
def test_linear_counts_overrule_some_proposals_from_few_candidates(
    narrow: None, ways: Counter[str]
) -> None:
    run_cases("clustered", (Linear(),), 16)
    assert 0 < ways["overruled"] < ways["proposal"]


@pytest.mark.parametrize("narrow", [EXACT["candidates"]], indirect=True, ids=["candidates"])
def test_exact_counts_overrule_some_proposals_from_few_candidates(
    narrow: None, ways: Counter[str]
) -> None:
    run_cases("clustered", OTHERS, 15)
    assert 0 < ways["overruled"] < ways["proposal"]


@FORMS
@pytest.mark.parametrize(
    ("narrow", "expected"),
    [*POOLS, (LARGE["close rows"], {"compare more"})],
    ids=LARGE,
    indirect=["narrow"],
)
def test_pools_last_for_many_steps(
    narrow: None, expected: set[str], compete: bool, ways: Counter[str]
) -> None:
    for stream, dtype in (("clustered", torch.float64), ("one class", torch.float32)):
        z_ND = unit_rows(np.random.default_rng(0), stream, 800, 8).to(dtype)
        judge, loaded = (Judge(500, 8, Linear(), compete) for _ in range(2))
        for part_BD in z_ND.split([500, 50, 40, 70, 80, 60]):
            judge.add(part_BD)
            loaded.add(part_BD)
            loaded.reload()
        assert loaded.plan == judge.plan
        judge.check()
    assert expected <= set(ways)
    assert ways["proposal"] < 1200 / 5


@pytest.mark.parametrize("narrow", [COARSE, NARROW], indirect=True, ids=["bfloat16", "float32"])
def test_a_memory_larger_than_a_pool_changes_from_pools_to_scans(
    narrow: None, ways: Counter[str]
) -> None:
    z_ND = unit_rows(np.random.default_rng(1), "uniform", 9400, 6).float()
    judge = Judge(9000, 6, Linear())
    for part_BD in z_ND.split([9000, 150, 250]):
        judge.add(part_BD)
    assert {"compare more", "no more pools"} <= set(ways)
    assert ways["scan"] > 2 * ways["no more pools"]


@table("dtype", [torch.float32, torch.float64])
@table("reach", [1e-3, 1.0, 300.0])
def test_a_product_in_bfloat16_misses_no_row(reach: float, dtype: torch.dtype) -> None:
    """Each row is just above the evicted slot at one step, or clearly below it at all."""
    generator = torch.Generator().manual_seed(0)
    row_PA, moved_TA, least_T = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((4000, 24), (50, 24), (50,))
    )
    row_PA = normalize(row_PA, dim=1).to(dtype)
    moved_TA, least_T = moved_TA * reach, least_T * reach
    short_P = (row_PA.double() @ moved_TA.T - least_T).amax(dim=1)
    size = float((moved_TA.norm(dim=1) + least_T.abs()).max())
    steps = EveryStep(moved_TA, Pool(row_PA, coarse=True).coarse_PX)
    radius = row_PA.double().norm(dim=1).max()
    for more, found in ((1e-6, True), (-0.06, False)):
        over_P1 = steps.over((more * size - short_P).to(dtype), least_T, radius)
        assert bool(((over_P1 > 0) == found).all())


@table("reach", [2.0**-10, 1.0, 2.0**8])
@table("dim", [4, 16, 64])
def test_a_product_in_bfloat16_misses_no_row_if_all_numbers_are_rounded_down(
    dim: int, reach: float
) -> None:
    """The numbers are near the middle between two bfloat16 values, so all of them round down."""
    half = torch.finfo(torch.bfloat16).eps / 2
    sign_PA = torch.randn(50, dim, generator=torch.Generator().manual_seed(0)).sign().double()
    row_PA, moved_PA = (
        (1 + 0.999 * half) * dim**-0.5 * sign_PA,
        (1 + 0.999 * half) * reach * sign_PA,
    )
    most = float(row_PA[0] @ moved_PA[0])  # of each row at its own step
    gain = -(1 + 1.001 * half) * dim**0.5 * reach
    least_P = torch.full((50,), gain + most * (1 - 1e-9), dtype=torch.float64)
    steps = EveryStep(moved_PA, Pool(row_PA, coarse=True).coarse_PX)
    over_P1 = steps.over(torch.full_like(least_P, gain), least_P, row_PA[0].norm())
    assert bool((over_P1 > 0).all())


@table("slots", [None, torch.arange(60)], ids=["the column", "copies"])
def test_a_pool_stays_in_step_with_the_column(slots: Tensor | None) -> None:
    row_PA, place = unit_rows(np.random.default_rng(0), "uniform", 60, 5), torch.tensor([7, 0, 59])
    pool = Pool(row_PA.clone(), slots, coarse=True)
    row_PA[place] = row_PA[[1, 2, 3]]
    if slots is None:
        pool.row_PA[place] = row_PA[place]  # the memory does the same
    pool.replace(place, row_PA[place])
    again = Pool(row_PA, coarse=True)
    assert pool.coarse_PX is not None
    assert again.coarse_PX is not None
    assert torch.equal(pool.coarse_PX, again.coarse_PX)
    assert torch.equal(pool.row_PA, again.row_PA)
    assert torch.equal(pool.gains(row_PA[5]), again.gains(row_PA[5]))


def test_all_gains_are_computed_exactly_if_rounding_misleads_the_candidates(
    monkeypatch: pytest.MonkeyPatch, ways: Counter[str]
) -> None:
    """Products in the rows' own dtype are made useless, so all gains must be computed exactly."""

    def candidates(_: Any, gain_P: Tensor, *__: Any) -> Tensor:
        return gain_P.argmax()[None] if gain_P.dtype == torch.float64 else gain_P.argmin()[None]

    monkeypatch.setattr("stream_ssl.memory.duel.linear.candidates", candidates)
    z_ND = unit_rows(np.random.default_rng(0), "clustered", 360, 8).float()
    judge = Judge(300, 8, Linear())
    for part_BD in z_ND.split([300, 2, 18, 40]):
        judge.add(part_BD)
    assert ways["compare all"]


@table("score", [Linear(), *OTHERS[:-1]], ids=repr)
def test_the_evicted_slots_are_those_of_the_printed_algorithm(score: Score) -> None:
    z_ND = unit_rows(np.random.default_rng(5), "clustered", 260, 16)
    judge = Judge(60, 16, score)
    judge.add(z_ND)
    assert judge.plan == printed_algorithm_2(score, z_ND[:60], z_ND[60:])


@pytest.mark.parametrize("score", [Linear(), *OTHERS], ids=repr)
@narrowed({name: LINEAR[name] | EXACT["candidates"] for name in ("as it is", "candidates")})
def test_rows_encoded_again_are_counted_again(score: Score, narrow: None) -> None:
    rng = np.random.default_rng(3)
    judge = Judge(40, 6, score)
    for turn in range(12):
        judge.add(unit_rows(rng, "clustered", 11, 6))
        slots = judge.memory.stalest((5, 25)[turn % 2])
        judge.memory.refresh(slots, unit_rows(rng, "one class", len(slots), 6))
        judge.again()
        judge.check()


@table(
    ("score", "how"),
    [(Linear(), "newcomers"), (Linear(), "encoded again"), (VonMisesFisher(0.1), "newcomers")],
    ids=["sum", "sum, encoded again", "counts"],
)
def test_rounding_errors_disappear_when_sums_and_counts_are_computed_again(
    score: Score, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums and counts are computed again after some newcomers, or some rows encoded again."""
    monkeypatch.setattr("stream_ssl.memory.duel.linear.RECOUNT_AFTER", 100)
    rng = np.random.default_rng(0)
    judge = Judge(20, 4, score)
    judge.add(unit_rows(rng, "uniform", 20, 4))
    policy: Any = judge.memory.eviction
    kept_X = policy._counts._sum_A if score == Linear() else policy._counts.count_K
    kept_X[3] += 1e-3
    for _ in range(40):
        assert not judge.memory.check_valid()[0] or how == "newcomers"
        z_BD = unit_rows(rng, "uniform", 10, 4)
        if how == "newcomers":
            judge.memory.add(torch.arange(10), z_BD)
        else:
            judge.memory.refresh(torch.arange(10), z_BD)
    judge.memory.add([0], z_BD[:1])
    assert judge.memory.check_valid() == (True, "")


def test_every_slot_is_counted_again_in_turn() -> None:
    """This includes a slot that is never evicted, whose count nothing else would correct."""
    z_KD, score = torch.eye(41, dtype=torch.float64), VonMisesFisher(0.02)
    memory = WorkingMemory(40, 41, MostDuplicated(score), dtype=torch.float64)
    memory.add(torch.arange(40), z_KD[:40])
    policy: Any = memory.eviction
    policy._counts.count_K -= 1e-3
    for _ in range(3):
        assert not memory.check_valid()[0]
        memory.add(torch.arange(256), z_KD[40:].expand(256, -1))
    memory.add([0], z_KD[40:])
    assert memory.check_valid() == (True, "")
    assert len(set(range(40)) & set(memory.ids.tolist())) > 30


def copied(copies: int, capacity: int) -> Tensor:
    """Return float32 rows for a memory and 300 newcomers, with bit-equal copies of each."""
    rng, count = np.random.default_rng(copies), capacity + 300
    row_ND = unit_rows(rng, "uniform", -(-count // copies), 8).float()
    return row_ND.repeat_interleave(copies, dim=0)[torch.from_numpy(rng.permutation(count))]


@table("score", [Linear(), *SHARP[:2]], ids=repr)
@table(("copies", "capacity"), [(300, 500), (2300, 2000)])
def test_hundreds_of_copies_are_evicted_as_by_the_naive_twin(
    copies: int, capacity: int, score: Score
) -> None:
    judge = Judge(capacity, 8, score)
    for part_BD in copied(copies, capacity).split([capacity, 250, 50]):
        judge.add(part_BD)
    judge.check()


@pytest.mark.parametrize(
    ("copies", "score"),
    [(4, Linear()), (1300, Linear()), (4, VonMisesFisher(0.1))],
    ids=["4", "1300", "4, sharp"],
)
def test_ties_do_not_end_a_proposal(copies: int, score: Score, ways: Counter[str]) -> None:
    judge = Judge(1000, 8, score)
    for part_BD in copied(copies, 1000).split(1000):
        judge.add(part_BD)
    assert ways["proposal"] < 12  # for 300 newcomers


@pytest.mark.parametrize("stream", ["duplicates", "one-hot"])
@pytest.mark.parametrize(
    ("narrow", "score"),
    [(LINEAR[name], Linear()) for name in ("pools", "short scans", "scans", "scans in bfloat16")]
    + [(EXACT[name], VonMisesFisher(0.1)) for name in ("candidates", "blocks")],
    ids=["pools", "short scans", "scans", "coarse scans", "exact candidates", "exact blocks"],
    indirect=["narrow"],
)
def test_ties_are_broken_the_same_way_in_a_second_run_and_after_loading(
    narrow: None, score: Score, stream: str
) -> None:
    for seed in range(2):
        dtype = torch.float32 if seed else torch.float64
        z_ND = unit_rows(np.random.default_rng(seed), stream, 160, 9).to(dtype)
        one, two, loaded = (Judge(40, 9, score, compete=seed == 1) for _ in range(3))
        for part_BD in z_ND.split(23):
            for judge in (one, two, loaded):
                judge.add(part_BD)
            loaded.reload()
        assert one.plan == two.plan == loaded.plan


# Sums that nearly vanish, and rows whose norm differs slightly from 1.


def leave(judge: Judge, rest_D: Tensor, rng: np.random.Generator) -> bool:
    """Encode two slots again so that the sum of all rows is `rest_D`, if this is possible."""
    z_KD = judge.memory.embeddings
    slots = torch.from_numpy(rng.choice(len(z_KD), 2, replace=False))
    half_D = (rest_D - z_KD.sum(dim=0) + z_KD[slots].sum(dim=0)) / 2
    square = float(half_D @ half_D)
    if not 0 < square < 1:
        return False
    across_D = torch.from_numpy(rng.standard_normal(len(half_D)))
    across_D = normalize(across_D - (across_D @ half_D) / square * half_D, dim=0)
    across_D = across_D * (1 - square) ** 0.5
    judge.memory.refresh(slots, torch.stack([half_D + across_D, half_D - across_D]))
    judge.again()
    return True


@FORMS
@pytest.mark.parametrize("off", [1e-9, 1e-7])
@pytest.mark.parametrize("copies", [10, 100])
def test_newcomers_opposite_to_the_sum_evict_as_the_naive_twin(
    copies: int, off: float, compete: bool
) -> None:
    c, s = np.cos(0.5), np.sin(0.5)
    row_KD = np.array([[1.0, 0.0]] * copies + [[c, s]] * 595 + [[c, -s]] * 595)
    judge = Judge(len(row_KD), 2, Linear(), compete)
    judge.add(torch.from_numpy(np.random.default_rng(0).permutation(row_KD)))
    judge.add(normalize(torch.tensor([[-1.0, off]], dtype=torch.float64)).repeat(copies + 60, 1))


@FORMS
@narrowed(
    {
        "pools": {
            "stream_ssl.memory.duel.linear.POOL_ROWS": 24,
            "stream_ssl.memory.duel.linear.CLOSE_ROWS": 6,
        }
    }
)
def test_evictions_stay_exact_if_the_sum_nearly_vanishes_during_a_pool(
    narrow: None, compete: bool
) -> None:
    """The bounds compare a long sum with a tiny one: a difference of squares would cancel."""
    rng, vanished = np.random.default_rng(0), 0
    for _ in range(40):
        dim, capacity = int(rng.choice([2, 3, 4])), int(rng.choice([30, 60, 120]))
        spread = float(rng.choice([0.2, 0.5, 1.0]))
        row_KD = rng.standard_normal(dim) + spread * rng.standard_normal((capacity, dim))
        z_KD = normalize(torch.from_numpy(row_KD))
        if rng.random() < 0.5:  # with duplicates
            z_KD = z_KD[torch.from_numpy(rng.integers(max(2, capacity // 6), size=capacity))]
        judge = Judge(capacity, dim, Linear(), compete)
        judge.add(z_KD)
        for _ in range(5):
            off = float(rng.choice([0, 1e-9, 1e-8, 1e-4]))
            noise_BD = off * rng.standard_normal((int(rng.integers(1, 12)), dim))
            sum_D = judge.memory.embeddings.sum(dim=0)
            judge.add(normalize(torch.from_numpy(noise_BD) - normalize(sum_D, dim=0)))
            rest_D = float(rng.choice([1e-5, 1e-7, 1e-9])) * rng.standard_normal(dim)
            if leave(judge, torch.from_numpy(rest_D), rng):
                vanished += 1
                some = torch.from_numpy(rng.integers(capacity, size=5))
                fresh_BD = torch.from_numpy(rng.standard_normal((int(rng.integers(1, 9)), dim)))
                judge.add(z_KD[some] if rng.random() < 0.5 else normalize(fresh_BD))
    assert vanished > 10


@FORMS
@pytest.mark.parametrize("grown", ["refreshed", "newcomers"])
@pytest.mark.parametrize(
    "narrow",
    [
        LARGE["pools"],
        {
            "stream_ssl.memory.checks.NORM_TOLERANCE": 0.95,
            "stream_ssl.memory.duel.linear.POOL_ROWS": 12,
        },
    ],
    ids=["as allowed", "more than allowed"],
    indirect=True,
)
def test_evictions_stay_exact_with_rows_longer_than_all_earlier_rows(
    narrow: None, grown: str, compete: bool
) -> None:
    """A bound that assumes unit rows fails, at least for rows longer than the tolerance."""
    longest = 1 + 0.99 * checks.NORM_TOLERANCE
    for seed in range(10):
        rng = np.random.default_rng(seed)
        judge = Judge(150, 2, Linear(), compete)
        judge.add(unit_rows(rng, "uniform", 150, 2))
        for turn in range(3):
            scale = longest if grown == "newcomers" and turn else 1.0
            judge.add(unit_rows(rng, "uniform", 3, 2) * torch.tensor([[1.0], [scale], [scale]]))
            first = [slot for slot in rng.permutation(150).tolist() if judge.held[slot] < 150]
            slots = torch.tensor(first[:75])  # the newcomers are not among them
            scale = longest if grown == "refreshed" and turn == 1 else 1.0
            alike_RD = (
                judge.memory.embeddings[slots] if turn else unit_rows(rng, "one class", 75, 2)
            )
            alike_RD[1:] *= scale
            judge.memory.refresh(slots, alike_RD)
            judge.again()
            judge.add(unit_rows(rng, "uniform", 8, 2))


# The rule itself, with a few candidates.


def by_loop(h_WW: Tensor, count_c: Tensor, compete: bool) -> tuple[list[int], list[float]]:
    """Return the evicted column and its count at each step, with all counts computed again."""
    there, column, left = list(range(len(count_c))), [], []
    outside_c = count_c - h_WW[: len(count_c), : len(count_c)].sum(dim=1)  # with all other slots
    outside_W = torch.cat([outside_c, outside_c.new_zeros(len(h_WW) - len(count_c))])
    for newcomer in range(len(count_c), len(h_WW)):
        there += [newcomer] if compete else []
        counts = [float(outside_W[w] + h_WW[w, there].sum()) for w in there]
        left.append(max(counts))
        column.append(there.pop(counts.index(max(counts))))
        there += [] if compete else [newcomer]
    return column, left


@FORMS
def test_simulate_equals_a_loop(compete: bool) -> None:
    for seed in range(10):
        compare_simulation(np.random.default_rng(seed), compete)


def compare_simulation(rng: np.random.Generator, compete: bool) -> None:
    first, turns, level = int(rng.integers(1, 9)), int(rng.integers(1, 20)), float(rng.normal())
    h_WW = torch.from_numpy(rng.random((first + turns, first + turns)))
    h_WW = (h_WW + h_WW.T).fill_diagonal_(0)
    count_c = h_WW[:first, :first].sum(dim=1)
    count_T = h_WW[first:, :first].sum(dim=1)
    found = simulate(count_c - level, count_T - level, h_WW, compete)
    column, left = by_loop(h_WW, count_c, compete)
    assert found[0].tolist() == column
    assert (found[1] + level).tolist() == pytest.approx(left)
    none = torch.zeros(turns, dtype=torch.bool)
    kept = kept_steps(found[0], none, torch.arange(10, 10 + first))
    held = {10 + c: c for c in range(first)}
    for turn, slot in enumerate(kept.plan.tolist()):
        assert column[turn] == (first + turn if slot == -1 else held[slot])
        held |= {} if slot == -1 else {slot: first + turn}
    stands = {slot - 10: w - first for slot, w in held.items() if w >= first}
    assert dict(kept.stands_2R.T.tolist()) == stands


@FORMS
def test_simulate_breaks_ties_the_same_way_every_time(compete: bool) -> None:
    h_WW = (torch.ones(9, 9) / 2).fill_diagonal_(0)
    counts = h_WW[:5, :5].sum(dim=1), h_WW[5:, :5].sum(dim=1)
    found = [simulate(*counts, h_WW, compete)[0].tolist() for _ in range(3)]
    assert found[0] == found[1] == found[2] == [0, 1, 2, 3]
