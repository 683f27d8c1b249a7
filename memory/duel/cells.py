"""Rows grouped into cells of similar direction, for approximate counts.

The rows of a slot's own cell are read one by one, and all other cells are represented by moments.
As in a multipole method, the contribution of a distant cell hardly depends on where its rows lie
within the cell. Its size, mean and spread therefore represent its rows.

Shapes: A descriptor, C cells, K slots, N rows, R rows that joined or left, b rows of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from stream_ssl.memory.columns import Columns
from stream_ssl.memory.compute import to_host
from stream_ssl.memory.index import cells_of, kmeans
from stream_ssl.memory.scores import Score, sum_rows

TRAINED_PER_CELL = 32
"""The rows per cell to which the centres are fitted. The centres need not be optimal."""

TRAINING_ROUNDS = 6

CROWDED, CROWD = 8, 2048
"""The limits above which a crowded cell is never read row by row.

Such a cell has more than CROWD rows, and more than CROWDED times the mean size, when the cells are
fitted. Its moments are accurate enough, because a crowded cell has similar rows. The centres are
outdated when the largest cell has grown to CROWDED times the largest cell at the fit.
"""

FIT_LOST, FIT_LEAST = 1.5, 1e-3
"""The limits that decide when the centres are outdated.

The rows' mean distance from their cells' means, 1 - cosine, may grow by the factor FIT_LOST.
Distances below FIT_LEAST count as FIT_LEAST, for example if rows repeat exactly.
"""

LEAST_VARIANCE = 1e-7
"""The least variance of a cosine, which is never known more precisely."""

BLOCK_ELEMENTS = 1 << 17
"""The number of values in a block, chosen so that a block's working data fit a CPU's cache."""

NOWHERE = -1
"""The cell of a slot that is in no cell."""


class Seen(NamedTuple):
    """The similarities of rows with each cell by moments, [N, C] each.

    A row z of a far cell has about the similarity mean + steep (z . x - m . x) with row x, where m
    is the cell's mean. This straight line fits h best for normally distributed cosines. `line` is
    its value at z . x = 0. Line and steep are 0 for a row's own cell, which is read row by row.
    """

    total_N: Tensor  # sum with all rows in cells, float64 [N]
    mean_NC: Tensor
    line_NC: Tensor
    steep_NC: Tensor

    def first(self, rows: int) -> Seen:
        """Return the values of the first `rows` rows."""
        return Seen(*(value[:rows] for value in self))


class CountLines:
    """The changes of the counts in each cell, by rows that came and left, float64.

    Attributes:
        shift_C, slope_CA: the change of a slot with row z is shift + slope . z, without the changes
            within its own cell.
        mean_C: the mean change over the cell's slots, from all rows.
    """

    def __init__(self, shift_C: Tensor, slope_CA: Tensor, mean_C: Tensor) -> None:
        self.shift_C, self.slope_CA, self.mean_C = shift_C, slope_CA, mean_C

    def add(self, seen: Seen, row_NA: Tensor, sign: int) -> None:
        """Add the changes by these rows, which came, or left if the sign is -1."""
        sign_N = torch.full_like(row_NA[:, 0], sign)
        self.shift_C += sign_N @ seen.line_NC
        self.slope_CA.add_(seen.steep_NC.T @ row_NA, alpha=sign)
        self.mean_C += sign_N @ seen.mean_NC


class Cells:
    """Slots of a memory grouped by cell. At first these are all occupied slots.

    Args:
        columns: the memory's columns, from which descriptors are read.
        score: h.
        centre_CA: unit centres.
    """

    def __init__(self, columns: Columns, score: Score, centre_CA: Tensor) -> None:
        self._columns, self._score, self.centre_CA = columns, score, centre_CA
        self.sum_CA = torch.zeros_like(centre_CA, dtype=torch.float64)
        self.square_C = torch.zeros_like(self.sum_CA[:, 0])  # sum of (z . centre)^2
        self.crowded_C = torch.zeros_like(self.square_C, dtype=torch.bool)
        self.cell_K = torch.full((columns.capacity,), NOWHERE, device=columns.device)
        self.changed()

    @classmethod
    def fitted(cls, columns: Columns, score: Score, cells: int, seed: int) -> Cells:
        """Return cells of all occupied slots, at least one slot, fitted by k-means."""
        row_kA = columns.descriptor_kA
        centre_CA, cell_k = kmeans(row_kA, cells, seed, TRAINING_ROUNDS, TRAINED_PER_CELL)
        found = cls(columns, score, centre_CA)
        found.insert(torch.arange(len(row_kA), device=columns.device), cell_k)
        mean = found.size_C.sum() / len(centre_CA)
        found.crowded_C = found.size_C > (CROWDED * mean).clamp(min=CROWD)
        return found

    def state(self) -> dict[str, Tensor]:
        return {
            "centres": self.centre_CA,
            "cells": self.cell_K,
            "sums": self.sum_CA,
            "squares": self.square_C,
            "crowded": self.crowded_C,
        }

    @classmethod
    def restored(cls, columns: Columns, score: Score, state: dict[str, Tensor]) -> Cells:
        """Return the cells of a result of `state`."""
        found = cls(columns, score, state["centres"])
        found.cell_K, found.crowded_C = state["cells"], state["crowded"]
        found.sum_CA, found.square_C = state["sums"], state["squares"]
        found.changed()
        return found

    @property
    def occupied(self) -> int:
        """The number of occupied slots of the memory, in cells or not."""
        return self._columns.occupied

    def of(self, row_NA: Tensor) -> Tensor:
        """Return the cell of each row, int64 [N]."""
        return cells_of(row_NA, self.centre_CA)

    def insert(self, slots: Tensor, cell_N: Tensor | None = None) -> None:
        """Add these slots to the given cells, or to the cells of their rows if None."""
        row_NA = self.rows(slots)
        cell_N = self.of(row_NA) if cell_N is None else cell_N
        self.cell_K[slots] = cell_N
        self._add(row_NA, cell_N, 1)

    def remove(self, slots: Tensor, row_NA: Tensor | None = None) -> None:
        """Remove these slots from their cells.

        Args:
            slots: the slots.
            row_NA: the rows under which the cells contain the slots. None means their current rows.
        """
        row_NA = self.rows(slots) if row_NA is None else row_NA
        cell_N, self.cell_K[slots] = self.cell_K[slots], NOWHERE
        self._add(row_NA, cell_N, -1)

    def _add(self, row_NA: Tensor, cell_N: Tensor, sign: int) -> None:
        """Add rows to the sums of their cells, or subtract them if the sign is -1."""
        self.sum_CA.index_add_(0, cell_N, row_NA.to(torch.float64), alpha=sign)
        along_N = (row_NA * self.centre_CA[cell_N]).sum(dim=1, dtype=torch.float64)
        self.square_C.index_add_(0, cell_N, along_N.square(), alpha=sign)
        self.changed()

    def changed(self) -> None:
        """Update the derived values after slots changed cells."""
        cells = len(self.centre_CA)
        self.size_C = torch.bincount(self.cell_K + 1, minlength=cells + 1)[1:]
        self._slots: tuple[Tensor, ...] | None = None
        self._moments: tuple[Tensor, ...] | None = None

    def rows(self, slots: Tensor) -> Tensor:
        """Return copies of the rows in these slots, [n, A]."""
        return self._columns.descriptors.index_select(0, slots)  # indexing is four times slower

    def slots(self, cell: int) -> Tensor:
        """Return the slots of this cell, int64, in ascending order."""
        if self._slots is None:
            order_K = torch.argsort(self.cell_K, stable=True)
            sizes = to_host(self.size_C).tolist()
            self._slots = torch.split(order_K[len(order_K) - sum(sizes) :], sizes)
        return self._slots[cell]

    def _cosines(self, row_NA: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean and spread, sqrt(3) sigma, of each row's cosines with each cell [N, C].

        The cosines are assumed to be normally distributed, with one spread along the cell's axis
        and another in all directions across it.
        """
        if self._moments is None:
            size_C = self.size_C.clamp(min=1)
            mean_CA = self.sum_CA / size_C[:, None]
            square_C = mean_CA.square().sum(dim=1).clamp(1e-12, 1)
            along_C = self.square_C / size_C - (mean_CA * self.centre_CA).sum(dim=1).square()
            along_C = along_C.clamp(min=0).minimum(1 - square_C)
            across_C = (1 - square_C - along_C) / max(1, mean_CA.shape[1] - 1)
            found = mean_CA, 3 * across_C, 3 * (along_C - across_C) / square_C
            self._moments = tuple(moment.to(row_NA.dtype) for moment in found)
        mean_CA, across_C, tilt_C = self._moments
        cosine_NC = row_NA @ mean_CA.T
        wide_NC = torch.addcmul(across_C, cosine_NC * cosine_NC, tilt_C)
        return cosine_NC, wide_NC.clamp_(min=3 * LEAST_VARIANCE).sqrt_()

    def _similarities(self, row_NA: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return each row's mean cosine with each cell, the mean h, and the slope of h; [N, C]
        each.

        The mean h uses Gauss-Hermite quadrature with three points, which is exact for polynomials
        of degree five. The slope is that of the straight line that fits h best.
        """
        cosine_NC, wide_NC = self._cosines(row_NA)
        high_NC = self._score.apply_((cosine_NC + wide_NC).clamp_(max=1.0))
        low_NC = self._score.apply_((cosine_NC - wide_NC).clamp_(min=-1.0))
        mean_NC = self._score(cosine_NC).add_(high_NC + low_NC, alpha=0.25).mul_(4 / 6)
        return cosine_NC, mean_NC, high_NC.sub_(low_NC).div_(wide_NC.mul_(2))

    def no_lines(self) -> CountLines:
        """Return lines without any change."""
        return CountLines(
            *(torch.zeros_like(of) for of in (self.square_C, self.sum_CA, self.square_C))
        )

    def see(self, row_NA: Tensor, cell_N: Tensor) -> Seen:
        """Return the similarities of rows, which belong to these cells, with all cells."""
        cosine_NC, mean_NC, steep_NC = self._similarities(row_NA)
        total_N = (mean_NC @ self.size_C.to(row_NA.dtype)).to(torch.float64)
        read_N = self._read(cell_N)
        steep_NC = without_(steep_NC, read_N)
        line_NC = without_(mean_NC - cosine_NC.mul_(steep_NC), read_N)
        return Seen(total_N, mean_NC, line_NC, steep_NC)

    def far(self, row_NA: Tensor, cell_N: Tensor) -> Tensor:
        """Return the sum of h of rows of these cells with all rows in other cells, float64 [N]."""
        far_N = torch.zeros(len(row_NA), dtype=torch.float64, device=row_NA.device)
        size_C = self.size_C.to(row_NA.dtype)
        for part in blocks(len(row_NA), len(size_C)):
            mean_bC = self._similarities(row_NA[part])[1]
            far_N[part] = (without_(mean_bC, self._read(cell_N[part])) @ size_C).to(torch.float64)
        return far_N

    def near(self, row_NA: Tensor, cell_N: Tensor) -> Tensor:
        """Return the sum of h of rows of these cells with all rows of their own cell, float64.

        The shape is [N]. Cells that are too crowded to read add nothing.
        """
        near_N = torch.zeros(len(row_NA), dtype=torch.float64, device=row_NA.device)
        for cell, readers in by_cell(self._read(cell_N)).items():
            h_nb = self._score.between(row_NA[readers], self.rows(self.slots(cell)))
            near_N[readers] += h_nb.sum(dim=1)
        return near_N

    def moved(
        self, lines: CountLines, row_RA: Tensor, cell_R: Tensor, sign_R: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the changes of the counts of all slots in cells, in one pass over the slots.

        Rows of other cells change a count along the line of the slot's cell. Rows of the slot's own
        cell are read one by one, so a row that leaves subtracts exactly its earlier contribution.

        Args:
            lines: the changes by cell.
            row_RA, cell_R, sign_R: the rows that came or left, their cells, and 1 for a row that
                came or -1 for a row that left.

        Returns:
            The changes by rows of other cells [K] and by rows of the own cell [K], 0 for slots in
            no cell; and `near` of each of the rows [R].
        """
        cells, cell_R = len(self.centre_CA), self._read(cell_R)
        # Sorted by cell, with its line before its rows, so that one product serves them all.
        cell_N = torch.cat([torch.arange(cells, device=cell_R.device), cell_R])
        cell_N, order_N = cell_N.sort(stable=True)
        row_NA = torch.cat([lines.slope_CA.to(row_RA.dtype), row_RA])[order_N]
        sign_N = torch.cat([sign_R.new_ones(cells), sign_R])[order_N]
        near_N = torch.zeros_like(sign_N)
        sizes = to_host(torch.bincount(cell_N + 1, minlength=cells + 1)).tolist()  # NOWHERE first
        row_CNA, sign_CN, near_CN = (
            torch.split(of_N, sizes)[1:] for of_N in (row_NA, sign_N, near_N)
        )
        moved: list[Tensor] = []
        for cell in range(cells):
            dot_nb = row_CNA[cell] @ self.rows(self.slots(cell)).T
            h_rb = self._score.apply_(dot_nb[1:])
            moved.append(torch.stack([dot_nb[0], sign_CN[cell][1:] @ h_rb]))
            near_CN[cell][1:] = h_rb.sum(dim=1)
        slots_k = torch.cat([self.slots(cell) for cell in range(cells)])
        moved_2k = torch.cat(moved, dim=1)
        moved_2k[0] += lines.shift_C.to(row_RA.dtype).repeat_interleave(self.size_C)
        moved_2K = row_RA.new_zeros(2, len(self.cell_K)).index_copy_(1, slots_k, moved_2k)
        near_R = torch.empty_like(near_N).index_copy_(0, order_N, near_N)[cells:]
        return moved_2K[0], moved_2K[1], near_R

    def _read(self, cell_N: Tensor) -> Tensor:
        """Return these cells, with NOWHERE for cells that are not read row by row."""
        return torch.where(self.crowded_C[cell_N], NOWHERE, cell_N)

    def fit(self) -> tuple[float, float]:
        """Return the rows' mean length along their cells' means, and the largest cell's size."""
        length = self.sum_CA.norm(dim=1).sum() / self.size_C.sum().clamp(min=1)
        return float(to_host(length)), float(to_host(self.size_C.max()))

    def outdated(self, fit: tuple[float, float]) -> bool:
        """Return whether rows have moved so far since `fit` that cells must be fitted again."""
        length, crowd = self.fit()
        lost = 1 - length > FIT_LOST * max(1 - fit[0], FIT_LEAST)
        return lost or crowd > CROWDED * fit[1]

    def check(self) -> tuple[bool, str]:
        """Compute the sums again. Return (True, ""), or (False, the first wrong cell)."""
        for cell in range(len(self.centre_CA)):
            row_nA = self.rows(self.slots(cell))
            off = float((sum_rows(row_nA) - self.sum_CA[cell]).abs().max())
            if not off <= 1e-6 * max(1, len(row_nA)):  # it may be NaN
                return False, f"cell {cell}: the sum of its rows is off by {off:.3g}"
        return True, ""


def blocks(rows: int, columns: int) -> Iterator[slice]:
    """Return slices of rows with this number of columns to hold at a time."""
    step = max(1, BLOCK_ELEMENTS // columns)
    return (slice(start, start + step) for start in range(0, rows, step))


def without_(value_NC: Tensor, cell_N: Tensor) -> Tensor:
    """Write 0 for the cell of each row that has a cell, and return the values."""
    kept_N1 = (cell_N == NOWHERE)[:, None]
    place_N1 = cell_N.clamp(min=0)[:, None]
    return value_NC.scatter_(1, place_N1, value_NC.gather(1, place_N1).where(kept_N1, 0.0))


def by_cell(cell_N: Tensor) -> dict[int, Tensor]:
    """Return the rows of each cell."""
    sorted_N, order_N = cell_N.sort(stable=True)
    cell, size = to_host(torch.stack(torch.unique_consecutive(sorted_N, return_counts=True)))
    found = dict(zip(cell.tolist(), torch.split(order_N, size.tolist()), strict=True))
    found.pop(NOWHERE, None)
    return found
