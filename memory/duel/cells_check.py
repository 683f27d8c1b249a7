"""What must hold of an index exactly, approximate as its counts are.

Shapes: C cells, D embedding, N rows.
"""

from __future__ import annotations

import numpy as np

from memory.duel.cells_counts import CellCounts
from memory.duel.cells_grid import Matrix, Slots

SAMPLED = 32
"""Slots whose near cells are counted row by row."""


def check(counts: CellCounts) -> tuple[bool, str]:
    """Recount the cells' sums, and the near cells of some slots.

    Returns:
        (True, "") or (False, what is wrong, naming the cell or slot).
    """
    grid, eps = counts.grid, float(np.finfo(counts.rows(np.arange(0)).dtype).eps)
    members, edges = grid.members()
    for cell in range(len(grid.size_C)):
        row_ND = counts.rows(members[edges[cell] : edges[cell + 1]]).astype(np.float64)
        if len(row_ND) != grid.size_C[cell]:
            return False, f"cell {cell} holds {len(row_ND)} rows, counted {grid.size_C[cell]:.0f}"
        off = float(np.abs(row_ND.sum(axis=0) - grid.sum_CD[cell]).max(initial=0.0))
        if off > 1e-6 * max(1, len(row_ND)):
            return False, f"cell {cell}: the sum of its rows is off by {off:.3g}"
    held = np.flatnonzero((grid.cell_K >= 0) & ~counts.changed_K)
    for slot in held[:: max(1, len(held) // SAMPLED)]:
        anew, kept = near_sum(counts, int(slot), members, edges), float(counts.near_K[slot])
        if abs(anew - kept) > 4096 * eps * max(1.0, abs(anew)):
            return False, f"slot {slot}: rows of near cells sum to {anew:.9g}, kept {kept:.9g}"
    return True, ""


def near_sum(counts: CellCounts, slot: int, members: Slots, edges: Slots) -> float:
    """sum of h over the rows in the slot's near cells at the last flush, less its own."""
    grid = counts.grid
    z_1D = counts.rows(np.array([slot]))
    near = [cell for cell in grid.near_CM[grid.cell_K[slot]].tolist() if cell >= 0]
    total = -_sum(counts, z_1D, z_1D)
    for cell in near:
        slots = members[edges[cell] : edges[cell + 1]]
        total += _sum(counts, z_1D, counts.rows(slots[~counts.changed_K[slots]]))
    for gone_RD, gone_R in zip(counts.gone_RD, counts.gone_R, strict=True):
        total += _sum(counts, z_1D, gone_RD[np.isin(gone_R, near)])
    return total


def _sum(counts: CellCounts, a_ND: Matrix, b_MD: Matrix) -> float:
    return float(counts.similar(a_ND, b_MD).sum(dtype=np.float64))
