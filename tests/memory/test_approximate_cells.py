"""Tests of the cells of approximate counts: their errors, their upkeep and their state."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from table import table

from stream_ssl.memory import WorkingMemory
from stream_ssl.memory.duel.approximate import ApproximateCounts
from stream_ssl.memory.duel.cells import NOWHERE, Cells, without_
from stream_ssl.memory.eviction import MostDuplicated
from stream_ssl.memory.scores import Gaussian, Quadratic, Score, VonMisesFisher
from tests.naive_index import (
    exact_counts,
    filled,
    mean_by_sampling,
    offer,
    stream,
)


@table("crowd", [2048, 20])
def test_a_row_reads_its_own_cell_exactly_unless_the_cell_is_crowded(
    crowd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of the own cell are read exactly; all other cells contribute through moments."""
    monkeypatch.setattr("stream_ssl.memory.duel.cells.CROWD", crowd)
    monkeypatch.setattr("stream_ssl.memory.duel.cells.CROWDED", 1)
    rng, score = np.random.default_rng(1), VonMisesFisher(0.2)
    columns = filled(stream(rng, "duplicates", 300, dim=8), dtype=torch.float64)
    cells = Cells.fitted(columns, score, cells=9, seed=0)
    size_C = torch.bincount(cells.cell_K)
    cells.remove(torch.arange(0, 300, 7))
    x_NA = stream(rng, "uniform", 40, dim=8)
    own_N = cells.of(x_NA)
    assert torch.equal(own_N, (x_NA.float() @ cells.centre_CA.T).argmax(dim=1))
    mean_NC, parts = cells.see(x_NA, own_N).mean_NC, (cells.far, cells.near)
    found = zip(x_NA, mean_NC, own_N, *(part(x_NA, own_N).tolist() for part in parts), strict=True)
    for x_A, mean_C, own, far, near in found:
        slots = (cells.cell_K == own).nonzero()[:, 0]
        is_read = size_C[own] <= max(crowd, 300 / 9)
        others_C = mean_C * cells.size_C
        read = float(score(columns.embeddings[slots] @ x_A).sum())
        assert near == pytest.approx(read if is_read else 0.0, abs=1e-9)
        expected = float(others_C.sum() - others_C[own] if is_read else others_C.sum())
        assert far == pytest.approx(expected, abs=1e-9)


def test_counts_stay_close_when_a_cell_becomes_crowded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The contribution of near rows must be removed as it was added, or it is counted twice."""
    monkeypatch.setattr("stream_ssl.memory.duel.cells.CROWD", 40)
    rng, score = np.random.default_rng(3), VonMisesFisher(0.2)
    row_A = stream(rng, "uniform", 1, dim=8).float()

    def copies(count: int) -> torch.Tensor:
        shaken_NA = row_A + 0.05 * stream(rng, "uniform", count, dim=8).float()
        return torch.nn.functional.normalize(shaken_NA, dim=1)

    start_NA = torch.cat([copies(100), stream(rng, "uniform", 600, dim=8).float()])
    columns = filled(start_NA, capacity=1100)
    tally = ApproximateCounts(columns, score, cells=40)
    tally.recount()
    for _ in range(4):
        columns.embeddings[columns.occupied : columns.occupied + 100] = x_BA = copies(100)
        columns.occupied += 100
        tally.on_insert(x_BA)
        tally._draw_pool(tally._all)
        exact_K = exact_counts(score, columns.descriptor_kA)
        assert torch.allclose(tally.counts()[:100], exact_K[:100], rtol=0.05)


def test_without_sets_only_the_own_cell_of_each_row_to_zero() -> None:
    """A crowded cell, which is not read, must not take the place of another, such as cell 0."""
    value_NC = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]])
    expected = [[0.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 0.0]]
    assert without_(value_NC, torch.tensor([0, NOWHERE, 2])).tolist() == expected


def test_moves_within_a_cell_are_counted_exactly_and_others_approximately() -> None:
    rng, score = np.random.default_rng(4), VonMisesFisher(0.2)
    columns = filled(stream(rng, "duplicates", 300, dim=8), dtype=torch.float64)
    joined_NA, left_NA = stream(rng, "uniform", 40, dim=8), stream(rng, "uniform", 30, dim=8)
    h_KN = score(columns.embeddings @ torch.cat([joined_NA, left_NA]).T)
    h_KN[:, 40:] *= -1
    off = {}
    for number in (1, 5, 20):
        cells = Cells.fitted(columns, score, cells=number, seed=0)
        cells.remove(torch.tensor([5, 6]))
        row_NA = torch.cat([joined_NA, left_NA])
        cell_N, lines = cells.of(row_NA), cells.no_lines()
        sign_N = torch.ones(70, dtype=torch.float64)
        sign_N[40:] = -1
        lines.add(cells.see(joined_NA, cell_N[:40]), joined_NA, 1)
        lines.add(cells.see(left_NA, cell_N[40:]), left_NA, -1)
        far_K, near_K, near_N = cells.moved(lines, row_NA, cell_N, sign_N)
        assert far_K[[5, 6]].tolist() == near_K[[5, 6]].tolist() == [0, 0]
        assert torch.allclose(near_N, cells.near(row_NA, cell_N))
        within_KN = h_KN.where(cells.cell_K[:, None] == cell_N, 0.0)
        assert torch.allclose(near_K, within_KN.sum(dim=1), atol=1e-12)
        exact_K = (h_KN - within_KN).sum(dim=1)
        off[number] = float((far_K - exact_K)[7:].abs().mean())
        for cell in range(number):  # the mean over a cell needs no line
            slots = cells.slots(cell)
            own_N = cells.see(row_NA, cell_N).mean_NC[:, cell] * (cell_N == cell)
            found = float(far_K[slots].mean() + own_N @ sign_N)
            assert found == pytest.approx(float(lines.mean_C[cell]), abs=1e-9)
    assert off[1] < 1e-9 < off[5]
    assert max(off.values()) < 0.5 * float(h_KN.sum(dim=1).abs().mean())


@table("score", [VonMisesFisher(0.1), Gaussian(), Quadratic()], ids=repr)
def test_a_far_cell_contributes_the_mean_score_of_a_normal_cosine(score: Score) -> None:
    """Check a view along the cell's axis, where its rows spread, and a view from the side."""
    mean, along, dim = 0.8, 0.05, 65
    cells = Cells(filled(torch.zeros(10, dim), dtype=torch.float64), score, torch.eye(dim)[:1])
    cells.cell_K[:] = 0
    cells.sum_CA[0, 0], cells.square_C[0] = 10 * mean, 10 * (mean**2 + along**2)
    cells.changed()
    z_ND = torch.zeros(2, dim, dtype=torch.float64)
    z_ND[0, 0], z_ND[1, 0], z_ND[1, 1] = 1.0, 0.6, 0.8
    found_N = cells.see(z_ND, torch.tensor([0, 0])).mean_NC[:, 0]
    across = ((1 - mean**2 - along**2) / (dim - 1)) ** 0.5
    for z_D, found in zip(z_ND, found_N.tolist(), strict=True):
        wide = math.hypot(along * float(z_D[0]), across * float(z_D[1]))
        expected = mean_by_sampling(score, mean * float(z_D[0]), wide)
        assert found == pytest.approx(expected, rel=2e-3)


def test_check_finds_wrong_counts_and_a_wrong_sum_of_a_cell() -> None:
    columns = filled(stream(np.random.default_rng(12), "ranked", 800))
    tally = ApproximateCounts(columns, VonMisesFisher(0.1))
    tally.recount()
    counts = tally._all
    counts.far_K, counts.near_K = 3 * counts.far_K, 3 * counts.near_K
    assert "are off by" in tally.check()[1]
    counts.far_K, counts.near_K = counts.far_K / 3, counts.near_K / 3
    assert tally.check() == (True, "")
    tally._all.cells.sum_CA[3] += 0.1
    assert "cell 3: the sum of its rows is off by 0.1" in tally.check()[1]


def test_reading_counts_changes_no_eviction() -> None:
    """Looking at the status page must not change which samples are evicted."""
    rng = np.random.default_rng(14)
    columns = filled(stream(rng, "ranked", 1500))
    score = VonMisesFisher(0.1)
    watched, alone = (
        ApproximateCounts(columns, score),
        ApproximateCounts(filled(columns.embeddings), score),
    )
    for _ in range(6):
        x_BD = stream(rng, "ranked", 120).to(torch.float32)
        watched.counts(), watched.total(x_BD), watched.check(), watched.state()
        assert offer(watched, watched._columns, x_BD) == offer(alone, alone._columns, x_BD)


@pytest.mark.parametrize("offered", [0, 100, 700])
def test_a_loaded_state_continues_bit_equal(offered: int) -> None:
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


def test_counts_are_computed_anew_from_a_state_of_another_dtype() -> None:
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
    tally.recount()
    first = tally._all.cells
    for _ in range(6):
        offer(tally, columns, stream(rng, "uniform", 256).to(torch.float32))
    assert tally._all.cells is not first
    assert tally.check() == (True, "")
    assert tally.error(500).mean < 0.1


def test_counts_are_computed_anew_from_a_state_of_an_earlier_version() -> None:
    columns = filled(stream(np.random.default_rng(15), "ranked", 800))
    tally = ApproximateCounts(columns, VonMisesFisher(0.1))
    tally.recount()
    state = tally.state()
    del state["search.squares"]
    again = ApproximateCounts(filled(columns.embeddings), VonMisesFisher(0.1))
    again.load(state)
    assert torch.equal(again.counts(), tally.counts())
    assert len(offer(again, again._columns, columns.embeddings[:5])) == 5


def test_counts_are_computed_anew_from_a_damaged_state() -> None:
    columns = filled(stream(np.random.default_rng(17), "ranked", 600))
    tally = ApproximateCounts(columns, VonMisesFisher(0.1))
    tally.recount()
    for name, value in tally.state().items():
        if len(value):  # nothing has moved yet
            again = ApproximateCounts(filled(columns.embeddings), VonMisesFisher(0.1))
            again.load(tally.state() | {name: value[:-1]})
            assert torch.equal(again.counts(), tally.counts()), name


def test_approximate_counts_evict_copies_about_as_well_as_exact_counts() -> None:
    """95 % of the rows show one of 8 scenes, as from a parked robot."""
    left = {}
    for index in ("exact", "ivf"):
        rng = np.random.default_rng(18)
        scene_SA = stream(rng, "uniform", 8, dim=64)
        eviction = MostDuplicated(VonMisesFisher(0.1), index=index)
        memory = WorkingMemory(512, 64, eviction)
        for batch in range(80):  # 2 K distinct rows
            shown_B = torch.from_numpy(rng.integers(8, size=256))
            noise_BA = 0.1 / 8 * torch.from_numpy(rng.standard_normal((256, 64)))
            x_BA = torch.nn.functional.normalize(scene_SA[shown_B] + noise_BA, dim=1)
            distinct_B = torch.from_numpy(rng.random(256) < 0.05)
            x_BA[distinct_B] = stream(rng, "uniform", 256, dim=64)[distinct_B]
            labels = torch.where(distinct_B, -1, shown_B)
            memory.add(torch.arange(256) + 256 * batch, x_BA.float(), labels=labels)
        left[index] = int((memory.labels >= 0).sum())
    assert left["exact"] <= 10
    assert left["ivf"] <= 10  # 2 % of the slots


def test_copies_of_one_scene_are_evicted_although_their_cell_is_crowded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("stream_ssl.memory.duel.cells.CROWD", 32)
    rng, shown_A = np.random.default_rng(19), torch.eye(64)[0]
    memory = WorkingMemory(512, 64, MostDuplicated(VonMisesFisher(0.1), index="ivf"))
    for batch in range(60):
        x_BA = stream(rng, "uniform", 256, dim=64).float()
        is_shown_B = torch.from_numpy(rng.random(256) < 0.95)
        x_BA[is_shown_B] = shown_A
        memory.add(torch.arange(256) + 256 * batch, x_BA, labels=is_shown_B.long())
    assert int(memory.labels.sum()) <= 5  # 1 % of the slots
    assert memory.check_valid() == (True, "")


def test_rows_that_repeat_exactly_cause_no_new_fit_of_the_cells() -> None:
    """Their distance from their cell's mean is only rounding, and must not trigger a new fit."""
    rng = np.random.default_rng(20)
    scene_SA = stream(rng, "uniform", 16).float()
    columns = filled(scene_SA[torch.from_numpy(rng.integers(16, size=1500))])
    tally = ApproximateCounts(columns, VonMisesFisher(0.1))
    tally.recount()
    first = tally._all.cells
    for _ in range(8):
        offer(tally, columns, scene_SA[torch.from_numpy(rng.integers(16, size=256))])
    assert tally._all.cells is first


def test_evictions_lower_the_sum_of_counts_of_evenly_spread_rows() -> None:
    """If all counts are nearly equal, errors must not decide, or the sum of counts would rise."""
    rng, score = np.random.default_rng(16), VonMisesFisher(0.1)
    columns = filled(stream(rng, "uniform", 2500, dim=8))
    before = float(exact_counts(score, columns.embeddings).sum())
    tally = ApproximateCounts(columns, score)
    for _ in range(20):
        offer(tally, columns, stream(rng, "uniform", 128, dim=8).to(torch.float32))
    assert float(exact_counts(score, columns.embeddings).sum()) < 0.99 * before
