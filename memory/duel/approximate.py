"""Approximate duplicate counts, for memories too large to count exactly.

A pool of the slots with the largest counts is tracked exactly: every newcomer and every row that
leaves is counted against every row of the pool. The sequential rule is simulated among the best
rows of the pool. All other counts stay as they are until the next pool is drawn. Then the rows of a
slot's own cell are read one by one, and the rows of all other cells are counted by moments
(cells.py). Each row is thus read once per pool and not once per batch.

Known errors:
- Near rows are counted exactly within rounding, except in cells too large to read. Near rows of
  newcomers are counted only when the next pool is drawn: until then 5 % are missed if there are
  many copies.
- Far rows are counted by the size, mean and spread of their cells. Changes in between are
  approximated by a straight line in each cell. For 2 in 1,000 slots the line is off by a quarter or
  more. Every slot's far rows are counted again within K changes.
- The evicted slot may have 0.5 % (SLACK) less than the best slot outside the pool. For the first 32
  newcomers (FEWEST) of a pool there is no limit.
- `check` reports an error if more than a quarter of the counts are off by more than a quarter.

No bound is proven. On average, the evicted slots fell short of the largest count by 0.2 to 1.1 % of
it (python -m benchmarks.approximate).

Shapes: B newcomers, T of them at a time, A descriptor, C cells, K slots, k occupied slots, N rows,
P slots of the pool, R slots, c candidates, W = c + T columns.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from stream_ssl.memory.columns import Columns
from stream_ssl.memory.compute import sum_in_float64, to_device, to_host
from stream_ssl.memory.duel.cells import NOWHERE, Cells
from stream_ssl.memory.duel.count_error import Error
from stream_ssl.memory.duel.counts_by_cell import Changes, CountsByCell
from stream_ssl.memory.duel.simulate import kept_steps, simulate
from stream_ssl.memory.scores import Score
from stream_ssl.memory.shares import Gate, Groups, Turns

POOL_ROOTS, POOL_ROWS = 6, 8192
"""The size P of a pool is the first number times sqrt(K), at most the second.

The pool is read for each newcomer, and all other rows for each pool; this size minimises the total.
A pool serves at most as many changes as it has slots.
"""

NEWCOMERS = 256
"""The largest number of newcomers that are placed at a time."""

CANDIDATES = 256
"""The number of slots among which steps are simulated, besides as many as there are newcomers."""

SLACK = 0.005
"""The largest deficit of the evicted slot against a slot outside the pool, as a share of a count.

Beyond it, another pool is drawn.
"""

FEWEST = 32
"""The number of newcomers that every pool serves.

The counts outside a pool are too inaccurate to replace the pool earlier.
"""

MOST_CELLS = 1 << 15

FEW_CELLS, CELL_ROWS = 128, 512
"""The number of cells is K / 512, but at least 128 and at most sqrt(K).

Reading a slot's own cell then takes no longer than looking at all others. Below 4,096 slots there
are 2 sqrt(K) cells.
"""

CHECKED = 1024
"""The number of slots that `check` counts exactly, a different selection each time."""

CROSSOVER = 32_768
"""The number of slots from which approximate counts are worth their error on a CPU; see `pick`."""

KEPT = (
    *("numbers", "fit", "centres", "cells", "sums", "squares", "crowded", "far", "near"),
    *("pool", "pool_cells", "pool_counts", "most", "shift", "slope", "shift_mean"),
    *("came", "moves", "moves_cells", "moves_signs"),
)
"""The names of a state's entries. A state with other entries is of an earlier version."""


class ApproximateCounts:
    """Duplicate counts by cells, and the slots with the largest counts.

    The cells are built at once if there are rows, or else when the first rows arrive.

    Args:
        columns: the memory's columns, from which descriptors are read.
        score: h.
        cells: the number of cells C. None chooses it by the number of slots. Fewer cells are more
            exact and slower.
        compete: use Algorithm 1: a newcomer is counted with the others and may be refused.
        seed: the seed of the clustering.

    Attributes:
        count_P: the current counts of the slots of the pool.
        _all: the counts of all slots when the pool was drawn. Later changes are in `_changes`.
            `_most_C` is the largest count of each cell.
        _served: the number of changes since the pool was drawn.

    >>> from stream_ssl.memory.scores import VonMisesFisher
    >>> columns = Columns(3, 2)
    >>> columns.embeddings[:], columns.occupied = torch.eye(2)[[0, 1, 1]], 3
    >>> ApproximateCounts(columns, VonMisesFisher(0.1)).choose(torch.eye(2)[:1]).tolist()
    [1]
    """

    def __init__(
        self,
        columns: Columns,
        score: Score,
        cells: int | None = None,
        compete: bool = False,
        seed: int = 0,
    ) -> None:
        if cells is not None and not 1 <= cells <= MOST_CELLS:
            raise ValueError(f"{cells} cells: must lie in [1, {MOST_CELLS}]")
        self._columns, self._score, self._compete = columns, score, compete
        self._cell_count, self._seed = cells or default_cells(columns.capacity), seed
        self._all: CountsByCell | None = None
        self._groups: Groups | None = None  # slots that shares allow, while newcomers are placed
        self._shared = False  # whether the pool was drawn under shares
        if columns.occupied:
            self.recount()

    def _ready(self) -> CountsByCell:
        """Build the cells if there are none, or if they were fitted to less than half of the rows.

        Otherwise draw a new pool if the current pool is used up. Do not call this method to read
        counts, because reading must not affect evictions.
        """
        if self._all is None or 2 * self._all.fitted_to < self._columns.occupied:
            self.recount()
        elif self._exhausted or self._served >= len(self._pool_P) or self._unfit():
            self._draw_pool(self._all)
        assert self._all is not None
        return self._all

    def _unfit(self) -> bool:
        """Return whether the pool was drawn for other slots than those that may be taken now."""
        if self._groups is None or not self._shared:
            return self._shared != (self._groups is not None)
        open_n = self._groups.open_n
        there = torch.stack([open_n[self._pool_P].sum(), open_n.sum()])
        found, all_open = to_host(there).tolist()
        return bool(found < min(FEWEST, all_open))

    def recount(self) -> None:
        """Fit the cells and count every slot again."""
        self._all = CountsByCell.counted(self._columns, self._score, self._cell_count, self._seed)
        self._take_pool(self._all)

    def _draw_pool(self, counts: CountsByCell) -> None:
        """Update all counts, and move the slots with the largest counts out of their cells."""
        counts.cells.insert(self._pool_P, self._cell_P)
        if counts.cells.outdated(counts.fit):
            self.recount()
            return
        counts.add(self._changes, self._pool_P, self.count_P)
        counts.count_some(self._served)
        self._take_pool(counts)

    def _take_pool(self, counts: CountsByCell) -> None:
        """Move the slots with the largest counts out of their cells. The counts must be current."""
        cells, k = counts.cells, self._columns.occupied
        size = min(POOL_ROWS, max(NEWCOMERS + CANDIDATES, POOL_ROOTS * math.isqrt(k)), k)
        count_K = counts.far_K + counts.near_K
        self._shared = self._groups is not None
        if self._groups is None:
            self._set_pool(count_K[:k].topk(size).indices.sort().values)
        else:
            self._set_pool(self._groups.largest(count_K, max(1, size * 4 // 5)))
        self._cell_P = cells.cell_K[self._pool_P]
        self.count_P = cells.far(self._row_PA, self._cell_P) + counts.near_K[self._pool_P]
        cells.remove(self._pool_P)
        outside_K = cells.cell_K >= 0
        if self._groups is not None:
            outside_K = outside_K & self._groups.open_n
        outside = outside_K.nonzero()[:, 0]
        self._changes = Changes.none(cells)
        self._most_C = torch.full_like(self._changes.lines.mean_C, -torch.inf).scatter_reduce_(
            0, cells.cell_K[outside], count_K[outside], "amax"
        )
        self._served, self._exhausted = 0, False

    def _set_pool(self, pool_P: Tensor) -> None:
        self._pool_P, self._row_PA = pool_P, self._columns.descriptors.index_select(0, pool_P)
        self._place_K = torch.full((self._columns.capacity,), NOWHERE, device=pool_P.device)
        self._place_K[pool_P] = torch.arange(len(pool_P), device=pool_P.device)

    def choose(self, x_BA: Tensor, shared: Turns | None = None) -> Tensor:
        """Return the slots of the first newcomers, at most NEWCOMERS; -1 refuses.

        Args:
            x_BA: the newcomers.
            shared: the slots that shares allow for each newcomer. None allows all slots.
        """
        x_TA = x_BA[:NEWCOMERS]
        if shared is not None:
            shared = shared[: len(x_TA)]
            self._groups = Groups(shared, x_BA.device)
        try:
            return self._choose(self._ready().cells, x_TA, shared)
        finally:
            self._groups = None

    def _choose(self, cells: Cells, x_TA: Tensor, shared: Turns | None) -> Tensor:
        row_PA, pool_P = self._row_PA, self._pool_P
        near_TP = self._score.between(x_TA, row_PA)
        cell_T = cells.of(x_TA)
        seen = cells.see(x_TA, cell_T)
        total_T = seen.total_N + sum_in_float64(near_TP, dim=1)

        few = self._candidates(near_TP)
        level = self.count_P.max()  # subtracted to save float32 precision
        row_WA, cell_W = torch.cat([row_PA[few], x_TA]), torch.cat([self._cell_P[few], cell_T])
        h_WW = similarities(row_WA, near_TP.index_select(1, few), self._score)
        count_c, count_T = (self.count_P[few] - level).to(h_WW), (total_T - level).to(h_WW)
        gate = None if shared is None else Gate(shared, pool_P[few])
        leaving_T, most_T = simulate(count_c, count_T, h_WW, self._compete, gate)
        column_T, most_T = (to_device(of_T, row_WA.device) for of_T in (leaving_T, most_T))
        changes = self._changes
        outside = (self._most_C + changes.lines.mean_C).max()
        exhausted_T = most_T + level < (1 - SLACK) * outside
        exhausted_T[: max(1, FEWEST - self._served)].fill_(False)
        kept = kept_steps(leaving_T, exhausted_T, pool_P[few])

        turns = kept.held
        left_TA, left_T = row_WA[column_T[:turns]], cell_W[column_T[:turns]]
        self.count_P += near_TP[:turns].sum(dim=0)
        self.count_P -= self._score.between(left_TA, row_PA).sum(dim=0)
        h_TW = h_WW[len(few) : len(few) + turns]
        total_T = total_T[:turns] + h_TW[:, len(few) : len(few) + turns].sum(dim=1)
        total_T -= h_TW[:, column_T[:turns]].sum(dim=1)
        took_R, turn_R = to_device(kept.stands_2R, row_WA.device)
        place_R = few[took_R]
        self.count_P[place_R], self._row_PA[place_R] = total_T[turn_R], x_TA[turn_R]
        self._cell_P[place_R] = cell_T[turn_R]
        changes.came_K[pool_P[place_R]] = changes.count + turn_R
        changes.add(cells, x_TA[:turns], cell_T[:turns], 1, seen.first(turns))
        changes.add(cells, left_TA, left_T, -1)
        self._served += turns
        self._exhausted = turns < len(near_TP)
        return kept.plan

    def _candidates(self, near_TP: Tensor) -> Tensor:
        """Return the rows of the pool among which steps are simulated."""
        reach_P = self.count_P + 0.5 * near_TP.sum(dim=0)
        size = min(len(reach_P), CANDIDATES + len(near_TP))
        if self._groups is None:
            few: Tensor = reach_P.topk(size).indices.sort().values
            return few
        groups = self._groups.at(self._pool_P)
        first_P = self.count_P.masked_fill(~groups.first_n, -torch.inf)
        reach_P[first_P.argmax()[None]] = torch.inf
        return groups.largest(reach_P, size)

    def on_insert(self, descriptor_BA: Tensor) -> None:
        """Update the counts after newcomers filled the last of the occupied slots."""
        k = self._columns.occupied
        if self._all is not None:
            slots = torch.arange(k - len(descriptor_BA), k, device=self._columns.device)
            self._all.cells.insert(slots)
            self._take_up(self._all, slots, self._all.cells.cell_K[slots], descriptor_BA)
        if k:
            self._ready()

    def on_update(self, slots: Tensor, before_RA: Tensor) -> None:
        """Update the counts after these slots changed from the rows `before_RA`."""
        if self._all is None or 2 * len(slots) >= self._columns.occupied:
            if self._columns.occupied:
                self.recount()
            return
        cells, after_RA = self._all.cells, self._columns.descriptors[slots]
        cell_R, before_R = cells.of(after_RA), cells.cell_K[slots]
        inside = self._place_K[slots] >= 0
        place = self._place_K[slots[inside]]
        before_R[inside] = self._cell_P[place]
        self._row_PA[place], self._cell_P[place] = after_RA[inside], cell_R[inside]
        cells.remove(slots[~inside], before_RA[~inside])
        cells.insert(slots[~inside], cell_R[~inside])
        self.count_P -= self._score.total(self._row_PA, before_RA)
        self._changes.add(cells, before_RA, before_R, -1)
        self._take_up(self._all, slots, cell_R, after_RA)
        self._ready()

    def _take_up(self, counts: CountsByCell, slots: Tensor, cell_R: Tensor, row_RA: Tensor) -> None:
        """Record that these slots, in cells or in the pool, now hold these rows."""
        changes = self._changes
        changes.came_K[slots] = changes.count + torch.arange(len(slots), device=slots.device)
        changes.add(counts.cells, row_RA, cell_R, 1)
        self._served += len(slots)
        self.count_P += self._score.total(self._row_PA, row_RA)
        count_R = self.total(row_RA) - self._score.own(row_RA)
        inside = self._place_K[slots] >= 0
        self.count_P[self._place_K[slots[inside]]] = count_R[inside]
        slots, cell_R, count_R = slots[~inside], cell_R[~inside], count_R[~inside]
        counts.far_K[slots], counts.near_K[slots] = count_R - changes.lines.mean_C[cell_R], 0.0
        self._most_C.scatter_reduce_(0, cell_R, counts.far_K[slots], "amax")

    def counts(self) -> Tensor:
        """Return approximate N(j) of the occupied slots, float64 [k]."""
        k, device = self._columns.occupied, self._columns.device
        if k == 0:
            return torch.zeros(0, dtype=torch.float64, device=device)
        counts = self._all or self._ready()
        cell_k = counts.cells.cell_K[:k]
        count_k = counts.far_K[:k] + counts.near_K[:k]
        count_k += torch.where(cell_k >= 0, self._changes.lines.mean_C[cell_k], 0.0)
        count_k[self._pool_P] = self.count_P
        # An estimate may fall below 0 if the true count is near 0.
        return count_k.clamp_(min=0.0)

    def total(self, descriptor_BA: Tensor) -> Tensor:
        """Return approximate sum_k h(d_b . d_k), float64 [B]."""
        if self._columns.occupied == 0:
            return torch.zeros(len(descriptor_BA), dtype=torch.float64, device=descriptor_BA.device)
        cells = (self._all or self._ready()).cells
        cell_B = cells.of(descriptor_BA)
        in_cells_B = cells.far(descriptor_BA, cell_B) + cells.near(descriptor_BA, cell_B)
        return in_cells_B + self._score.total(descriptor_BA, self._row_PA)

    def error(self, sample: int = 256, seed: int = 0) -> Error:
        """Count a random selection of slots exactly and compare.

        The cost is `sample` x K similarities.
        """
        return Error.measured(self._columns, self._score, self.counts(), sample, seed)

    def check(self) -> tuple[bool, str]:
        """Return (True, ""), or (False, the error found in the cells or in the counts)."""
        if self._all is None:
            return True, ""
        held, reason = self._all.cells.check()
        if held:
            reason = self.error(CHECKED, seed=self._all.owed + self._served).reason()
        return not reason, reason

    def state(self) -> dict[str, Tensor]:
        """Return the state from which `load` continues bit-equal."""
        if self._all is None:
            return {"search.seed": torch.tensor([self._seed])}
        counts, flags = self._all, self._exhausted + 2 * self._shared
        numbers = [counts.fitted_to, counts.next_cell, counts.owed, self._served, flags]
        own = {
            "numbers": torch.tensor(numbers),
            "seed": torch.tensor([self._seed]),
            "most": self._most_C,
            "pool": self._pool_P,
            "pool_cells": self._cell_P,
            "pool_counts": self.count_P,
        }
        entries = own | counts.state() | self._changes.state()
        return {f"search.{name}": value.clone() for name, value in entries.items()}

    def load(self, state: dict[str, Tensor]) -> None:
        """Restore a result of `state`.

        If the state has another form, or rows of another dtype, everything is counted again.
        """
        columns = self._columns
        found = {name.removeprefix("search."): value for name, value in state.items()}
        written = found.pop("seed", torch.empty(0)).tolist()  # an earlier version wrote none
        self._seed = int(written[0]) if written else self._seed
        whole = set(found) == set(KEPT) and fits(found, columns.capacity)
        if not whole or found["moves"].dtype != columns.descriptors.dtype:
            self._all = None
            if columns.occupied:
                self.recount()
            return
        fitted_to, next_cell, owed, self._served, flags = found["numbers"].tolist()
        self._exhausted, self._shared = bool(flags & 1), bool(flags & 2)
        here = {name: value.to(columns.device, copy=True) for name, value in found.items()}
        self._all = CountsByCell(Cells.restored(columns, self._score, here), self._score, fitted_to)
        self._all.next_cell, self._all.owed = next_cell, owed
        self._all.load(here)
        self._set_pool(here["pool"])
        self.count_P, self._cell_P = here["pool_counts"], here["pool_cells"]
        self._most_C = here["most"]
        self._changes = Changes.restored(here)


def default_cells(capacity: int) -> int:
    """Return the number of cells of a memory with this number of slots, see FEW_CELLS."""
    root = math.isqrt(capacity)
    return min(2 * root, max(FEW_CELLS, min(root, capacity // CELL_ROWS)))


def similarities(row_WA: Tensor, h_Tc: Tensor, score: Score) -> Tensor:
    """Return h between candidates and newcomers, [W, W], with a diagonal of 0.

    Args:
        row_WA: the rows.
        h_Tc: h between newcomers and candidates, which is known.
        score: h.
    """
    row_cA, x_TA = torch.split(row_WA, [h_Tc.shape[1], len(h_Tc)])
    h_cc, h_TT = score.between(row_cA, row_cA), score.between(x_TA, x_TA)
    h_WW = torch.cat([torch.cat([h_cc, h_Tc.T], 1), torch.cat([h_Tc, h_TT], 1)])
    return h_WW.fill_diagonal_(0)


def fits(found: dict[str, Tensor], capacity: int) -> bool:
    """Return whether the lengths of a state's entries agree."""
    size = {name: len(value) for name, value in found.items()}
    alike = (
        {size["numbers"], 5},
        {size["fit"], 2},
        {size[name] for name in ("cells", "far", "near", "came")} | {capacity},
        {size[name] for name in ("centres", "sums", "squares", "crowded", "most")},
        {size[name] for name in ("centres", "shift", "slope", "shift_mean")},
        {size[name] for name in ("pool", "pool_cells", "pool_counts")},
        {size[name] for name in ("moves", "moves_cells", "moves_signs")},
    )
    return all(len(sizes) == 1 for sizes in alike)


def pick(capacity: int, device: torch.device) -> Literal["exact", "ivf"]:
    """Return "exact", or "ivf" if approximate counts are several times as fast.

    On a GPU, one pass over the rows per batch is cheap. On a CPU, exact counts cost O(K) per batch.
    Approximate counts cost O(sqrt(K)) per batch and a pass over the rows per pool. The table shows
    samples a second of one core's time, with vMF(0.1), D = 128, and batches of 256 from 20 unequal
    clusters (python -m benchmarks.approximate):

    | K | exact | ivf |
    |---|---|---|
    | 16,384 | 2,400 | 13,000 |
    | 65,536 | 800 | 11,500 |
    | 262,144 | | 7,500 |
    | 1,048,576 | | 4,600 |
    """
    if device.type != "cpu" or capacity < CROSSOVER:
        return "exact"
    return "ivf"
