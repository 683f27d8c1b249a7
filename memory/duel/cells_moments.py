"""Cells seen from afar: a cell's rows stand in for each other through count, mean and spread.

Shapes: C cells, D embedding, N rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memory.duel.cells_grid import Cells, Grid, Matrix, Vector, add_rows
from memory.scores import Score

BLOCK_ELEMENTS = 1 << 17
"""Similarities of one block, so that its intermediates fit a CPU's cache."""

BLOCK_ROWS = 1024

LEAST_VARIANCE = 1e-7
"""Of a cosine, so that a slope exists where all rows of a cell are equal."""


@dataclass(frozen=True, slots=True)
class LinearUpdate:
    """By how much a batch moved each count: shift[c] + slope[c] . z for a row z of cell c."""

    shift_C: Vector
    slope_CD: Matrix

    def at(self, z_ND: Matrix, cell_N: Cells) -> Vector:
        """By how much the counts of these rows moved, float64 [N]."""
        slope_CD = self.slope_CD.astype(z_ND.dtype, copy=False)
        rise_N = np.empty(len(z_ND))
        for start in range(0, len(z_ND), BLOCK_ROWS):  # gathered slopes stay in the cache
            part = slice(start, start + BLOCK_ROWS)
            rise_N[part] = np.einsum("nd,nd->n", z_ND[part], slope_CD[cell_N[part]])
        return rise_N + self.shift_C[cell_N]

    def plus(self, other: LinearUpdate, weight: float) -> LinearUpdate:
        """Both moves together, the other times `weight`."""
        return LinearUpdate(
            self.shift_C + weight * other.shift_C, self.slope_CD + weight * other.slope_CD
        )


@dataclass(frozen=True, slots=True)
class CellKernel:
    """How each cell's rows see each of N rows.

    A row z of cell c has with row x about the similarity offset + slope (z . x): the straight line
    that fits a normal cloud of such z best. Its mean over the cell is `value`. A row belongs to the
    cell whose mean it points along most.
    """

    cell_N: Cells
    value_NC: Tensor
    slope_NC: Tensor
    offset_NC: Tensor

    def of(self, index: NDArray[np.int64]) -> CellKernel:
        """Of the chosen rows."""
        rows = torch.from_numpy(index)
        return CellKernel(
            self.cell_N[index], self.value_NC[rows], self.slope_NC[rows], self.offset_NC[rows]
        )

    def line(self, z_ND: Matrix, near_CM: Cells) -> tuple[LinearUpdate, LinearUpdate]:
        """The sum of the rows' lines, and the part of it that each cell has from rows near to it.

        Args:
            z_ND: the rows seen.
            near_CM: cells near to each, -1 for none.
        """
        shift_C = self.offset_NC.sum(dim=0, dtype=torch.float64).numpy()
        slope_CD = (self.slope_NC.T @ torch.from_numpy(z_ND)).numpy().astype(np.float64)
        near = LinearUpdate(np.zeros_like(shift_C), np.zeros_like(slope_CD))
        near_NM = near_CM[self.cell_N]
        row_P, place_P = np.nonzero(near_NM >= 0)
        cell_P = near_NM[row_P, place_P]
        np.add.at(near.shift_C, cell_P, self.offset_NC.numpy()[row_P, cell_P])
        steep_P = self.slope_NC.numpy()[row_P, cell_P]
        add_rows(near.slope_CD, cell_P, steep_P[:, None] * z_ND[row_P])
        return LinearUpdate(shift_C, slope_CD), near


class CellMoments:
    """Count, mean and spread of every cell at one moment.

    The cosines of a row x with the rows of a cell are taken as normally distributed, with the mean
    x . m and a spread that is one number along the cell's axis and another across it. The mean of h
    over them is by Gauss and Hermite's three points, exact for polynomials of degree five.

    Args:
        score: h.
        grid: the cells, and the sums of their rows.
        dtype: of the arithmetic.
    """

    def __init__(self, score: Score, grid: Grid, dtype: torch.dtype) -> None:
        size_C, sum_CD, axis_CD = grid.size_C, grid.sum_CD, grid.axis_CD
        self._score = score
        count_C = np.maximum(size_C, 1.0)
        mean_CD = sum_CD / count_C[:, None]
        square_C = np.einsum("cd,cd->c", mean_CD, mean_CD)
        middle_C = np.einsum("cd,cd->c", mean_CD, axis_CD.numpy().astype(np.float64))
        along_C = np.maximum(grid.along_C / count_C - middle_C**2, 0.0)
        across_C = np.maximum(1.0 - square_C - along_C, 0.0) / max(1, sum_CD.shape[1] - 1)
        tilt_C = (along_C - across_C) / np.maximum(square_C, 1e-12)
        self.size_C = torch.from_numpy(size_C.copy())
        self.mean_CD = torch.from_numpy(mean_CD).to(dtype)
        per_length_C = 1 / np.sqrt(np.maximum(square_C, 1e-12))
        self._per_length_C = torch.from_numpy(per_length_C).to(dtype)
        self._empty_C = torch.from_numpy(np.where(size_C > 0, 0.0, -4.0)).to(dtype)
        self._across_C = torch.from_numpy(3 * across_C).to(dtype)
        self._tilt_C = torch.from_numpy(3 * tilt_C).to(dtype)

    def see(self, z_ND: Matrix, cell_N: Cells | None = None) -> CellKernel:
        """What all cells see of these rows, members of these cells where they are any yet."""
        value, slope, cosine = self._kernel(torch.from_numpy(z_ND), slope=True)
        offset = torch.addcmul(value, slope, cosine, value=-1)
        if cell_N is None:
            towards = torch.addcmul(self._empty_C, cosine, self._per_length_C)
            cell_N = towards.argmax(dim=1).numpy().astype(np.int16)
        return CellKernel(cell_N, value, slope, offset)

    def fields(self, z_ND: Matrix, near_NM: Cells) -> tuple[Vector, Vector]:
        """sum of h of each row z with the rows of far cells, and with those of near ones.

        As by the moments: the row's similarity with itself is in it where it is a member.

        Args:
            near_NM: the cells near to each row, -1 for none.

        Returns:
            Both float64 [N].
        """
        step = max(1, BLOCK_ELEMENTS // len(self.size_C))
        far, near = np.empty(len(z_ND)), np.empty(len(z_ND))
        for start in range(0, len(z_ND), step):
            part = slice(start, start + step)
            value_NC, _, _ = self._kernel(torch.from_numpy(z_ND[part]), slope=False)
            far[part], near[part] = self.split(value_NC, near_NM[part])
        return far, near

    def split(self, value_NC: Tensor, near_NM: Cells) -> tuple[Vector, Vector]:
        """`fields` from the mean similarities with the rows of every cell."""
        total_N = (value_NC @ self.size_C.to(value_NC.dtype)).to(torch.float64).numpy()
        size_NM = np.where(near_NM >= 0, self.size_C.numpy()[near_NM], 0.0)
        value_NM = value_NC.numpy()[np.arange(len(near_NM))[:, None], near_NM]
        near_N = (value_NM * size_NM).sum(axis=1)
        return total_N - near_N, near_N

    def _kernel(self, z_ND: Tensor, slope: bool) -> tuple[Tensor, Tensor, Tensor]:
        cosine = z_ND @ self.mean_CD.T
        wide = torch.addcmul(self._across_C, cosine * cosine, self._tilt_C)
        wide.clamp_(min=3 * LEAST_VARIANCE).sqrt_()  # sqrt(3) sigma
        high = self._score.apply_(cosine + wide)
        low = self._score.apply_(cosine - wide)
        steep = (high - low).div_(wide.mul_(2.0)) if slope else wide
        value = high.add_(low).mul_(1 / 6)
        value.add_(self._score(cosine), alpha=2 / 3)
        return value, steep, cosine
