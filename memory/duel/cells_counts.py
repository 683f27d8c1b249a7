"""Duplicate counts of all slots from cells: near cells row by row, far ones by their moments.

N(i) = far(i) + near(i). A batch moves the counts of all slots of a cell by one straight line, which
is kept with the cell until the slots are next folded. The flush adds to `far` the part of the line
that far rows drew, and to `near` the similarities with near rows themselves. So each row is read
once a flush and not once a batch.

Shapes: C cells, D embedding, K slots, k occupied slots, N rows, R slots changed since the flush.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from memory.columns import Columns
from memory.duel.cells_grid import Cells, Grid, Matrix, Slots, Vector
from memory.duel.cells_moments import CellKernel, CellMoments, LinearUpdate
from memory.scores import Score

TURNOVER = 32
"""A flush is due after 1 / TURNOVER of the slots changed, and counts as many slots anew: so every
count is at most one turnover of the memory old."""

LEAST_CHANGES = 256
"""A flush is not worth its while for fewer."""


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
        grid = Grid(columns.descriptor_kA, columns.capacity, cells, near, seed)
        self.take_over(columns, score, grid)
        members, edges = self.grid.members()
        for cell in range(len(self.grid.size_C)):
            self._count_cell(cell, members, edges)

    def take_over(self, columns: Columns, score: Score, grid: Grid) -> None:
        """Start from these cells, with nothing counted."""
        self._columns, self._score, self.grid = columns, score, grid
        self.fitted_to, capacity = columns.occupied, columns.capacity
        self.far_K: Vector = np.zeros(capacity)  # at the last flush; of newcomers, less the lines
        self.near_K: Vector = np.zeros(capacity)
        self.changed_K: NDArray[np.bool_] = np.zeros(capacity, dtype=bool)
        self.excess_C: Vector = np.zeros(len(grid.size_C))  # mean of near(i) beyond the moments'
        self.next_cell = 0  # to be counted anew next
        self._clear()

    def _clear(self) -> None:
        cells, dim = self.grid.sum_CD.shape
        self.line = LinearUpdate(np.zeros(cells), np.zeros((cells, dim)))
        self.near_line = LinearUpdate(
            np.zeros(cells), np.zeros((cells, dim))
        )  # the part of near rows
        self.changed_K[:] = False
        self.gone_RD: list[Matrix] = []  # rows that stood at the last flush and have left
        self.gone_R: list[Cells] = []  # and their cells
        self._moments: CellMoments | None = None

    def rows(self, slots: Slots) -> Matrix:
        """Rows of these slots on the host."""
        z_KD = self._columns.descriptors
        if z_KD.device.type == "cpu":  # numpy gathers a few rows faster
            return np.asarray(z_KD.numpy()[slots])
        return np.asarray(z_KD[torch.from_numpy(slots).to(z_KD.device)].cpu().numpy())

    def similar(self, a_ND: Matrix, b_MD: Matrix) -> Matrix:
        """h of every pair, [N, M]."""
        cosine = torch.from_numpy(a_ND) @ torch.from_numpy(b_MD).T
        return np.asarray(self._score.apply_(cosine).numpy())

    def moments(self) -> CellMoments:
        """Of all rows that are held now."""
        if self._moments is None:
            dtype = self._columns.descriptors.dtype
            self._moments = CellMoments(self._score, self.grid, dtype)
        return self._moments

    @property
    def due(self) -> bool:
        """Whether enough has changed for a flush."""
        least = max(LEAST_CHANGES, self._columns.capacity // TURNOVER)
        return bool(np.count_nonzero(self.changed_K) >= least)

    def estimate(self, slots: Slots, z_ND: Matrix) -> Vector:
        """N of these slots, which hold these rows, float64 [N]."""
        count_N = self.far_K[slots] + self.near_K[slots]
        if self.changed_K.any():
            count_N += self.line.at(z_ND, self.grid.cell_K[slots])
        return np.asarray(count_N)

    def recount(self, slots: Slots, z_ND: Matrix) -> None:
        """Take the far counts of these slots anew. Right after a flush."""
        near_NM = self.grid.near_CM[self.grid.cell_K[slots]]
        self.far_K[slots], _ = self.moments().fields(z_ND, near_NM)

    def newcomers(self, seen: CellKernel) -> tuple[Vector, Vector]:
        """Far and near counts that these rows would have, each joining alone, float64 [N].

        Near rows are not read: what they have beyond their moments is taken to be as in the mean.
        """
        cell_N = seen.cell_N
        far_N, near_N = self.moments().split(seen.value_NC, self.grid.near_CM[cell_N])
        own_N = seen.value_NC.numpy()[np.arange(len(cell_N)), cell_N]
        return far_N, near_N + own_N + self.excess_C[cell_N]

    def replace(
        self,
        slots: Slots,
        before_ND: Matrix | None,
        after_ND: Matrix,
        seen: CellKernel | None = None,
    ) -> LinearUpdate:
        """These slots, all distinct, take new rows.

        Args:
            before_ND: their old rows; None for slots that were empty.
            seen: of the new rows by `moments()`, where already known.

        Returns:
            The line by which the counts of all other slots moved.
        """
        grid = self.grid
        seen = seen or self.moments().see(after_ND)
        far_N, near_N = self.newcomers(seen)
        near_N -= seen.value_NC.numpy()[np.arange(len(slots)), seen.cell_N]  # its own line has it
        line_N = self.line.at(after_ND, seen.cell_N)
        near_line_N = self.near_line.at(after_ND, seen.cell_N)
        self.far_K[slots] = far_N - (line_N - near_line_N)
        self.near_K[slots] = near_N - near_line_N
        moved, near = seen.line(after_ND, grid.near_CM)
        if before_ND is not None:
            left, near_left = (
                self.moments().see(before_ND, grid.cell_K[slots]).line(before_ND, grid.near_CM)
            )
            moved, near = moved.plus(left, -1), near.plus(near_left, -1)
            stood_N = ~self.changed_K[slots]
            self.gone_RD.append(before_ND[stood_N])
            self.gone_R.append(grid.cell_K[slots[stood_N]])
            grid.count_rows(before_ND, grid.cell_K[slots], -1.0)
        grid.count_rows(after_ND, seen.cell_N, 1.0)
        grid.cell_K[slots] = seen.cell_N
        self.changed_K[slots] = True
        self.line, self.near_line = self.line.plus(moved, 1), self.near_line.plus(near, 1)
        self._moments = None
        return moved

    def flush(self) -> None:
        """Take everything since the last flush into the slots, and count some of them anew."""
        slots_R = np.flatnonzero(self.changed_K)
        new_RD = self.rows(slots_R)
        joined = Reach(new_RD, self.grid.cell_K[slots_R], self.grid.near_CM)
        left = Reach(
            np.concatenate([*self.gone_RD, new_RD[:0]]),
            np.concatenate([*self.gone_R, self.grid.cell_K[:0]]),
            self.grid.near_CM,
        )
        self.near_K[slots_R] = -self._with_itself(new_RD)
        far_line = self.line.plus(self.near_line, -1)
        members, edges = self.grid.members()
        for cell in range(len(self.grid.size_C)):
            slots = members[edges[cell] : edges[cell + 1]]
            if len(slots):
                z_ND = self.rows(slots)
                slope_D = far_line.slope_CD[cell].astype(z_ND.dtype)
                self.far_K[slots] += far_line.shift_C[cell] + z_ND @ slope_D
                self._fold_near(slots, z_ND, slots_R, joined.at(cell), joined.z_RD)
                stayed = slots[~self.changed_K[slots]]
                if len(gone := left.at(cell)) and len(stayed):
                    h_NR = self.similar(z_ND[~self.changed_K[slots]], left.z_RD[gone])
                    self.near_K[stayed] -= h_NR.sum(axis=1)
        self._clear()
        self._count_some(members, edges)

    def _fold_near(
        self, slots: Slots, z_ND: Matrix, slots_R: Slots, arrived: Slots, z_RD: Matrix
    ) -> None:
        """Rows of a cell and newcomers near to it meet. Newcomers among the rows count there."""
        if len(arrived):
            h_NR = self.similar(z_ND, z_RD[arrived])
            self.near_K[slots] += np.where(self.changed_K[slots], 0.0, h_NR.sum(axis=1))
            self.near_K[slots_R[arrived]] += h_NR.sum(axis=0)

    def _with_itself(self, z_ND: Matrix) -> Vector:
        square_N = torch.from_numpy(np.einsum("nd,nd->n", z_ND, z_ND))
        return np.asarray(self._score.apply_(square_N).numpy(), dtype=np.float64)

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
        """Count the slots of one cell from nothing."""
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
        near_NM = self.grid.near_CM[np.full(len(slots), cell)]
        self.far_K[slots], smooth_N = self.moments().fields(z_ND, near_NM)
        self.excess_C[cell] = (near_N - smooth_N).mean()


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
