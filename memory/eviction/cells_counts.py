"""Duplicate counts of all slots from cells: near cells row by row, far ones by their lumps.

N(i) = field(i) + excess(i). The field is what the lumps of all cells add up to at the row. The
excess is what the rows of the near cells add up to beyond their lumps. A batch changes the field of
all slots of a cell by one straight line, kept with the cell until the slots are next folded. The
sums over near cells take a batch in at the fold too, exactly, so each row is read once a fold and
not once a batch.

Shapes: C cells, D embedding, K slots, k occupied slots, N rows, R slots changed since the fold.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from memory.columns import Columns
from memory.eviction.bounds import Matrix, Vector
from memory.eviction.cells_grid import Cells, Grid, Slots
from memory.eviction.cells_lumps import Lumps, Seen
from memory.scores import Score

TURNOVER = 32
"""A fold is due after 1 / TURNOVER of the slots changed, and counts as many slots anew: so every
count is at most one turnover of the memory old."""

LEAST_CHANGES = 512
"""A fold is not worth its while for fewer."""


@dataclass(frozen=True, slots=True)
class Line:
    """By how much a batch moved each count: shift[c] + slope[c] . z for a row z of cell c."""

    shift_C: Vector
    slope_CD: Matrix

    def at(self, z_ND: Matrix, cell_N: Cells) -> Vector:
        """By how much the counts of these rows moved, float64 [N]."""
        slope_ND = self.slope_CD[cell_N].astype(z_ND.dtype, copy=False)
        return np.asarray(self.shift_C[cell_N] + np.einsum("nd,nd->n", z_ND, slope_ND))


class CellCounts:
    """Approximate duplicate counts of the occupied slots of a memory.

    Args:
        columns: of the memory, with at least one row.
        score: h.
        cells: C.
        near: cells whose rows are counted one by one, the row's own included.
        seed: of the clustering.
    """

    def __init__(self, columns: Columns, score: Score, cells: int, near: int, seed: int) -> None:
        grid = Grid(columns.z_kD, columns.capacity, cells, near, seed)
        self.take_over(columns, score, grid)
        members, edges = self.grid.members()
        for cell in range(len(self.grid.size_C)):
            self._count_cell(cell, members, edges)
        self._settle_excess()

    def take_over(self, columns: Columns, score: Score, grid: Grid) -> None:
        """Start from these cells, with nothing counted."""
        self._columns, self._score, self.grid = columns, score, grid
        self.fitted_to, capacity = columns.occupied, columns.capacity
        self.near_K: Vector = np.zeros(capacity)  # sum over rows of near cells at the last fold
        self.field_K: Vector = np.zeros(capacity)  # at the last fold, less the line since
        self.excess_K: Vector = np.zeros(capacity)
        self.changed_K: NDArray[np.bool_] = np.zeros(capacity, dtype=bool)
        self.next_cell = 0  # to be counted anew next
        self._clear()

    def _clear(self) -> None:
        cells, dim = self.grid.sum_CD.shape
        self.line = Line(np.zeros(cells), np.zeros((cells, dim)))
        self.changed_K[:] = False
        self.gone_RD: list[Matrix] = []  # rows that stood at the last fold and have left
        self.gone_R: list[Cells] = []  # and their cells
        self._lumps: Lumps | None = None

    def rows(self, slots: Slots) -> Matrix:
        """Rows of these slots on the host."""
        z_KD = self._columns.embeddings
        if z_KD.device.type == "cpu":  # numpy gathers a few rows faster
            return np.asarray(z_KD.numpy()[slots])
        return np.asarray(z_KD[torch.from_numpy(slots).to(z_KD.device)].cpu().numpy())

    def similar(self, a_ND: Matrix, b_MD: Matrix) -> Matrix:
        """h of every pair, [N, M]."""
        cosine = torch.from_numpy(a_ND) @ torch.from_numpy(b_MD).T
        return np.asarray(self._score.apply_(cosine).numpy())

    def lumps(self) -> Lumps:
        """Of all rows that are held now."""
        if self._lumps is None:
            grid = self.grid
            self._lumps = Lumps(
                self._score,
                grid.size_C,
                grid.sum_CD,
                grid.along_C,
                grid.axis_CD,
                self._columns.embeddings.dtype,
            )
        return self._lumps

    @property
    def due(self) -> bool:
        """Whether enough has changed for a fold."""
        least = max(LEAST_CHANGES, self._columns.capacity // TURNOVER)
        return bool(np.count_nonzero(self.changed_K) >= least)

    def estimate(self, slots: Slots, z_ND: Matrix) -> Vector:
        """N of these slots, which hold these rows, float64 [N]."""
        count_N = self.field_K[slots] + self.excess_K[slots]
        if self.changed_K.any():
            count_N += self.line.at(z_ND, self.grid.cell_K[slots])
        return np.asarray(count_N)

    def recount(self, slots: Slots, z_ND: Matrix) -> Vector:
        """N of these slots with their field taken anew, which is kept."""
        field_N = self.lumps().field(z_ND)
        self.field_K[slots] = field_N - self.line.at(z_ND, self.grid.cell_K[slots])
        return np.asarray(field_N + self.excess_K[slots])

    def newcomers(self, seen: Seen) -> Vector:
        """N that these rows would have, each joining alone, float64 [N].

        Their near cells are not read: their excess is taken to be the mean of their cell's.
        """
        cell_N = seen.cell_N
        field_N = (seen.value_NC @ self.lumps().size_C.to(seen.value_NC.dtype)).numpy()
        own_N = seen.value_NC.numpy()[np.arange(len(cell_N)), cell_N]
        return np.asarray(field_N.astype(np.float64) + own_N + self.mean_excess_C[cell_N])

    def replace(
        self, slots: Slots, before_ND: Matrix | None, after_ND: Matrix, seen: Seen | None = None
    ) -> Line:
        """These slots, all distinct, take new rows.

        Args:
            before_ND: their old rows; None for slots that were empty.
            seen: of the new rows by `lumps()`, where already known.

        Returns:
            The line by which the counts of all other slots moved.
        """
        lumps, grid = self.lumps(), self.grid
        seen = seen or lumps.see(after_ND)
        cell_N = seen.cell_N
        shift_C = seen.offset_NC.sum(dim=0, dtype=torch.float64).numpy()
        slope_CD = (seen.slope_NC.T @ torch.from_numpy(after_ND)).numpy()
        if before_ND is not None:
            left = lumps.see(before_ND)
            shift_C = shift_C - left.offset_NC.sum(dim=0, dtype=torch.float64).numpy()
            slope_CD = slope_CD - (left.slope_NC.T @ torch.from_numpy(before_ND)).numpy()
            stood_N = ~self.changed_K[slots]
            self.gone_RD.append(before_ND[stood_N])
            self.gone_R.append(grid.cell_K[slots[stood_N]])
            grid.count_rows(before_ND, grid.cell_K[slots], -1.0)
        grid.count_rows(after_ND, cell_N, 1.0)
        grid.cell_K[slots] = cell_N
        self.changed_K[slots] = True
        field_N = (seen.value_NC @ lumps.size_C.to(seen.value_NC.dtype)).numpy()
        self.field_K[slots] = field_N.astype(np.float64) - self.line.at(after_ND, cell_N)
        self.excess_K[slots] = self.mean_excess_C[cell_N]
        self.line = Line(self.line.shift_C + shift_C, self.line.slope_CD + slope_CD)
        self._lumps = None
        return Line(shift_C, slope_CD)

    def fold(self) -> None:
        """Take everything since the last fold into the slots, and count some of them anew."""
        slots_R = np.flatnonzero(self.changed_K)
        new_RD = self.rows(slots_R)
        joined = Reach(new_RD, self.grid.cell_K[slots_R], self.grid.near_CM)
        left = Reach(
            np.concatenate([*self.gone_RD, new_RD[:0]]),
            np.concatenate([*self.gone_R, self.grid.cell_K[:0]]),
            self.grid.near_CM,
        )
        self.near_K[slots_R] = -self._with_itself(new_RD)
        members, edges = self.grid.members()
        for cell in range(len(self.grid.size_C)):
            slots = members[edges[cell] : edges[cell + 1]]
            if len(slots):
                self._fold_cell(cell, slots, slots_R, joined, left)
        self._clear()
        self._count_some(members, edges)
        self._settle_excess()

    def _fold_cell(
        self, cell: int, slots: Slots, slots_R: Slots, joined: Reach, left: Reach
    ) -> None:
        z_ND = self.rows(slots)
        slope_D = self.line.slope_CD[cell].astype(z_ND.dtype)
        self.field_K[slots] += self.line.shift_C[cell] + z_ND @ slope_D
        stayed_N = ~self.changed_K[slots]
        if len(arrived := joined.at(cell)):
            h_NR = self.similar(z_ND, joined.z_RD[arrived])
            self.near_K[slots] += np.where(stayed_N, h_NR.sum(axis=1), 0.0)
            self.near_K[slots_R[arrived]] += h_NR.sum(axis=0)
        if len(gone := left.at(cell)):
            h_NR = self.similar(z_ND, left.z_RD[gone])
            self.near_K[slots] -= np.where(stayed_N, h_NR.sum(axis=1), 0.0)
        self.excess_K[slots] = -self._near_field(cell, z_ND)

    def _near_field(self, cell: int, z_ND: Matrix) -> Vector:
        near = self.grid.near_CM[cell]
        return self.lumps().field(z_ND, torch.from_numpy(near[near >= 0].astype(np.int64)))

    def _with_itself(self, z_ND: Matrix) -> Vector:
        square_N = torch.from_numpy(np.einsum("nd,nd->n", z_ND, z_ND))
        return np.asarray(self._score.apply_(square_N).numpy(), dtype=np.float64)

    def _settle_excess(self) -> None:
        """Where `excess_K` holds what the lumps of near cells say, say what their rows say more."""
        occupied = self._columns.occupied
        self.excess_K[:occupied] += self.near_K[:occupied]
        cell_k, cells = self.grid.cell_K[:occupied], len(self.grid.size_C)
        total_C = np.bincount(cell_k, self.excess_K[:occupied], minlength=cells)
        self.mean_excess_C = total_C / np.maximum(1, np.bincount(cell_k, minlength=cells))

    def _count_some(self, members: Slots, edges: NDArray[np.int64]) -> None:
        """Count cells anew, in turn, until 1 / TURNOVER of the slots are."""
        counted = 0
        for _ in range(len(self.grid.size_C)):
            if counted * TURNOVER >= self._columns.capacity:
                break
            counted += int(edges[self.next_cell + 1] - edges[self.next_cell])
            self._count_cell(self.next_cell, members, edges)
            self.next_cell = (self.next_cell + 1) % len(self.grid.size_C)

    def _count_cell(self, cell: int, members: Slots, edges: NDArray[np.int64]) -> None:
        """Count the slots of one cell from nothing; only their lumps' excess is still to settle."""
        slots = members[edges[cell] : edges[cell + 1]]
        if len(slots) == 0:
            return
        z_ND = self.rows(slots)
        near_N = -self._with_itself(z_ND)
        for near in self.grid.near_CM[cell]:
            if near >= 0 and edges[near + 1] > edges[near]:
                others_MD = self.rows(members[edges[near] : edges[near + 1]])
                near_N += self.similar(z_ND, others_MD).sum(axis=1)
        self.near_K[slots] = near_N
        self.field_K[slots] = self.lumps().field(z_ND)
        self.excess_K[slots] = -self._near_field(cell, z_ND)


class Reach:
    """Rows by the cells that they are near to.

    Args:
        z_RD: the rows.
        cell_R: their cells.
        near_CM: cells near to each, -1 for none.
    """

    def __init__(self, z_RD: Matrix, cell_R: Cells, near_CM: Cells) -> None:
        self.z_RD = z_RD
        near_RM = near_CM[cell_R]
        row_P, place_P = np.nonzero(near_RM >= 0)
        cell_P = near_RM[row_P, place_P]
        order = np.argsort(cell_P, kind="stable")
        self._row_P = row_P[order]
        self._edge_C = np.searchsorted(cell_P[order], np.arange(len(near_CM) + 1))

    def at(self, cell: int) -> Slots:
        """Rows near to this cell."""
        return self._row_P[self._edge_C[cell] : self._edge_C[cell + 1]]
