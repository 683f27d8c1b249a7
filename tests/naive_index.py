"""Naive float64 implementations of the index, and helpers that its tests share.

Shapes: D embedding, K slots, N rows.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from stream_ssl.memory.columns import Columns
from stream_ssl.memory.duel.approximate import ApproximateCounts
from stream_ssl.memory.scores import Score
from tests.naive import unit_rows

DIM = 32


def exact_counts(score: Score, z_KD: Tensor) -> Tensor:
    """Return N(j) of every row: the sum of scores with all other rows."""
    wide_KD, block = z_KD.to(torch.float64), 64  # scores of a block stay in the processor's cache
    count_K = torch.zeros(len(z_KD), dtype=torch.float64)
    for start in range(0, len(z_KD), block):  # each pair once
        pair_NK = score(wide_KD[start : start + block] @ wide_KD[start:].T)
        count_K[start : start + block] += pair_NK.sum(dim=1)
        count_K[start + block :] += pair_NK[:, block:].sum(dim=0)
    return count_K - score((wide_KD * wide_KD).sum(dim=1))


def mean_by_sampling(score: Score, middle: float, spread: float) -> float:
    """Return the mean of h over a normally distributed cosine, as a sum over a fine grid."""
    step_S = np.linspace(-6, 6, 4001)
    weight_S = np.exp(-(step_S**2) / 2)
    h_S = score(torch.from_numpy(middle + spread * step_S)).numpy()
    return float((weight_S * h_S).sum() / weight_S.sum())


def regrets(score: Score, z_KD: Tensor, plan: list[int], x_BD: Tensor) -> list[float]:
    """Return (largest - evicted) / largest exact count at each step.

    `z_KD` is modified: it takes the newcomers.
    """
    found = []
    count_K = exact_counts(score, z_KD)
    for slot, x_D in zip(plan, x_BD, strict=True):
        most = float(count_K.max())
        found.append((most - float(count_K[slot])) / most)
        count_K -= score(z_KD @ z_KD[slot])
        z_KD[slot] = x_D
        near_K = score(z_KD @ x_D)
        near_K[slot] = 0
        count_K += near_K
        count_K[slot] = near_K.sum()
    return found


def filled(
    z_KD: Tensor, capacity: int | None = None, dtype: torch.dtype = torch.float32
) -> Columns:
    columns = Columns(capacity or len(z_KD), z_KD.shape[1], dtype=dtype)
    columns.embeddings[: len(z_KD)] = z_KD.to(dtype)
    columns.occupied = len(z_KD)
    return columns


def stream(rng: np.random.Generator, kind: str, count: int, dim: int = DIM) -> Tensor:
    """Return `unit_rows`, or 20 clusters of sizes as 1/rank, the same in every call."""
    if kind != "ranked":
        return unit_rows(rng, kind, count, dim)
    centre_CD = unit_rows(np.random.default_rng(99), "uniform", 20, dim)
    share = 1 / np.arange(1, 21)
    chosen_N = rng.choice(20, size=count, p=share / share.sum())
    z_ND = centre_CD[chosen_N] + 0.6 / dim**0.5 * torch.from_numpy(
        rng.standard_normal((count, dim))
    )
    return torch.nn.functional.normalize(z_ND, dim=1)


def offer(tally: ApproximateCounts, columns: Columns, x_BD: Tensor) -> list[int]:
    """Add newcomers in the same way as the memory does. Return the plan."""
    plan: list[int] = []
    while len(x_BD):
        step = tally.choose(x_BD).tolist()
        assert 1 <= len(step) <= len(x_BD)
        for slot, x_D in zip(step, x_BD, strict=False):
            if slot >= 0:
                columns.embeddings[slot] = x_D
        plan += step
        x_BD = x_BD[len(step) :]
    return plan
