"""Rows grouped into cells of like direction: near cells are read row by row, far ones by moments.

As a multipole method does: what a far cell adds to a row's count hardly depends on where its rows
lie within it, so its size, mean and spread stand for them.

Shapes: A descriptor, C cells, K slots, M near cells of a row, N rows, O slots in cells, R rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from memory.columns import Columns
from memory.compute import to_host
from memory.index import cells_of, kmeans
from memory.scores import Score, sum_rows

TRAINED_PER_CELL = 32
"""Rows a cell that the centres are fitted to: they need not be the best, only near."""

TRAINING_ROUNDS = 6

CROWDED, CROWD = 8, 2048
"""A cell of so many times the mean size, and of so many rows, is not read row by row: its moments
must do, and do where it is crowded because its rows are alike. The centres are out of date once the
largest cell has grown so many times beyond the largest when they were fitted."""

FIT_LOST = 1.5
"""The centres are out of date once rows lie so many times further from their cells' means."""

LEAST_VARIANCE = 1e-7
"""Of a cosine, which is never known more closely."""

BLOCK_ELEMENTS = 1 << 17
"""Numbers of one block, so that what it takes to make them fits a CPU's cache."""

NOWHERE = -1
"""Cell of a slot that is in none."""


class Cells:
    """Some of a memory's slots by cell; at first all that are occupied.

    Args:
        columns: of the memory; descriptors are read from them.
        score: h.
        centre_CA: unit centres.
        near: cells read row by row for a row.
    """

    def __init__(self, columns: Columns, score: Score, centre_CA: Tensor, near: int) -> None:
        self._columns, self._score, self.centre_CA = columns, score, centre_CA
        self._near_cells = near
        self.sum_CA = torch.zeros_like(centre_CA, dtype=torch.float64)
        self.cell_K = torch.full((columns.capacity,), NOWHERE, device=columns.device)
        self.changed()

    @classmethod
    def fitted(cls, columns: Columns, score: Score, cells: int, near: int, seed: int) -> Cells:
        """Cells of all occupied slots, at least one, by k-means."""
        row_kA = columns.descriptor_kA
        centre_CA, cell_k = kmeans(row_kA, cells, seed, TRAINING_ROUNDS, TRAINED_PER_CELL)
        found = cls(columns, score, centre_CA, near)
        found.insert(torch.arange(len(row_kA), device=columns.device), cell_k)
        return found

    def of(self, row_NA: Tensor) -> Tensor:
        """The cell of each row, int64 [N]."""
        return cells_of(row_NA, self.centre_CA)

    def insert(self, slots: Tensor, cell_N: Tensor | None = None) -> None:
        """These slots join the cells that their rows now point to."""
        row_NA = self._columns.descriptors[slots]
        cell_N = self.of(row_NA) if cell_N is None else cell_N
        self.cell_K[slots] = cell_N
        self.sum_CA.index_add_(0, cell_N, row_NA.to(torch.float64))
        self.changed()

    def remove(self, slots: Tensor, row_NA: Tensor | None = None) -> None:
        """These slots leave their cells, which know them by these rows; those of now if None."""
        row_NA = self._columns.descriptors[slots] if row_NA is None else row_NA
        self.sum_CA.index_add_(0, self.cell_K[slots], row_NA.to(torch.float64), alpha=-1)
        self.cell_K[slots] = NOWHERE
        self.changed()

    def changed(self) -> None:
        """Slots have changed cells."""
        cells = len(self.centre_CA)
        self.size_C = torch.bincount(self.cell_K + 1, minlength=cells + 1)[1:]
        self._crowded_C = self.size_C > (CROWDED / cells * self.size_C.sum()).clamp(min=CROWD)
        self._edges: list[int] | None = None
        self._moments: tuple[Tensor, ...] | None = None

    def rows(self, cell: int) -> Tensor:
        """What its slots hold, copies [n, A]."""
        return self._columns.descriptors.index_select(0, self.slots(cell))  # indexing is slower

    def slots(self, cell: int) -> Tensor:
        """In this cell, int64, in rising order."""
        if self._edges is None:
            size_C = to_host(self.size_C)
            self._edges = [0, *size_C.cumsum(0).tolist()]
            order_K = torch.argsort(self.cell_K, stable=True)
            self._in_order = order_K[len(order_K) - self._edges[-1] :]
        return self._in_order[self._edges[cell] : self._edges[cell + 1]]

    def _cosines(self, row_NA: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and spread, sqrt(3) sigma, of the cosines of each row with those of a cell [N, C].

        They are taken as normally distributed, with a spread that falls towards the cell's axis as
        that of unit rows does.
        """
        if self._moments is None:
            mean_CA = self.sum_CA / self.size_C.clamp(min=1)[:, None]
            square_C = mean_CA.square().sum(dim=1).clamp(1e-12, 1)
            across_C = 3 * (1 - square_C) / max(1, mean_CA.shape[1] - 1)
            found = mean_CA, across_C, across_C / square_C
            self._moments = tuple(moment.to(row_NA.dtype) for moment in found)
        mean_CA, across_C, tilt_C = self._moments
        cosine_NC = row_NA @ mean_CA.T
        wide_NC = torch.addcmul(across_C, cosine_NC * cosine_NC, tilt_C, value=-1)
        return cosine_NC, wide_NC.clamp_(min=3 * LEAST_VARIANCE).sqrt_()

    def _similarities(self, row_NA: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of each row with the rows of each cell: the mean cosine, the mean h, and by how much h
        grows with the cosine; [N, C] each.

        By Gauss and Hermite's three points, exact for polynomials of degree five; the straight line
        fits h best.
        """
        cosine_NC, wide_NC = self._cosines(row_NA)
        high_NC = self._score.apply_(cosine_NC + wide_NC)
        low_NC = self._score.apply_(cosine_NC - wide_NC)
        mean_NC = self._score(cosine_NC).mul_(4).add_(high_NC).add_(low_NC).div_(6)
        return cosine_NC, mean_NC, high_NC.sub_(low_NC).div_(wide_NC.mul_(2))

    def means(self, row_NA: Tensor) -> Tensor:
        """The mean h of each row with the rows of each cell, as far as moments tell, [N, C]."""
        parts = blocks(len(row_NA), len(self.size_C))
        none_NC = row_NA.new_zeros(0, len(self.size_C))
        return torch.cat([none_NC, *(self._similarities(row_NA[part])[1] for part in parts)])

    def total(self, row_NA: Tensor) -> Tensor:
        """sum of h of each row with all rows in cells, float64 [N]."""
        size_C = self.size_C.to(row_NA.dtype)
        total_N = torch.zeros(len(row_NA), dtype=torch.float64, device=row_NA.device)
        near_NM = self._nearest(row_NA)
        for part in blocks(len(row_NA), len(size_C)):
            mean_bC = without(self._similarities(row_NA[part])[1], near_NM[part])
            total_N[part] = (mean_bC @ size_C).to(torch.float64)
        for cell, chosen in self._readers(near_NM).items():
            h_nb = self._score.apply_(row_NA[chosen] @ self.rows(cell).T)
            total_N.index_add_(0, chosen, h_nb.sum(dim=1).to(torch.float64))
        return total_N

    def moved(self, joined_RA: Tensor, left_RA: Tensor) -> Tensor:
        """By how much rows that joined and rows that left moved the counts of slots in cells.

        A row z of a far cell has with row x about the similarity mean + steep (z . x - m . x),
        where m is the cell's mean: the straight line that fits its normal cosine best. So all rows
        together move the counts of a cell by shift + slope . z. Its own cell alone is read row by
        row: what is near to a row that left has not always counted it as near, and would fall
        short for good, where counts that are too high are taken again before they decide.

        Returns:
            float64 [K], 0 for slots in no cell.
        """
        row_RA = torch.cat([joined_RA, left_RA])
        sign_R = torch.ones(len(row_RA), device=row_RA.device, dtype=row_RA.dtype)
        sign_R[len(joined_RA) :] = -1
        own_R1 = self._nearest(row_RA)[:, :1]
        shift_C, slope_CA = self.sum_CA.new_zeros(len(self.size_C)), self.sum_CA.to(row_RA) * 0
        for part in blocks(len(row_RA), len(self.size_C)):
            cosine_bC, mean_bC, steep_bC = self._similarities(row_RA[part])
            line_bC = without(mean_bC.sub_(steep_bC * cosine_bC), own_R1[part])
            shift_C += sign_R[part] @ line_bC
            steep_bC = without(steep_bC, own_R1[part])
            slope_CA += steep_bC.T @ (row_RA[part] * sign_R[part, None])
        slope_CA, readers, parts = slope_CA.to(row_RA.dtype), self._readers(own_R1), []
        for cell in range(len(self.centre_CA)):
            row_bA = self.rows(cell)
            moved_b = row_bA @ slope_CA[cell]
            if cell in readers:
                h_bR = self._score.apply_(row_bA @ row_RA[readers[cell]].T)
                moved_b += h_bR @ sign_R[readers[cell]]
            parts.append(moved_b + shift_C[cell])
        moved_K = torch.zeros_like(self.cell_K, dtype=torch.float64)
        moved_K[self._in_order] = torch.cat(parts).to(torch.float64)
        return moved_K

    def _nearest(self, row_NA: Tensor) -> Tensor:
        """The cells that are read row by row, int64 [N, M], those whose centres are nearest to a
        row; NOWHERE for none."""
        cosine_NC = row_NA.to(self.centre_CA.dtype) @ self.centre_CA.T
        near_NM = cosine_NC.topk(min(self._near_cells, len(self.centre_CA)), dim=1).indices
        return torch.where(self._crowded_C[near_NM], NOWHERE, near_NM)

    def _readers(self, near_NM: Tensor) -> dict[int, Tensor]:
        """Which of N rows read the slots of a cell, by cell."""
        row_P, place_P = (near_NM >= 0).nonzero().T
        cell_P, order_P = near_NM[row_P, place_P].sort(stable=True)
        cell, size = to_host(torch.stack(torch.unique_consecutive(cell_P, return_counts=True)))
        return dict(zip(cell.tolist(), row_P[order_P].split(size.tolist()), strict=True))

    def fit(self) -> tuple[float, float]:
        """Mean over all rows of their length along their cell's mean, and the largest cell."""
        length = self.sum_CA.norm(dim=1).sum() / self.size_C.sum().clamp(min=1)
        return float(to_host(length)), float(to_host(self.size_C.max()))

    def outdated(self, fit: tuple[float, float]) -> bool:
        """Whether rows have moved so far since this was the fit that cells should be found anew."""
        length, crowd = self.fit()
        return 1 - length > FIT_LOST * (1 - fit[0]) or crowd > CROWDED * fit[1]

    def check(self) -> tuple[bool, str]:
        """Sum again: (True, "") or (False, which cell is wrong)."""
        for cell in range(len(self.centre_CA)):
            row_nA = self.rows(cell)
            off = float((sum_rows(row_nA) - self.sum_CA[cell]).abs().max())
            if off > 1e-6 * max(1, len(row_nA)):
                return False, f"cell {cell}: the sum of its rows is off by {off:.3g}"
        return True, ""


def blocks(rows: int, columns: int) -> Iterator[slice]:
    """Rows of so many columns that are held at a time."""
    step = max(1, BLOCK_ELEMENTS // columns)
    return (slice(start, start + step) for start in range(0, rows, step))


def without(value_NC: Tensor, near_NM: Tensor) -> Tensor:
    """The values with 0 at these columns, where they are none's."""
    padded = torch.cat([value_NC, value_NC[:, :1]], dim=1)
    return padded.scatter_(1, near_NM.where(near_NM >= 0, value_NC.shape[1]), 0.0)[:, :-1]
