"""Nearest rows: faiss and its torch twin agree."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from memory import nearest as module
from memory.nearest import nearest, nearest_by_faiss, nearest_by_torch
from tests.naive import unit_rows


@pytest.mark.skipif(not module.HAVE_FAISS, reason="faiss is an optional dependency")
@pytest.mark.parametrize(("count", "queries", "k"), [(500, 40, 10), (3, 5, 7), (1, 1, 1)])
def test_faiss_and_torch_agree(count: int, queries: int, k: int) -> None:
    rng = np.random.default_rng(count)
    row_KD = unit_rows(rng, "clustered", count, 24).to(torch.float32)
    z_BD = unit_rows(rng, "uniform", queries, 24).to(torch.float32)
    cosine_f, row_f = nearest_by_faiss(z_BD, row_KD, k)
    cosine_t, row_t = nearest_by_torch(z_BD, row_KD, k)
    assert cosine_f.shape == row_f.shape == (queries, min(k, count))
    assert torch.allclose(cosine_f, cosine_t, atol=1e-6)
    # Where two rows are as near within rounding, either may come first.
    assert torch.allclose((z_BD @ row_KD.T).gather(1, row_f), cosine_t, atol=1e-6)
    assert row_t.dtype == row_f.dtype == torch.int64


def test_the_twin_matches_a_sorted_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK_ELEMENTS", 64)
    rng = np.random.default_rng(1)
    row_KD, z_BD = unit_rows(rng, "uniform", 50, 8), unit_rows(rng, "uniform", 9, 8)
    cosine, row = nearest(z_BD, row_KD, k=50)
    ordered = torch.sort(z_BD @ row_KD.T, dim=1, descending=True)
    assert torch.allclose(cosine, ordered.values)
    assert torch.equal(row, ordered.indices)


def test_no_queries_give_empty_answers() -> None:
    cosine, row = nearest_by_torch(torch.empty(0, 4), torch.eye(4), k=2)
    assert cosine.shape == row.shape == (0, 2)


@pytest.mark.parametrize(
    ("z", "rows", "k", "rule"),
    [
        (torch.eye(3), torch.eye(3), 0, "at least 1"),
        (torch.eye(3), torch.empty(0, 3), 1, "at least 1"),
        (torch.eye(3), torch.eye(4), 1, "must be the same"),
        (torch.eye(3), torch.eye(3, dtype=torch.float64), 1, "must be the same"),
    ],
)
def test_errors_say_the_rule(z: torch.Tensor, rows: torch.Tensor, k: int, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        nearest(z, rows, k)
