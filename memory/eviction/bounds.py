"""What the slots outside a shortlist can reach at most while the sum of the rows moves.

Shapes: D embedding.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Matrix = NDArray[Any]
Indices = NDArray[np.int64]


LEAST_NORM = 1e-30
"""A sum of rows shorter than this has no direction: products with it underflow in float32."""


class Ceiling:
    """Bounds z . s over all rows z of which only this is known: |z| <= radius, z . s_0 <= limit.

    With p = z . s_0 / |s_0| and s = s_0 + d, where d has the component `along` on s_0 and the rest
    `across`: z . s <= (|s_0| + along) p + across sqrt(radius^2 - p^2). That is concave in p and has
    its peak at the direction of s, so the bound is its value at the largest p allowed, or at the
    peak. |d| alone would bound nothing: evictions move s against itself, where such rows lose too.

    Args:
        sum_D: s_0.
        limit: of z . s_0; -inf where there are no such rows.
        radius: of the rows.
    """

    def __init__(self, sum_D: Vector, limit: float, radius: float) -> None:
        self.sum_D = sum_D.copy()
        norm = math.sqrt(float(sum_D @ sum_D))
        self.norm = norm if norm > LEAST_NORM else 0.0
        self._unit_D = self.sum_D / self.norm if self.norm > 0 else np.zeros_like(sum_D)
        self.limit, self._radius = limit, radius
        self._wide = 8 * rounding(len(sum_D), float(np.finfo(np.float64).eps))
        self._cosine = limit / self.norm if self.norm > 0 else radius

    def anew(self, sum_D: Vector, below: float) -> Ceiling:
        """Of these rows at another s_0, and of such as have at most `below` of z . s_0 there."""
        moved_D = sum_D - self.sum_D
        limit = float(self(moved_D[None], np.array([moved_D @ moved_D]))[0])
        return Ceiling(sum_D, max(limit, below), self._radius)

    def covers(self, row_ND: Matrix) -> NDArray[np.bool_]:
        """Which rows the bound holds for, bool [N]."""
        return np.asarray(row_ND.astype(np.float64, copy=False) @ self.sum_D <= self.limit)

    def __call__(self, moved_ND: Matrix, square_N: Vector) -> Vector:
        """The bound at s_0 + each of these moves, given their squared lengths; float64 [N]."""
        if self.limit == -math.inf:
            return np.full(len(moved_ND), -math.inf)
        along_N = moved_ND @ self._unit_D
        # Where a move is all but along s_0 the difference of squares is nothing but rounding.
        across_N = np.sqrt(np.maximum(square_N - along_N * along_N, 0.0) + self._wide * square_N)
        wide_N = self._wide * (self.norm + np.sqrt(square_N))
        along_N += self.norm
        length_N = np.hypot(along_N, across_N)
        cosine = max(self._cosine, -self._radius)
        edge_N = along_N * cosine
        if cosine < self._radius:
            edge_N += across_N * math.sqrt(self._radius**2 - cosine**2)
        free_N = self._cosine * length_N >= self._radius * along_N
        return np.asarray(np.where(free_N, self._radius * length_N, edge_N) + self._radius * wide_N)


def rounding(dim: int, eps: float) -> float:
    """Largest error of a dot product of `dim` terms, relative to the norms of its factors.

    Higham, Accuracy and Stability of Numerical Algorithms, section 3.1: in any order of summation
    at most dim roundings of eps / 2 each; three more for what is rounded before and after.
    """
    return (dim + 3) * 0.5 * eps


def exact_gain(row_ND: Matrix, sum_D: Vector) -> Vector:
    """z . s - z . z of each row, in float64 and in one fixed order of summation.

    So the same row has the same gain wherever it stands, which no matrix product promises: rows
    equal bit by bit tie, and a decision does not depend on how the shortlist was made.
    """
    wide_ND = row_ND.astype(np.float64, copy=False)
    return np.asarray((wide_ND * (sum_D - wide_ND)).sum(axis=1))
