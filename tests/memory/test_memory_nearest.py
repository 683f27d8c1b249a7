"""Nearest rows: faiss and its torch twin agree."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from memory import nearest as module
from memory.by_faiss import HAVE_FAISS, nearest_by_faiss, within_by_faiss
from memory.nearest import nearest, nearest_by_torch, within, within_by_torch
from tests.naive import unit_rows


@pytest.mark.skipif(not HAVE_FAISS, reason="faiss is an optional dependency")
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
        (torch.eye(3), torch.eye(4), 1, "of one dtype and device"),
        (torch.eye(3), torch.eye(3, dtype=torch.float64), 1, "of one dtype and device"),
    ],
)
def test_errors_say_the_rule(z: torch.Tensor, rows: torch.Tensor, k: int, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        nearest(z, rows, k)


@pytest.mark.skipif(not HAVE_FAISS, reason="faiss is an optional dependency")
@pytest.mark.parametrize("kind", ["clustered", "duplicates", "uniform"])
def test_faiss_and_torch_find_the_same_pairs(kind: str) -> None:
    rng = np.random.default_rng(3)
    row_KD = unit_rows(rng, kind, 400, 16).to(torch.float32)
    pairs_f, pairs_t = (
        find(row_KD[:30], row_KD, 0.37) for find in (within_by_faiss, within_by_torch)
    )
    assert len(pairs_t[0]) > 30
    assert torch.equal(pairs_f[0], pairs_t[0])
    assert torch.equal(pairs_f[1], pairs_t[1])
    assert torch.allclose(pairs_f[2], pairs_t[2], atol=1e-6)


def test_pairs_within_match_a_full_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK_ELEMENTS", 128)
    rng = np.random.default_rng(4)
    z_BD, row_KD = unit_rows(rng, "uniform", 11, 6), unit_rows(rng, "uniform", 60, 6)
    query_R, row_R, cosine_R = within(z_BD, row_KD, 0.3)
    expected = [(b, k) for b in range(11) for k in range(60) if float(z_BD[b] @ row_KD[k]) >= 0.3]
    assert list(zip(query_R.tolist(), row_R.tolist(), strict=True)) == expected
    assert torch.allclose(cosine_R, (z_BD[query_R] * row_KD[row_R]).sum(dim=1))


def test_a_row_at_the_threshold_counts() -> None:
    for dtype in (torch.float32, torch.float64):
        query_R, row_R, _ = within(torch.eye(4, dtype=dtype), torch.eye(4, dtype=dtype), 1.0)
        assert query_R.tolist() == row_R.tolist() == [0, 1, 2, 3]


def test_no_rows_have_no_pairs() -> None:
    for found in within(torch.eye(3), torch.empty(0, 3), 0.5):
        assert len(found) == 0
    for found in within(torch.empty(0, 3), torch.eye(3), 0.5):
        assert len(found) == 0


def test_a_cosine_must_be_finite() -> None:
    with pytest.raises(ValueError, match="finite"):
        within(torch.eye(3), torch.eye(3), float("nan"))
