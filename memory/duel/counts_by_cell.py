"""The counts of all slots when a pool was drawn, by cells, and the changes since then.

Shapes: A descriptor, C cells, K slots, N rows, P slots of the pool, R slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stream_ssl.memory.columns import Columns
from stream_ssl.memory.duel.cells import NOWHERE, Cells, CountLines, Seen, blocks
from stream_ssl.memory.scores import Score


class Changes:
    """The rows that came and left since the pool was drawn.

    Args:
        lines: the changes of the counts in each cell.
        came_K: the entry of the rows that a slot holds now; NOWHERE if its row was there before.
        row_RA, cell_R, sign_R: the rows with their cells, and 1 for a row that came or -1 for a row
            that left.
    """

    def __init__(
        self, lines: CountLines, came_K: Tensor, row_RA: Tensor, cell_R: Tensor, sign_R: Tensor
    ) -> None:
        self.lines, self.came_K, self.count = lines, came_K, len(row_RA)
        self._parts = [(row_RA, cell_R, sign_R)]

    @classmethod
    def none(cls, cells: Cells) -> Changes:
        """Return no changes."""
        none_R = cells.cell_K[:0]
        none_RA = cells.rows(none_R)
        came_K = torch.full_like(cells.cell_K, NOWHERE)
        return cls(cells.no_lines(), came_K, none_RA, none_R, none_RA[:, 0])

    def add(
        self, cells: Cells, row_RA: Tensor, cell_R: Tensor, sign: int, seen: Seen | None = None
    ) -> None:
        """Record that these rows of these cells joined the memory, or left it if the sign is -1."""
        if seen is not None:
            self.lines.add(seen, row_RA, sign)
        else:
            for part in blocks(len(row_RA), len(cells.centre_CA)):
                self.lines.add(cells.see(row_RA[part], cell_R[part]), row_RA[part], sign)
        self._parts.append((row_RA, cell_R, torch.full_like(row_RA[:, 0], sign)))
        self.count += len(row_RA)

    def rows(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return all rows, their cells and their signs."""
        row_RA, cell_R, sign_R = (torch.cat(parts) for parts in zip(*self._parts, strict=True))
        return row_RA, cell_R, sign_R

    def state(self) -> dict[str, Tensor]:
        row_RA, cell_R, sign_R = self.rows()
        lines = self.lines
        return {
            "shift": lines.shift_C,
            "slope": lines.slope_CA,
            "shift_mean": lines.mean_C,
            "came": self.came_K,
            "moves": row_RA,
            "moves_cells": cell_R,
            "moves_signs": sign_R,
        }

    @classmethod
    def restored(cls, state: dict[str, Tensor]) -> Changes:
        """Return the changes of a result of `state`."""
        lines = CountLines(state["shift"], state["slope"], state["shift_mean"])
        rows = (state[name] for name in ("moves", "moves_cells", "moves_signs"))
        return cls(lines, state["came"], *rows)


class CountsByCell:
    """The counts of all slots when the pool was drawn, by cells.

    Args:
        cells: the cells, of all occupied slots.
        score: h.
        fitted_to: the number of rows to which the cells were fitted.

    Attributes:
        far_K, near_K: the counts from the rows of other cells, and from the rows of the slot's own
            cell, float64.
        fit: how well the cells fitted these rows, see `Cells.fit`.
        next_cell: the next cell to count again.
        owed: the work that is due until that cell is counted.
    """

    def __init__(self, cells: Cells, score: Score, fitted_to: int) -> None:
        self.cells, self._score, self.fitted_to = cells, score, fitted_to
        self.far_K = torch.zeros_like(cells.cell_K, dtype=torch.float64)
        self.near_K = torch.zeros_like(self.far_K)
        self.fit = cells.fit()
        self.next_cell = self.owed = 0

    @classmethod
    def counted(cls, columns: Columns, score: Score, cells: int, seed: int) -> CountsByCell:
        """Fit cells to the occupied slots and count every slot."""
        fitted = Cells.fitted(columns, score, cells, seed)
        found = cls(fitted, score, columns.occupied)
        for cell in range(len(fitted.centre_CA)):
            slots = fitted.slots(cell)
            row_NA, cell_N = fitted.rows(slots), fitted.cell_K[slots]
            found.far_K[slots] = fitted.far(row_NA, cell_N)
            found.near_K[slots] = fitted.near(row_NA, cell_N) - score.own(row_NA)
        return found

    def add(self, changes: Changes, pool_P: Tensor, count_P: Tensor) -> None:
        """Add the changes since the pool was drawn, and the counts of the pool's slots."""
        row_RA, cell_R, sign_R = changes.rows()
        far_K, near_K, near_R = self.cells.moved(changes.lines, row_RA, cell_R, sign_R)
        self.far_K += far_K
        self.near_K += near_K
        slots = (changes.came_K >= 0).nonzero()[:, 0]
        which_N = changes.came_K[slots]
        self.near_K[slots] = near_R[which_N] - self._score.own(row_RA[which_N])
        self.far_K[pool_P] = count_P - self.near_K[pool_P]
        self._count_far(slots)

    def count_some(self, served: int) -> None:
        """Count far rows again in the next cells, so that every cell is counted within K changes.

        These counts need it because their changes are approximated by a straight line. Near rows
        were read.

        Args:
            served: the number of changes since the pool was drawn. All slots must be in cells.
        """
        cells = len(self.cells.centre_CA)
        self.owed += served * cells
        turns, self.owed = divmod(self.owed, self.cells.occupied)
        for _ in range(min(turns, cells)):
            self._count_far(self.cells.slots(self.next_cell))
            self.next_cell = (self.next_cell + 1) % cells

    def state(self) -> dict[str, Tensor]:
        """Return all but the numbers of rows and work."""
        fit = torch.tensor(self.fit, dtype=torch.float64)
        return {"fit": fit, "far": self.far_K, "near": self.near_K, **self.cells.state()}

    def load(self, state: dict[str, Tensor]) -> None:
        """Restore a result of `state`, except the cells."""
        length, crowd = state["fit"].tolist()
        self.fit, self.far_K, self.near_K = (length, crowd), state["far"], state["near"]

    def _count_far(self, slots: Tensor) -> None:
        row_NA = self.cells.rows(slots)
        self.far_K[slots] = self.cells.far(row_NA, self.cells.cell_K[slots])
