"""The nearest rows by cosine, exactly: by faiss where it serves, else by its torch twin.

Shapes: B queries, D embedding, K rows searched, k neighbours, R pairs found.
"""

from __future__ import annotations

import torch
from torch import Tensor

from memory.arguments import check_count, check_number
from memory.by_faiss import nearest_by_faiss, serves, within_by_faiss

BLOCK_ELEMENTS = 1 << 22
"""Largest similarity block of the twins, in elements."""


def nearest(z_BD: Tensor, row_KD: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k rows of largest cosine for each query, exactly, the nearest first.

    The array itself is searched and needs no index, so a row that is overwritten is found as it is.
    Float32 goes through faiss, on a GPU where it is built for one; all else through the twin.

    Args:
        z_BD: unit rows.
        row_KD: unit rows, K >= 1, of the same dtype and device.
        k: at least 1; at most K are returned.

    Returns:
        cosine [B, k] and row number int64 [B, k].

    >>> cosine, row = nearest(torch.eye(3)[:1], torch.eye(3), k=1)
    >>> cosine.tolist(), row.tolist()
    ([[1.0]], [[0]])
    """
    check_count("k", k, least=1)
    check_queries(z_BD, row_KD)
    check_count("the number of rows searched", len(row_KD), least=1)
    if serves(row_KD, k):
        return nearest_by_faiss(z_BD, row_KD, k)
    return nearest_by_torch(z_BD, row_KD, k)


def nearest_by_torch(z_BD: Tensor, row_KD: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`nearest` by one matrix product and a top-k for a block of queries at a time."""
    k = min(k, len(row_KD))
    step = max(1, BLOCK_ELEMENTS // len(row_KD))
    found = [torch.topk(block_bD @ row_KD.T, k, dim=1) for block_bD in torch.split(z_BD, step)]
    return torch.cat([top.values for top in found]), torch.cat([top.indices for top in found])


def within(z_BD: Tensor, row_KD: Tensor, cosine: float) -> tuple[Tensor, Tensor, Tensor]:
    """All pairs of a query and a row whose cosine is at least `cosine`, to float rounding.

    Args:
        z_BD: unit rows.
        row_KD: unit rows of the same dtype and device; may be none.
        cosine: a finite number.

    Returns:
        query int64 [R], row int64 [R] and cosine [R] of each pair, by query and then by row.

    >>> query, row, cosine = within(torch.eye(3)[1:], torch.eye(3), cosine=0.9)
    >>> query.tolist(), row.tolist(), cosine.tolist()
    ([0, 1], [1, 2], [1.0, 1.0])
    """
    check_number("cosine", cosine)
    check_queries(z_BD, row_KD)
    if serves(row_KD) and row_KD.device.type == "cpu" and len(row_KD) and len(z_BD):
        return within_by_faiss(z_BD, row_KD, cosine)
    return within_by_torch(z_BD, row_KD, cosine)


def within_by_torch(z_BD: Tensor, row_KD: Tensor, cosine: float) -> tuple[Tensor, Tensor, Tensor]:
    """`within` by one matrix product for a block of queries at a time."""
    step = max(1, BLOCK_ELEMENTS // max(1, len(row_KD)))
    query, row, value = [], [], []
    for start in range(0, max(1, len(z_BD)), step):
        cosine_bK = z_BD[start : start + step] @ row_KD.T
        query_R, row_R = (cosine_bK >= cosine).nonzero(as_tuple=True)
        query.append(query_R + start)
        row.append(row_R)
        value.append(cosine_bK[query_R, row_R])
    return torch.cat(query), torch.cat(row), torch.cat(value)


def check_queries(z_BD: Tensor, row_KD: Tensor) -> None:
    """ValueError unless these are finite rows, and of the kind of those searched."""
    if not (isinstance(z_BD, Tensor) and isinstance(row_KD, Tensor)):
        raise ValueError(
            f"queries are {type(z_BD).__name__}, rows {type(row_KD).__name__}: both must be "
            "tensors; torch.from_numpy makes one of an array"
        )
    if (
        z_BD.ndim != 2
        or row_KD.ndim != 2
        or z_BD.shape[1] != row_KD.shape[1]
        or z_BD.dtype != row_KD.dtype
        or z_BD.device != row_KD.device
    ):
        raise ValueError(
            f"queries are {tuple(z_BD.shape)} {z_BD.dtype} on {z_BD.device}, rows "
            f"{tuple(row_KD.shape)} {row_KD.dtype} on {row_KD.device}: must be [B, D] and [K, D] "
            "of one dtype and device"
        )
    finite_B = torch.isfinite(z_BD).all(dim=1)
    if not bool(finite_B.all()):
        raise ValueError(
            f"query row {int((~finite_B).nonzero()[0, 0])} is not finite: leave it out"
        )
