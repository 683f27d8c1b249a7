"""Approximate counts: near the exact ones, and near the exact evictions.

Shapes: B newcomers, D descriptor, K slots, N rows, R slots refreshed.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from memory import WorkingMemory
from memory.columns import Columns
from memory.duel.approximate import CROSSOVER, ApproximateCounts, CellMoments, pick
from memory.eviction import MostDuplicated
from memory.scores import Gaussian, Linear, Quadratic, Score, VonMisesFisher
from tests.naive import STREAMS, IncrementalDuel, unit_rows

DIM = 32
SHARP = VonMisesFisher(0.1)


def stream(rng: np.random.Generator, kind: str, count: int, dim: int = DIM) -> Tensor:
    """`unit_rows`, or 20 clusters whose sizes fall as 1/rank, the same in every call; float32."""
    if kind != "ranked":
        return unit_rows(rng, kind, count, dim).to(torch.float32)
    centre_CD = unit_rows(np.random.default_rng(99), "uniform", 20, dim)
    share = 1 / np.arange(1, 21)
    chosen_N = rng.choice(20, size=count, p=share / share.sum())
    noise_ND = torch.from_numpy(rng.standard_normal((count, dim)))
    z_ND = centre_CD[chosen_N] + 0.6 / dim**0.5 * noise_ND
    return torch.nn.functional.normalize(z_ND, dim=1).to(torch.float32)


def filled(z_KD: Tensor, capacity: int | None = None) -> Columns:
    columns = Columns(capacity or len(z_KD), z_KD.shape[1], dtype=z_KD.dtype)
    columns.embeddings[: len(z_KD)], columns.occupied = z_KD, len(z_KD)
    return columns


def offer(counts: ApproximateCounts, columns: Columns, x_BD: Tensor) -> list[int]:
    """Add newcomers the way the memory does. The plan."""
    plan: list[int] = []
    while len(x_BD):
        step = counts.choose(x_BD).tolist()
        assert 1 <= len(step) <= len(x_BD)
        for slot, x_D in zip(step, x_BD, strict=False):
            if slot >= 0:
                columns.embeddings[slot] = x_D
        plan += step
        x_BD = x_BD[len(step) :]
    return plan


def refresh(counts: ApproximateCounts, columns: Columns, slots: Tensor, z_RD: Tensor) -> None:
    before_RD = columns.embeddings[slots]
    columns.embeddings[slots] = z_RD
    counts.on_update(slots, before_RD)


def regrets(score: Score, z_KD: Tensor, plan: list[int], x_BD: Tensor) -> list[float]:
    """(largest - evicted's) / largest exact count at each step."""
    naive, found = IncrementalDuel(score, z_KD), []
    for slot, x_D in zip(plan, x_BD, strict=True):
        found.append(naive.regret(slot, x_D) / float(naive.judged(x_D).max()))
        naive.step(x_D, slot)
    return found


def exact(score: Score, columns: Columns) -> Tensor:
    return IncrementalDuel(score, columns.z_kD).count_K


@pytest.mark.parametrize(("capacity", "batches"), [(4096, 4), (4096, 40), (16_384, 4)])
def test_regret_stays_below_two_percent(capacity: int, batches: int) -> None:
    rng = np.random.default_rng(0)
    columns = filled(stream(rng, "ranked", capacity))
    counts = ApproximateCounts(columns, SHARP)
    for _ in range(batches):
        offer(counts, columns, stream(rng, "ranked", 256))
    before_KD, x_BD = columns.embeddings.clone(), stream(rng, "ranked", 128)
    found = regrets(SHARP, before_KD, offer(counts, columns, x_BD), x_BD)
    assert len(found) == 128
    assert np.mean(found) <= 0.02


@pytest.mark.parametrize("score", [SHARP, Gaussian(), Quadratic(), Linear()], ids=repr)
@pytest.mark.parametrize("kind", ["ranked", *STREAMS])
def test_counts_lie_within_the_stated_error(score: Score, kind: str) -> None:
    rng = np.random.default_rng(1)
    columns = filled(stream(rng, kind, 1500))
    counts = ApproximateCounts(columns, score)
    offer(counts, columns, stream(rng, kind, 700))
    exact_K = exact(score, columns)
    off_K = (counts.counts() - exact_K).abs() / exact_K.clamp(min=1)
    error = counts.error(sample=1500)
    assert error.sampled == 1500
    assert error.mean == pytest.approx(float(off_K.mean()), abs=1e-4)
    assert error.worst == pytest.approx(float(off_K.max()), abs=1e-3)
    assert error.mean < 0.08
    assert counts.check() == (True, "")


def test_more_near_cells_are_more_exact() -> None:
    columns = filled(stream(np.random.default_rng(2), "ranked", 2000, dim=16))
    score = VonMisesFisher(0.03)
    errors = [ApproximateCounts(columns, score, near=n).error(2000).mean for n in (1, 4, 16)]
    assert errors[0] > errors[1] > errors[2]


def test_all_cells_near_are_exact() -> None:
    """Counted row by row, when built and when recounted."""
    rng, score = np.random.default_rng(3), VonMisesFisher(0.05)
    columns = filled(stream(rng, "clustered", 600).double())
    counts = ApproximateCounts(columns, score, cells=12, near=12)
    assert torch.allclose(counts.counts(), exact(score, columns), rtol=1e-12)
    offer(counts, columns, stream(rng, "clustered", 100).double())
    by_cell = counts.by_cell()
    by_cell.changes = 600
    by_cell.flush()
    assert torch.allclose(counts.counts(), exact(score, columns), rtol=1e-9)


@pytest.mark.parametrize("score", [SHARP, Gaussian(), Quadratic()], ids=repr)
def test_moments_give_the_mean_over_a_normal_cosine(score: Score) -> None:
    """A cell 0.05 wide along its centre, seen from the centre and from aside."""
    mean, along, dim = 0.8, 0.05, 65
    moments = CellMoments(score, np.eye(1, dim), torch.float64)
    moments.size_C, moments.sum_CA = np.array([10.0]), 10 * mean * np.eye(1, dim)
    moments.along_C = np.array([10 * (mean**2 + along**2)])
    across = ((1 - mean**2 - along**2) / (dim - 1)) ** 0.5
    z_ND = np.zeros((2, dim))
    z_ND[:, :2] = [[1.0, 0.0], [0.6, 0.8]]
    step_S = np.linspace(-6, 6, 4001)
    weight_S = np.exp(-(step_S**2) / 2)
    for z_D, found in zip(z_ND, moments.kernel(z_ND).total(), strict=True):
        wide = ((along * z_D[0]) ** 2 + (across * z_D[1]) ** 2) ** 0.5
        h_S = score(torch.from_numpy(mean * z_D[0] + wide * step_S)).numpy()
        assert found == pytest.approx(10 * (weight_S * h_S).sum() / weight_S.sum(), rel=2e-3)


@pytest.mark.parametrize("batch", [1, 7, 256, 1000])
def test_any_batch_size_places_everyone(batch: int) -> None:
    rng = np.random.default_rng(4)
    columns = filled(stream(rng, "ranked", 900))
    counts = ApproximateCounts(columns, SHARP)
    x_ND = stream(rng, "ranked", batch)
    plan = offer(counts, columns, x_ND)
    assert len(plan) == batch
    assert 0 <= min(plan) <= max(plan) < 900
    for slot, turn in {slot: turn for turn, slot in enumerate(plan)}.items():
        assert torch.equal(columns.embeddings[slot], x_ND[turn])
    assert counts.check() == (True, "")


def test_competing_newcomers_may_be_refused() -> None:
    """One class fills the memory: one more of it is refused where it counts most itself."""
    rng, score = np.random.default_rng(5), VonMisesFisher(0.3)
    columns = filled(stream(rng, "uniform", 400).double())
    counts = ApproximateCounts(columns, score, near=40, compete=True)
    centre_D = columns.embeddings[:200].mean(dim=0)
    crowd_BD = torch.nn.functional.normalize(centre_D.repeat(3, 1), dim=1)
    before = float(exact(score, columns).sum())
    assert offer(counts, columns, crowd_BD) == [-1, -1, -1]
    assert offer(counts, columns, stream(rng, "uniform", 64).double()).count(-1) < 64
    assert float(exact(score, columns).sum()) < before
    assert counts.check() == (True, "")


def test_refreshed_rows_are_followed() -> None:
    rng = np.random.default_rng(6)
    columns = filled(stream(rng, "ranked", 3000))
    counts = ApproximateCounts(columns, SHARP)
    offer(counts, columns, stream(rng, "ranked", 200))
    for _ in range(5):
        slots = torch.from_numpy(rng.choice(3000, size=300, replace=False))
        refresh(counts, columns, slots, stream(rng, "ranked", 300))
        assert counts.check() == (True, "")
    assert counts.error(1000).mean < 0.02
    before_KD, x_BD = columns.embeddings.clone(), stream(rng, "ranked", 100)
    assert np.mean(regrets(SHARP, before_KD, offer(counts, columns, x_BD), x_BD)) < 0.02


def test_a_filling_memory_is_counted_too() -> None:
    rng = np.random.default_rng(7)
    columns = filled(stream(rng, "ranked", 400), capacity=2000)
    counts = ApproximateCounts(columns, SHARP)
    assert len(counts.counts()) == 400
    for _ in range(8):
        x_BD = stream(rng, "ranked", 200)
        columns.embeddings[columns.occupied : columns.occupied + 200] = x_BD
        columns.occupied += 200
        counts.on_insert(x_BD)
        assert counts.check() == (True, "")
    exact_K = exact(SHARP, columns)
    assert float(((counts.counts() - exact_K).abs() / exact_K).mean()) < 0.04
    x_BD = stream(rng, "ranked", 50)
    assert torch.allclose(counts.total(x_BD), SHARP.total(x_BD, columns.z_kD), rtol=0.1)


def test_an_empty_memory_has_no_counts() -> None:
    counts = ApproximateCounts(filled(torch.zeros(0, DIM), capacity=10), SHARP)
    assert len(counts.counts()) == 0
    assert counts.total(torch.eye(DIM)[:3]).tolist() == [0, 0, 0]
    assert counts.error().sampled == 0
    assert counts.check() == (True, "")


def test_what_is_wrong_is_found() -> None:
    columns = filled(stream(np.random.default_rng(12), "ranked", 800))
    counts = ApproximateCounts(columns, SHARP)
    counts.choose(columns.embeddings[:1])
    by_cell = counts.by_cell()
    by_cell.count_K *= 3.0
    assert "are off by" in counts.check()[1]
    columns.embeddings[7] = -columns.embeddings[7]
    assert "slot 7: the index holds another row" in counts.check()[1]
    by_cell.moments.size_C[3] += 1
    assert "cell 3 holds" in counts.check()[1]


@pytest.mark.parametrize("offered", [0, 100, 700])
def test_a_state_goes_on_bit_equal(offered: int) -> None:
    rng = np.random.default_rng(8)
    columns = filled(stream(rng, "ranked", 1500))
    counts = ApproximateCounts(columns, SHARP)
    offer(counts, columns, stream(rng, "ranked", offered))
    slots = torch.from_numpy(rng.choice(1500, size=offered // 10, replace=False))
    refresh(counts, columns, slots, stream(rng, "uniform", len(slots)))
    state = counts.state()
    copy = filled(columns.embeddings.clone())
    again = ApproximateCounts(copy, SHARP)
    assert set(again.state()) == set(state)
    again.load(state)
    assert all(torch.equal(again.state()[name], value) for name, value in state.items())
    for _ in range(4):
        x_BD = stream(rng, "ranked", 300)
        assert offer(counts, columns, x_BD) == offer(again, copy, x_BD)
        assert torch.equal(counts.counts(), again.counts())
    wide = ApproximateCounts(filled(copy.embeddings.double()), SHARP)  # of another dtype: anew
    wide.load(counts.state())
    assert torch.allclose(wide.counts(), counts.counts(), rtol=2e-2)


def test_the_same_seed_evicts_the_same() -> None:
    plans = []
    for _ in range(2):
        rng = np.random.default_rng(10)
        columns = filled(stream(rng, "ranked", 2000))
        counts = ApproximateCounts(columns, SHARP, seed=3)
        plans.append(offer(counts, columns, stream(rng, "ranked", 600)))
    assert plans[0] == plans[1]


def test_cells_are_fitted_again_when_the_rows_have_moved() -> None:
    rng = np.random.default_rng(11)
    columns = filled(stream(rng, "one class", 1200))
    counts = ApproximateCounts(columns, SHARP)
    first = counts.by_cell()
    for _ in range(6):
        offer(counts, columns, stream(rng, "uniform", 256))
    assert counts.by_cell() is not first
    assert counts.check() == (True, "")
    assert counts.error(500).mean < 0.1


@pytest.mark.parametrize(("cells", "near"), [(0, 1), (5, 0), (100_000, 1)])
def test_arguments_have_limits(cells: int, near: int) -> None:
    with pytest.raises(ValueError, match=f"{cells} cells, {near} near"):
        ApproximateCounts(filled(torch.eye(4)), SHARP, cells=cells, near=near)


def test_the_faster_way_is_picked() -> None:
    cpu = torch.device("cpu")
    assert pick(CROSSOVER, SHARP, cpu) == "ivf"
    assert pick(CROSSOVER - 1, SHARP, cpu) == "exact"
    assert pick(1 << 20, Linear(), cpu) == "exact"
    assert pick(1 << 20, SHARP, torch.device("cuda")) == "exact"


@pytest.mark.parametrize("compete", [False, True])
def test_a_memory_keeps_it_up(compete: bool) -> None:
    """Filling, replacing, refreshing, saving and going on, through the memory itself."""
    rng = np.random.default_rng(13)

    def memory() -> WorkingMemory:
        return WorkingMemory(600, DIM, MostDuplicated(SHARP, compete=compete, index="ivf"))

    first, second, offered = memory(), memory(), 0
    for batch in (250, 300, 200, 1, 700, 64):
        first.add(torch.arange(offered, offered + batch), stream(rng, "ranked", batch))
        offered += batch
        slots = torch.from_numpy(rng.choice(len(first), size=20, replace=False))
        first.refresh(slots, stream(rng, "ranked", 20))
        assert first.check_valid() == (True, "")
    second.load_state_dict(first.state_dict())
    ids, z_BD = torch.arange(500) + offered, stream(rng, "ranked", 500)
    assert first.add(ids, z_BD).evicted.tolist() == second.add(ids, z_BD).evicted.tolist()
    assert torch.equal(first.embeddings, second.embeddings)
    assert first.check_valid() == (True, "")
