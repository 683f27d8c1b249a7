"""The parts of the index: cells, moments, sums over near cells, their check and their state."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from memory.duel.approximate import ApproximateCounts
from memory.duel.cells_check import check
from memory.duel.cells_counts import CellCounts
from memory.duel.cells_grid import Grid
from memory.duel.cells_moments import CellMoments
from memory.scores import Gaussian, Quadratic, Score, VonMisesFisher
from tests.naive_index import (
    filled,
    mean_by_sampling,
    near_sums,
    offer,
    stream,
)


@pytest.mark.parametrize("seed", range(3))
def test_near_sums_match_the_naive_twin(seed: int) -> None:
    rng = np.random.default_rng(seed)
    columns = filled(stream(rng, "duplicates", 300, dim=8), dtype=torch.float64)
    score = VonMisesFisher(0.2)
    counts = CellCounts(columns, score, cells=9, near=3, seed=seed)
    for _ in range(4):
        slots = rng.choice(300, size=40, replace=False)
        before_ND = columns.embeddings[slots].numpy().copy()
        columns.embeddings[slots] = stream(rng, "uniform", 40, dim=8)
        counts.replace(slots, before_ND, columns.embeddings[slots].numpy())
        assert check(counts) == (True, "")
    counts.flush()
    near = [{c for c in row if c >= 0} for row in counts.grid.near_CM.tolist()]
    expected = near_sums(score, columns.embeddings, counts.grid.cell_K.tolist(), near)
    assert counts.near_K == pytest.approx(expected, abs=1e-9)
    assert check(counts) == (True, "")


@pytest.mark.parametrize("score", [VonMisesFisher(0.1), Gaussian(), Quadratic()], ids=repr)
def test_a_lump_is_the_mean_over_a_normal_cosine(score: Score) -> None:
    """A cell 0.05 wide along its axis, seen from the axis and from aside."""
    mean, along, dim = 0.8, 0.05, 65
    axis_CD = torch.eye(dim)[:1]
    grid = Grid(axis_CD, capacity=10, cells=1, near=1, seed=0)
    grid.size_C, grid.sum_CD = np.array([10.0]), 10 * mean * axis_CD.numpy().astype(np.float64)
    grid.along_C = np.array([10 * (mean**2 + along**2)])
    across = ((1 - mean**2 - along**2) / (dim - 1)) ** 0.5
    z_ND = np.zeros((2, dim))
    z_ND[:, :2] = [[1.0, 0.0], [0.6, 0.8]]
    far_N, near_N = CellMoments(score, grid, torch.float64).fields(
        z_ND, np.full((2, 1), -1, np.int16)
    )
    assert near_N.tolist() == [0, 0]
    for z_D, found in zip(z_ND, far_N.tolist(), strict=True):
        wide = ((along * z_D[0]) ** 2 + (across * z_D[1]) ** 2) ** 0.5
        expected = 10 * mean_by_sampling(score, mean * float(z_D[0]), wide)
        assert found == pytest.approx(expected, rel=2e-3)


def test_a_wrong_count_is_found() -> None:
    columns = filled(stream(np.random.default_rng(12), "ranked", 800))
    tally = ApproximateCounts(columns, VonMisesFisher(0.1))
    counts = tally.counts_by_cell
    counts.near_K += 1.0
    held, reason = tally.check()
    assert not held
    assert "rows of near cells" in reason
    counts.near_K -= 1.0
    counts.far_K *= 3.0
    assert "are off by" in tally.check()[1]
    counts.far_K /= 3.0
    counts.grid.size_C[3] += 1
    assert "cell 3 holds" in tally.check()[1]


@pytest.mark.parametrize("offered", [0, 100, 700])
def test_a_state_goes_on_bit_equal(offered: int) -> None:
    rng = np.random.default_rng(8)
    columns = filled(stream(rng, "ranked", 1500))
    score = VonMisesFisher(0.1)
    tally = ApproximateCounts(columns, score)
    offer(tally, columns, stream(rng, "ranked", offered).to(torch.float32))
    slots = torch.from_numpy(rng.choice(1500, size=offered // 10, replace=False))
    before_RD = columns.embeddings[slots]
    columns.embeddings[slots] = stream(rng, "uniform", len(slots)).to(torch.float32)
    tally.on_update(slots, before_RD)
    state = tally.state()
    copy = filled(columns.embeddings)
    again = ApproximateCounts(copy, score)
    again.load(state)
    assert set(again.state()) == set(state)
    assert all(torch.equal(again.state()[name], value) for name, value in state.items())
    for _ in range(4):
        x_BD = stream(rng, "ranked", 300).to(torch.float32)
        assert offer(tally, columns, x_BD) == offer(again, copy, x_BD)
        assert torch.equal(tally.counts(), again.counts())


def test_a_state_of_another_dtype_is_counted_anew() -> None:
    columns = filled(stream(np.random.default_rng(9), "ranked", 500))
    tally = ApproximateCounts(columns, VonMisesFisher(0.1))
    tally.recount()
    wide = ApproximateCounts(filled(columns.embeddings, dtype=torch.float64), VonMisesFisher(0.1))
    wide.load(tally.state())
    assert torch.allclose(wide.counts(), tally.counts(), rtol=1e-3)


def test_cells_are_fitted_anew_when_the_rows_have_moved() -> None:
    rng = np.random.default_rng(11)
    columns = filled(stream(rng, "one class", 1200))
    tally = ApproximateCounts(columns, VonMisesFisher(0.1))
    first = tally.counts_by_cell
    for _ in range(6):
        offer(tally, columns, stream(rng, "uniform", 256).to(torch.float32))
    assert tally.counts_by_cell is not first
    assert tally.check() == (True, "")
    assert tally.error(500).mean < 0.1
