"""An index's state as tensors, and an index from such a state.

Shapes: C cells, D embedding, K slots, M neighbours of a cell, Q places on the pool, R rows gone.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from memory.columns import Columns
from memory.duel.candidate_pool import CandidatePool
from memory.duel.cells_counts import CellCounts
from memory.duel.cells_grid import Grid
from memory.duel.cells_moments import LinearUpdate
from memory.scores import Score

COUNTS = ("near_K", "far_K", "changed_K", "excess_C")
"""Arrays of CellCounts."""

CELLS = ("near_CM", "size_C", "sum_CD", "along_C", "cell_K")
"""Arrays of Grid."""

LINES = ("shift_C", "slope_CD", "near_shift_C", "near_slope_CD")

BENCH = ("bench_slots", "bench_count", "outside_slots", "outside_count")

SCALARS = ("fit_trained", "crowd_trained")


def save(counts: CellCounts | None, pool: CandidatePool | None) -> dict[str, Tensor]:
    """Copies of everything that the index has worked out; empty tensors where it is not built."""
    nothing = torch.zeros(0)
    names = (*COUNTS, *CELLS, *LINES, "axis_CD", "gone_RD", "gone_R")
    state = dict.fromkeys((*names, *BENCH), nothing)
    state["fit"], state["built"] = torch.zeros(2, dtype=torch.float64), torch.zeros(3).long()
    if counts is not None:
        grid, line, near = counts.grid, counts.line, counts.near_line
        arrays = {name: getattr(counts, name) for name in COUNTS}
        arrays |= {name: getattr(grid, name) for name in CELLS}
        lines = (line.shift_C, line.slope_CD, near.shift_C, near.slope_CD)
        arrays |= dict(zip(LINES, lines, strict=True))
        arrays["gone_RD"] = np.concatenate([*counts.gone_RD, counts.rows(np.arange(0))])
        arrays["gone_R"] = np.concatenate([*counts.gone_R, grid.cell_K[:0]])
        state |= {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
        state["axis_CD"] = grid.axis_CD.clone()
        state["fit"] = torch.tensor([getattr(grid, name) for name in SCALARS], dtype=torch.float64)
        state["built"] = torch.tensor([1, counts.fitted_to, counts.next_cell])
    if pool is not None:
        nobody = np.empty(0, dtype=np.int64), np.empty(0)
        beyond = nobody if pool.outside is None else (pool.outside.slots, pool.outside.count_Q)
        for name, array in zip(BENCH, (pool.slots, pool.count_Q, *beyond), strict=True):
            state[name] = torch.from_numpy(array.copy())
    return state


def load(
    state: dict[str, Tensor], columns: Columns, score: Score
) -> tuple[CellCounts | None, CandidatePool | None]:
    """What `save` saved, for the rows in the columns. Nothing where it was not built, or where the
    rows have another dtype by now: then it is built anew when asked."""
    dtype = columns.descriptors.dtype
    if not int(state["built"][0]) or state["gone_RD"].dtype != dtype:
        return None, None
    arrays = {name: value.cpu().numpy().copy() for name, value in state.items()}
    grid = object.__new__(Grid)
    grid.axis_CD = state["axis_CD"].cpu().clone()
    for name in CELLS:
        setattr(grid, name, arrays[name])
    for name, value in zip(SCALARS, state["fit"].tolist(), strict=True):
        setattr(grid, name, value)
    counts = object.__new__(CellCounts)
    counts.take_over(columns, score, grid)
    for name in COUNTS:
        setattr(counts, name, arrays[name])
    _, counts.fitted_to, counts.next_cell = state["built"].tolist()
    shift_C, slope_CD, near_shift_C, near_slope_CD = (arrays[name] for name in LINES)
    counts.line, counts.near_line = (
        LinearUpdate(shift_C, slope_CD),
        LinearUpdate(near_shift_C, near_slope_CD),
    )
    counts.gone_RD, counts.gone_R = [arrays["gone_RD"]], [arrays["gone_R"]]
    if len(state["bench_slots"]) == 0:
        return counts, None
    slots, count, others, other_count = (arrays[name] for name in BENCH)
    outside = CandidatePool(others, counts.rows(others), other_count, columns.capacity)
    return counts, CandidatePool(slots, counts.rows(slots), count, columns.capacity, outside)
