"""What the slots outside a shortlist have, read from the whole column.

Shapes: D embedding, K slots, N steps, R rows, S slots of the shortlist, b rows at a time.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memory.columns import Columns
from memory.eviction.bounds import Indices, Matrix, Vector, rounding

ROWS = 8192
"""Rows of the column multiplied at a time."""


class Sweep:
    """The largest z . s outside a shortlist, in place of a `Ceiling` where none holds for long.

    So it is in a memory that is even: the sum of its rows is nearly zero, and a few steps turn it
    round. One product of the column with the sums of some steps reads it once for all of them.

    Args:
        columns: of the memory, always read as they are.
        slots: of the shortlist, int64 [S].
        sum_D: s_0, the sum of the rows at this moment.
        radius: largest norm of any row.
    """

    def __init__(self, columns: Columns, slots: Indices, sum_D: Vector, radius: float) -> None:
        self.sum_D, self.limit = sum_D.copy(), np.inf  # nothing is known of z . s_0 beforehand
        self.norm = float(np.linalg.norm(sum_D))
        self._columns, self._slots, self._radius = columns, slots, radius
        inside = torch.from_numpy(np.sort(slots)).to(columns.device)
        starts = torch.arange(0, columns.capacity + ROWS, ROWS, device=columns.device)
        parts = inside.tensor_split(torch.searchsorted(inside, starts[1:-1]).cpu())
        self._inside = list(zip(starts.tolist(), parts, strict=False))

    def anew(self, sum_D: Vector, below: float) -> Sweep:
        """The same from another s_0. Rows of the shortlist cannot be left out: `below` is -inf."""
        assert below == -np.inf
        return Sweep(self._columns, self._slots, sum_D, self._radius)

    def covers(self, row_RD: Matrix) -> NDArray[np.bool_]:
        """Which rows the bound holds for: all, bool [R]."""
        return np.ones(len(row_RD), dtype=bool)

    def __call__(self, moved_ND: Matrix, square_N: Vector) -> Vector:
        """The bound at s_0 + each of these moves, float64 [N]; their lengths do not matter."""
        del square_N
        z_KD = self._columns.embeddings
        query_ND = self.sum_D + moved_ND
        narrow_ND = torch.from_numpy(query_ND).to(z_KD.device, z_KD.dtype)
        most_N = torch.full((len(query_ND),), -torch.inf, dtype=z_KD.dtype, device=z_KD.device)
        for start, inside in self._inside:
            gain_Nb: Tensor = narrow_ND @ z_KD[start : start + ROWS].T
            gain_Nb[:, inside - start] = -torch.inf
            most_N = torch.maximum(most_N, gain_Nb.amax(dim=1))
        unit = rounding(z_KD.shape[1], torch.finfo(z_KD.dtype).eps) * self._radius
        wide_N: Vector = most_N.cpu().numpy().astype(np.float64)
        wide_N += unit * np.linalg.norm(query_ND, axis=1)
        return wide_N
