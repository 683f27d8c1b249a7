"""Slots grouped into cells of like direction, and how many rows of what sum each cell holds.

Shapes: C cells, D embedding, K slots, M neighbours of a cell, N rows.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memory.index import kmeans

Vector = NDArray[np.float64]
Matrix = NDArray[Any]
Cells = NDArray[np.int16]
Slots = NDArray[np.int64]

TRAINED_PER_CELL = 32
"""Rows a cell that the axes are fitted to: they need not be the best, only near."""

TRAINING_ROUNDS = 6

MOST_CELLS = np.iinfo(np.int16).max

EMPTY = -1
"""Cell of a slot that holds nothing."""

FIT_LOST = 0.05
"""The axes are out of date once rows lie so much further from them, in mean cosine."""

CROWDED = 8
"""A cell of so many times the mean size is not counted row by row: its moments must do, and do
where it is crowded because its rows are alike. The axes are out of date once the largest cell has
grown so many times beyond the largest when they were fitted."""


class Grid:
    """The cell of every slot; kept up as rows come and go.

    Args:
        z_kD: rows of the first k slots; the axes are fitted to them.
        capacity: K.
        cells: C, at most MOST_CELLS.
        near: cells treated exactly with each, itself included.
        seed: of the clustering.
    """

    def __init__(self, z_kD: Tensor, capacity: int, cells: int, near: int, seed: int) -> None:
        axis_CD, cell_k = kmeans(z_kD, cells, seed, TRAINING_ROUNDS, TRAINED_PER_CELL)
        self.axis_CD = axis_CD.cpu()
        self.cell_K: Cells = np.full(capacity, EMPTY, dtype=np.int16)
        cells, dim = axis_CD.shape
        self.size_C: Vector = np.zeros(cells)
        self.sum_CD: Vector = np.zeros((cells, dim))
        self.along_C: Vector = np.zeros(cells)  # sum over rows of (row . axis)^2
        self._take_all(z_kD, cell_k.cpu().numpy().astype(np.int16))
        crowded_C = self.size_C > CROWDED * self.size_C.mean()
        self.near_CM = neighbours(self.axis_CD, near, crowded_C)
        self.fit_trained, self.crowd_trained = self.fit(), float(self.size_C.max())

    def _take_all(self, z_kD: Tensor, cell_k: Cells) -> None:
        self.cell_K[: len(cell_k)] = cell_k
        order = np.argsort(cell_k, kind="stable")
        edges = np.searchsorted(cell_k[order], np.arange(len(self.size_C) + 1))
        for cell, (start, stop) in enumerate(itertools.pairwise(edges)):
            if stop > start:
                members = torch.from_numpy(order[start:stop]).to(z_kD.device)
                row_nD = z_kD[members].cpu().numpy().astype(np.float64, copy=False)
                self.size_C[cell] = len(row_nD)
                self.sum_CD[cell] = row_nD.sum(axis=0)
                self.along_C[cell] = ((row_nD @ self.axis_CD[cell].numpy()) ** 2).sum()

    def count_rows(self, z_ND: Matrix, cell_N: Cells, weight: float) -> None:
        """Rows join (weight 1) or leave (-1) the sums of their cells."""
        wide_ND = z_ND.astype(np.float64)
        along_N = np.einsum("nd,nd->n", wide_ND, self.axis_CD.numpy()[cell_N])
        np.add.at(self.size_C, cell_N, weight)
        add_rows(self.sum_CD, cell_N, weight * wide_ND)
        np.add.at(self.along_C, cell_N, weight * along_N**2)

    def members(self) -> tuple[Slots, NDArray[np.int64]]:
        """All slots sorted by cell and slot, and where each cell begins in them, int64 [C + 1]."""
        order = np.argsort(self.cell_K, kind="stable")
        edges = np.searchsorted(self.cell_K[order], np.arange(len(self.size_C) + 1))
        return order, edges

    def fit(self) -> float:
        """Mean over all rows of the length that is left of them in their cell's mean."""
        length_C = np.linalg.norm(self.sum_CD, axis=1)
        return float(length_C.sum() / max(1.0, self.size_C.sum()))

    @property
    def outdated(self) -> bool:
        """Whether the rows have moved so far that the axes should be fitted anew."""
        crowd = float(self.size_C.max())
        return self.fit() < self.fit_trained - FIT_LOST or crowd > CROWDED * self.crowd_trained


def neighbours(axis_CD: Tensor, near: int, crowded_C: NDArray[np.bool_]) -> Cells:
    """Cells that are each among the other's `near` nearest, itself included, int16 [C, M].

    -1 stands where there are fewer. The relation is symmetric; crowded cells have it to none.
    """
    near = min(near, len(axis_CD))
    cosine_CC = axis_CD @ axis_CD.T
    cosine_CC.fill_diagonal_(2.0)
    nearest_CM = cosine_CC.topk(near, dim=1).indices.numpy()
    among_CMM = nearest_CM[nearest_CM]
    mutual_CM = (among_CMM == np.arange(len(axis_CD))[:, None, None]).any(axis=2)
    mutual_CM &= ~crowded_C[:, None] & ~crowded_C[nearest_CM]
    return np.where(mutual_CM, nearest_CM, -1).astype(np.int16)


def add_rows(sum_CD: Matrix, cell_N: Cells, z_ND: Matrix) -> None:
    """Add each row to the sum of its cell, in place; numpy's own `add.at` takes far longer."""
    index_N = torch.from_numpy(cell_N.astype(np.int64))
    torch.from_numpy(sum_CD).index_add_(0, index_N, torch.from_numpy(z_ND).to(torch.float64))
