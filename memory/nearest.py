"""The k nearest rows by cosine: by faiss where it is installed, else by its torch twin.

The only file that knows faiss. It is an optional dependency: pip install faiss-cpu.

Shapes: B queries, D embedding, K rows searched, k neighbours.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

BLOCK_ELEMENTS = 1 << 22
"""Largest similarity block of the twin, in elements."""

HAVE_FAISS = importlib.util.find_spec("faiss") is not None
"""Looked for without importing it."""


def nearest(z_BD: Tensor, row_KD: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k rows of largest cosine for each query, exactly, the nearest first.

    Float32 on the CPU goes through `faiss.knn`, which searches the array itself and needs no index;
    everything else through the twin.

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
    if k < 1 or len(row_KD) < 1:
        raise ValueError(f"k is {k} and {len(row_KD)} rows are searched: both must be at least 1")
    if z_BD.shape[1:] != row_KD.shape[1:] or z_BD.dtype != row_KD.dtype:
        raise ValueError(
            f"queries are {z_BD.dtype} of {tuple(z_BD.shape[1:])}, rows {row_KD.dtype} of "
            f"{tuple(row_KD.shape[1:])}: dimension and dtype must be the same"
        )
    if HAVE_FAISS and row_KD.device.type == "cpu" and row_KD.dtype == torch.float32:
        return nearest_by_faiss(z_BD, row_KD, k)
    return nearest_by_torch(z_BD, row_KD, k)


def nearest_by_faiss(z_BD: Tensor, row_KD: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`nearest` by brute force in faiss; float32 on the CPU only."""
    import faiss

    query, rows = z_BD.detach().contiguous().numpy(), row_KD.detach().contiguous().numpy()
    metric = faiss.METRIC_INNER_PRODUCT
    cosine, row = faiss.knn(query, rows, min(k, len(rows)), metric=metric)
    return torch.from_numpy(cosine), torch.from_numpy(row)


def nearest_by_torch(z_BD: Tensor, row_KD: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`nearest` by one matrix product and a top-k for a block of queries at a time."""
    k = min(k, len(row_KD))
    step = max(1, BLOCK_ELEMENTS // len(row_KD))
    found = [torch.topk(block_bD @ row_KD.T, k, dim=1) for block_bD in torch.split(z_BD, step)]
    return torch.cat([top.values for top in found]), torch.cat([top.indices for top in found])
