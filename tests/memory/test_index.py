"""Tests of every search against naive searches: a sorted matrix, all pairs, a dict of rows."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from table import table
from torch import Tensor

from stream_ssl.memory import index as module
from stream_ssl.memory.index import cells_of, kmeans, load_faiss, nearest, top, write_flat
from tests.naive import unit_rows

KINDS = ("uniform", "clustered", "duplicates")
BY_TORCH = pytest.param(False, id="torch")
BOTH = [
    BY_TORCH,
    pytest.param(
        True, id="faiss", marks=pytest.mark.skipif(not module.HAVE_FAISS, reason="no faiss")
    ),
]
NAN = torch.tensor([[1.0, 0.0, 0.0], [float("nan"), 0.0, 0.0]])


@pytest.fixture(params=BOTH)
def faiss(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Return whether faiss is used where possible."""
    monkeypatch.setattr(module, "HAVE_FAISS", request.param)
    return bool(request.param)


def rows(kind: str, count: int, dim: int = 16, seed: int = 0) -> Tensor:
    return unit_rows(np.random.default_rng(seed), kind, count, dim).to(torch.float32)


@table("kind", KINDS)
@table(("queries", "count", "k"), [(1, 500, 10), (8, 3, 7), (40, 500, 500)])
def test_the_nearest_rows_equal_those_of_a_sorted_matrix(
    queries: int, count: int, k: int, kind: str, faiss: bool
) -> None:
    row_KD, z_BD = rows(kind, count), rows("uniform", queries, seed=1)
    cosine, row = nearest(z_BD, row_KD, np.int64(k))  # type: ignore[arg-type]
    ordered = torch.sort(z_BD @ row_KD.T, dim=1, descending=True).values[:, :k]
    assert (cosine.shape, row.dtype) == ((queries, min(k, count)), torch.int64)
    assert torch.allclose(cosine, ordered, atol=1e-6)
    # Two rows that are equally near within rounding may come in either order.
    assert torch.allclose((z_BD @ row_KD.T).gather(1, row), ordered, atol=1e-6)


def test_many_queries_find_their_nearest_rows(faiss: bool) -> None:
    row_KD, z_BD = rows("uniform", 60), rows("uniform", module.NEAREST_MANY, seed=1)
    assert torch.equal(nearest(z_BD, row_KD, 1)[1][:, 0], (z_BD @ row_KD.T).argmax(dim=1))
    assert [len(found) for found in nearest(z_BD[:0], row_KD, 2)] == [0, 0]


def test_queries_in_blocks_find_the_nearest_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK_ELEMENTS", 64)
    row_KD, z_BD = rows("uniform", 50).double(), rows("uniform", 9, seed=1).double()
    cosine, row = nearest(z_BD, row_KD, k=50)
    ordered = torch.sort(z_BD @ row_KD.T, dim=1, descending=True)
    assert torch.allclose(cosine, ordered.values)
    assert torch.equal(row, ordered.indices)


@table("dtype", [torch.float32, torch.float64])
@table("n", [1, 64, 700, 900])
def test_top_returns_the_rows_with_the_largest_products(
    n: int, dtype: torch.dtype, faiss: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PRODUCT_ROWS", 1)
    row_KD = rows("uniform", 700).to(dtype)
    query_D = 30 * row_KD[:100].sum(dim=0)
    value, row = top(query_D, row_KD, n)
    ordered = torch.sort(row_KD @ query_D, descending=True).values[:n]
    assert len(row.unique()) == len(row) == min(n, 700)
    assert torch.allclose(value.sort(descending=True).values, ordered)
    assert torch.allclose(value, (row_KD @ query_D)[row])


@table("query_D", [torch.ones(7), torch.ones(99), torch.ones(48).double(), torch.ones(1, 48)])
def test_top_rejects_a_query_of_another_shape_or_dtype(query_D: Tensor, faiss: bool) -> None:
    with pytest.raises(ValueError, match="one dtype"):
        top(query_D, torch.ones(module.PRODUCT_ROWS, 48), 3)


def fit(z_ND: Tensor, centre_CD: Tensor) -> float:
    """Return the mean cosine of the rows with their nearest centre."""
    return float((z_ND @ centre_CD.T).max(dim=1).values.mean())


@table("kind", KINDS)
def test_kmeans_fits_about_as_well_as_plain_rounds(kind: str, faiss: bool) -> None:
    z_ND = rows(kind, 800, dim=12)
    centre_CD, cell_N = kmeans(z_ND, 16, seed=1)
    plain_CD = z_ND[torch.randperm(800, generator=torch.Generator().manual_seed(0))[:16]]
    for _ in range(10):
        nearest_N = (z_ND @ plain_CD.T).argmax(dim=1)
        sums = [z_ND[nearest_N == cell].sum(dim=0) for cell in range(16)]
        plain_CD = torch.nn.functional.normalize(torch.stack(sums), dim=1)
    assert fit(z_ND, centre_CD) > fit(z_ND, plain_CD) - 0.03
    assert torch.allclose(torch.linalg.vector_norm(centre_CD, dim=1), torch.ones(16))
    assert torch.equal(cell_N, cells_of(z_ND, centre_CD))
    chosen_N = (z_ND @ centre_CD.T).gather(1, cell_N[:, None])[:, 0]
    assert torch.allclose(chosen_N, (z_ND @ centre_CD.T).max(dim=1).values, atol=1e-6)


@table("dtype", [torch.float32, torch.float64])
def test_the_same_seed_gives_the_same_cells(dtype: torch.dtype, faiss: bool) -> None:
    z_ND = rows("clustered", 300).to(dtype)
    first, second = (kmeans(z_ND, cells=7, seed=5, trained=20) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert (first[0].dtype, first[1].dtype) == (torch.float32, torch.int64)
    assert not torch.equal(first[0], kmeans(z_ND, cells=7, seed=6, trained=20)[0])
    large = [kmeans(z_ND, cells=7, seed=2**63 - 1 - less, trained=20)[0] for less in (0, 0, 1)]
    assert torch.equal(large[0], large[1])
    assert not torch.equal(large[0], large[2])


@table("kind", ["clustered", "uniform", "one class"])
def test_no_cell_stays_empty(kind: str, faiss: bool) -> None:
    _, cell_N = kmeans(rows(kind, 400), 40, seed=3)
    assert int(torch.bincount(cell_N, minlength=40).min()) > 0


def test_few_rows_and_rows_that_cancel_out_have_centres(faiss: bool) -> None:
    centre_CD, cell_N = kmeans(torch.eye(3), cells=8, seed=0)
    assert centre_CD.shape == (3, 3)
    assert sorted(cell_N.tolist()) == [0, 1, 2]
    opposite_CD, _ = kmeans(torch.cat([torch.eye(2), -torch.eye(2)]), 1, seed=0)
    assert torch.allclose(torch.linalg.vector_norm(opposite_CD, dim=1), torch.ones(1))


@table(
    ("call", "message"),
    [
        (lambda: nearest(NAN, torch.eye(3), 1), "query row 1 is not finite: leave it out"),
        (lambda: nearest(torch.eye(3), torch.eye(3), 0), "k is 0: must be at least 1"),
        (lambda: nearest(torch.eye(3), torch.eye(3), 1.5), "k is 1.5"),  # type: ignore[arg-type]
        (lambda: nearest(torch.eye(3)[0], torch.eye(3), 1), r"must be \[B, D\] and \[K, D\]"),
        (lambda: nearest(torch.eye(4), torch.eye(3), 1), r"queries are \(4, 4\) .*rows \(3, 3\)"),
        (lambda: nearest(torch.eye(3).double(), torch.eye(3), 1), "of one dtype and device"),
        (lambda: nearest(np.eye(3), torch.eye(3), 1), "queries are ndarray, rows Tensor"),  # type: ignore[arg-type]
        (lambda: nearest(torch.eye(3), torch.eye(3)[:0], 1), "rows searched is 0"),
        (lambda: top(torch.ones(3), torch.eye(3), 0), "n is 0: must be at least 1"),
        (lambda: kmeans(torch.eye(3), 2.5, 0), "cells is 2.5"),  # type: ignore[arg-type]
        (lambda: kmeans(torch.eye(3), 0, 0), "cells is 0: must be at least 1"),
        (lambda: kmeans(torch.eye(3), 2, 0, rounds=0), "rounds is 0"),
        (lambda: kmeans(torch.eye(3)[:0], 2, 0), "number of rows is 0"),
    ],
    ids=range(13),
)
def test_errors_name_the_value_the_rule_and_the_remedy(
    call: Callable[[], Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.skipif(not module.HAVE_FAISS, reason="no faiss")
@table("name", ["index", "\u0438\u043d\u0434\u0435\u043a\u0441", os.fsdecode(b"i\xff")])
def test_an_index_file_may_have_any_name(name: str, tmp_path: Path) -> None:
    rows = np.eye(7, 3, dtype=np.float32)
    assert write_flat(rows, tmp_path / name)
    (tmp_path / name).rename(tmp_path / "plain")
    index = load_faiss().read_index(str(tmp_path / "plain"))
    assert np.array_equal(index.reconstruct_n(0, 7), rows)
