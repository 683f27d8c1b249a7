"""Cells seen from afar: a cell's rows stand in for each other through count, mean and spread.

Shapes: C cells, D embedding, N rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memory.eviction.bounds import Matrix, Vector
from memory.eviction.cells_grid import Cells
from memory.scores import Score

BLOCK_ELEMENTS = 1 << 17
"""Similarities of one block, so that its intermediates fit a CPU's cache."""

LEAST_VARIANCE = 1e-7
"""Of a cosine, so that a slope exists where all rows of a cell are equal."""


@dataclass(frozen=True, slots=True)
class Seen:
    """How each cell's rows see each of N rows.

    A row z of cell c has with row x about the similarity offset + slope (z . x): the straight line
    that fits a normal cloud of such z best. Its mean over the cell is `value`. A row belongs to the
    cell whose mean it points along most.
    """

    cell_N: Cells
    value_NC: Tensor
    slope_NC: Tensor
    offset_NC: Tensor

    def of(self, index: NDArray[np.int64]) -> Seen:
        """Of the chosen rows."""
        rows = torch.from_numpy(index)
        return Seen(
            self.cell_N[index], self.value_NC[rows], self.slope_NC[rows], self.offset_NC[rows]
        )


class Lumps:
    """Count, mean and spread of every cell at one moment.

    The cosines of a row x with the rows of a cell are taken as normally distributed, with the mean
    x . m and a spread that is one number along the cell's axis and another across it. The mean of h
    over them is by Gauss and Hermite's three points, exact for polynomials of degree five.

    Args:
        score: h.
        size_C: rows of each cell.
        sum_CD: their sums.
        along_C: the sums of (row . axis)^2.
        axis_CD: unit axes.
        dtype: of the arithmetic.
    """

    def __init__(
        self,
        score: Score,
        size_C: Vector,
        sum_CD: Vector,
        along_C: Vector,
        axis_CD: Tensor,
        dtype: torch.dtype,
    ) -> None:
        self._score = score
        count_C = np.maximum(size_C, 1.0)
        mean_CD = sum_CD / count_C[:, None]
        square_C = np.einsum("cd,cd->c", mean_CD, mean_CD)
        middle_C = np.einsum("cd,cd->c", mean_CD, axis_CD.numpy().astype(np.float64))
        along_C = np.maximum(along_C / count_C - middle_C**2, 0.0)
        across_C = np.maximum(1.0 - square_C - along_C, 0.0) / max(1, sum_CD.shape[1] - 1)
        tilt_C = (along_C - across_C) / np.maximum(square_C, 1e-12)
        self.size_C = torch.from_numpy(size_C.copy())
        self.mean_CD = torch.from_numpy(mean_CD).to(dtype)
        per_length_C = 1 / np.sqrt(np.maximum(square_C, 1e-12))
        self._per_length_C = torch.from_numpy(per_length_C).to(dtype)
        self._empty_C = torch.from_numpy(np.where(size_C > 0, 0.0, -4.0)).to(dtype)
        self._across_C = torch.from_numpy(3 * across_C).to(dtype)
        self._tilt_C = torch.from_numpy(3 * tilt_C).to(dtype)

    def see(self, z_ND: Matrix) -> Seen:
        """What all cells see of these rows. Three N x C arrays."""
        value, slope, cosine = self._kernel(torch.from_numpy(z_ND), None, slope=True)
        offset = torch.addcmul(value, slope, cosine, value=-1)
        towards = torch.addcmul(self._empty_C, cosine, self._per_length_C)
        return Seen(towards.argmax(dim=1).numpy().astype(np.int16), value, slope, offset)

    def own(self, z_ND: Matrix, cell: int) -> Vector:
        """Mean similarity of each row with the rows of one cell, float64 [N]."""
        value, _, _ = self._kernel(torch.from_numpy(z_ND), slice(cell, cell + 1), slope=False)
        return value[:, 0].to(torch.float64).numpy()

    def field(self, z_ND: Matrix, cells: Tensor | None = None) -> Vector:
        """sum over the rows of all cells, or of these, of h with each row z, float64 [N].

        As by the lumps: the row's similarity with itself is in it where it is a member.
        """
        z = torch.from_numpy(z_ND)
        size_C = (self.size_C if cells is None else self.size_C[cells]).to(z.dtype)
        step = max(1, BLOCK_ELEMENTS // len(size_C))
        blocks = torch.split(z, step)
        found = [self._kernel(block, cells, slope=False)[0] @ size_C for block in blocks]
        return torch.cat(found).to(torch.float64).numpy()

    def _kernel(
        self, z_ND: Tensor, cells: Tensor | slice | None, slope: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        index = slice(None) if cells is None else cells
        cosine = z_ND @ self.mean_CD[index].T
        wide = torch.addcmul(self._across_C[index], cosine * cosine, self._tilt_C[index])
        wide.clamp_(min=3 * LEAST_VARIANCE).sqrt_()  # sqrt(3) sigma
        high = self._score.apply_(cosine + wide)
        low = self._score.apply_(cosine - wide)
        steep = (high - low).div_(wide.mul_(2.0)) if slope else wide
        value = high.add_(low).mul_(1 / 6)
        value.add_(self._score(cosine), alpha=2 / 3)
        return value, steep, cosine
