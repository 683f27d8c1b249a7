"""Spherical k-means: faiss and its twin are as good, and what both promise."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from memory.by_faiss import HAVE_FAISS, centres_by_faiss
from memory.clusters import cells_of, centres_by_torch, kmeans
from tests.naive import unit_rows


def fit(z_ND: Tensor, centre_CD: Tensor) -> float:
    """Mean cosine of the rows with their nearest centre."""
    return float((z_ND @ centre_CD.T).max(dim=1).values.mean())


def rows(kind: str, count: int, dim: int = 12, seed: int = 0) -> Tensor:
    return unit_rows(np.random.default_rng(seed), kind, count, dim).to(torch.float32)


@pytest.mark.skipif(not HAVE_FAISS, reason="faiss is an optional dependency")
@pytest.mark.parametrize("kind", ["clustered", "uniform", "duplicates"])
def test_faiss_and_torch_fit_as_well(kind: str) -> None:
    z_ND = rows(kind, 800)
    by_faiss = centres_by_faiss(z_ND, 16, seed=1, rounds=10)
    by_torch = centres_by_torch(z_ND, 16, seed=1, rounds=10)
    assert fit(z_ND, by_torch) == pytest.approx(fit(z_ND, by_faiss), abs=0.03)
    for centre_CD in (by_faiss, by_torch):
        assert torch.allclose(torch.linalg.vector_norm(centre_CD, dim=1), torch.ones(16))
        assert fit(z_ND, centre_CD) > fit(z_ND, rows("uniform", 16, seed=9)) + 0.03


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_same_seed_gives_the_same_cells(dtype: torch.dtype) -> None:
    z_ND = rows("clustered", 300).to(dtype)
    centre_CD, cell_N = kmeans(z_ND, cells=7, seed=5)
    again_CD, cell_again_N = kmeans(z_ND, cells=7, seed=5)
    assert torch.equal(centre_CD, again_CD)
    assert torch.equal(cell_N, cell_again_N)
    assert (centre_CD.dtype, cell_N.dtype) == (torch.float32, torch.int64)
    assert not torch.equal(centre_CD, kmeans(z_ND, cells=7, seed=6)[0])


def test_every_row_is_in_its_nearest_cell() -> None:
    z_ND = rows("uniform", 200)
    centre_CD, cell_N = kmeans(z_ND, cells=9, seed=0, trained=10)
    cosine_NC = z_ND @ centre_CD.T
    chosen_N = cosine_NC.gather(1, cell_N[:, None])[:, 0]
    assert torch.allclose(chosen_N, cosine_NC.max(dim=1).values, atol=1e-6)
    assert torch.equal(cell_N, cells_of(z_ND, centre_CD))


@pytest.mark.parametrize("kind", ["clustered", "uniform", "one class"])
def test_no_cell_of_the_twin_stays_empty(kind: str) -> None:
    z_ND = rows(kind, 400)
    cell_N = cells_of(z_ND, centres_by_torch(z_ND, 40, seed=3, rounds=10))
    assert int(torch.bincount(cell_N, minlength=40).min()) > 0


def test_separate_groups_are_found() -> None:
    z_ND = torch.eye(5)[torch.arange(50) % 5]
    for find in (kmeans, lambda z, cells, seed: (centres_by_torch(z, cells, seed, 10), None)):
        centre_CD, _ = find(z_ND, 5, 0)
        # A local optimum may hold two groups in one cell, never fewer than four cells apart.
        assert len(torch.unique(cells_of(torch.eye(5), centre_CD))) >= 4


def test_fewer_rows_than_cells_give_as_many_cells_as_rows() -> None:
    centre_CD, cell_N = kmeans(torch.eye(3), cells=8, seed=0)
    assert centre_CD.shape == (3, 3)
    assert sorted(cell_N.tolist()) == [0, 1, 2]


def test_rows_that_cancel_out_leave_no_dead_centre() -> None:
    z_ND = torch.cat([torch.eye(2), -torch.eye(2)])
    centre_CD = centres_by_torch(z_ND, 1, seed=0, rounds=3)
    assert torch.allclose(torch.linalg.vector_norm(centre_CD, dim=1), torch.ones(1))


@pytest.mark.parametrize(
    ("count", "cells", "rounds", "named"),
    [(0, 2, 1, "number of rows"), (3, 0, 1, "cells"), (3, 2, 0, "rounds")],
)
def test_errors_name_the_numbers(count: int, cells: int, rounds: int, named: str) -> None:
    with pytest.raises(ValueError, match=f"{named} is 0: must be at least 1"):
        kmeans(torch.eye(3)[:count], cells, seed=0, rounds=rounds)
