"""Most duplicated by approximate counts, for memories too large to count exactly.

A pool of the slots with the largest counts is followed exactly: who comes and who leaves is counted
against every row of it, and the sequential rule is simulated among its best. All others stand still
until the next pool is drawn, so what they add to a count is known from their cells (cells.py), and
their own counts move with the mean of their cell.

No bound is guaranteed. Far cells are known by size, mean and spread; who leaves may lie SLACK below
the best that is known outside the pool; each slot is counted again at the latest after as many
changes as COUNTED_AGAIN times the slots; and `check` complains where counts are WRONG. Who left
fell short of the largest count by 0.5 to 1.2 % of it (python -m benchmarks.approximate).

Shapes: B newcomers, T of them at a time, A descriptor, C cells, K slots, k occupied slots, N rows,
P slots of the pool, R slots, c candidates, W = c + T columns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from memory.columns import Columns
from memory.compute import to_device
from memory.duel.cells import NOWHERE, Cells
from memory.duel.simulate import kept_steps, simulate
from memory.scores import Linear, Score

POOL_ROOTS, POOL_ROWS = 8, 8192
"""P is so many times sqrt(K), at most so many: the rows of a pool are read for each newcomer, all
others for each pool. A pool serves no more changes than it has slots."""

NEWCOMERS = 256
"""Most newcomers decided on at a time."""

CANDIDATES = 256
"""Among which steps are simulated, besides as many as there are newcomers."""

RECOUNTED = 1.25
"""Slots counted again for each that a pool takes, the best by what was known of them."""

COUNTED_AGAIN = 8
"""Changes a slot after which all slots have been counted again, a cell after the other."""

SLACK = 0.015
"""Share of a count by which who leaves may lie below a slot outside, or another pool is drawn."""

FEWEST = 32
"""Newcomers that every pool serves: counts outside are not known well enough for fewer."""

MOST_CELLS = 1 << 15

FEW_CELLS, CELL_ROWS = 128, 512
"""Cells are K / 512, but between 128 and sqrt(K): so reading near ones takes no longer than looking
at all. In a memory of less than 4,096 slots 2 sqrt(K), for coarser ones tell too little."""

WRONG = 0.25
"""Share of the slots that may be off by such a share of their counts before `check` complains."""

CHECKED = 1024
"""Slots that `check` counts exactly, others each time."""

CROSSOVER = 32_768
"""Slots from which approximate counts are worth their error on a CPU; see `pick`."""

KEPT = (
    *("numbers", "fit", "centres", "cells", "sums", "counts", "counted_since"),
    *("pool", "pool_counts", "followed", "shift", "most", "joined", "left"),
)
"""Names of a state's entries. One that has others is of an earlier version."""


@dataclass(frozen=True, slots=True)
class Error:
    """Approximate counts against exact ones of the same rows.

    Attributes:
        mean: of |approximate - exact| / exact over the sampled slots.
        worst: the largest of them.
        bias: mean of (approximate - exact) / exact: an error that all share evicts nobody wrongly.
        wrong: share of them that are off by more than WRONG.
        sampled: how many slots.
    """

    mean: float
    worst: float
    bias: float
    wrong: float
    sampled: int


class ApproximateCounts:
    """Duplicate counts by cells, and who has the largest. Built with the first rows.

    Args:
        columns: of the memory; descriptors are read from them.
        score: h.
        cells: C; where not given as the number of slots asks for.
        near: cells read row by row, at least 1; more is dearer and more exact.
        compete: Algorithm 1's form: a newcomer is counted with the others and may be refused.
        seed: of the clustering.

    Attributes:
        count_K: of slots in cells when the pool was drawn; what has moved them since is `_joined`,
            `_left`, and in the mean over each cell `_shift_C`. `_most_C` is the largest of a cell.
        count_P: of the slots of the pool, now. `_followed_P`: they hold who they did when it was
            drawn; newcomers were counted from afar, but for the pool.
        _served: changes since then; `_changes` since the beginning.
        _counted_since: slots of cells that were counted since.

    >>> from memory.scores import VonMisesFisher
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
        near: int = 2,
        compete: bool = False,
        seed: int = 0,
    ) -> None:
        if near < 1 or (cells is not None and not 1 <= cells <= MOST_CELLS):
            raise ValueError(
                f"{cells} cells, {near} near: cells must lie in [1, {MOST_CELLS}], near above 0"
            )
        self._columns, self._score, self._compete = columns, score, compete
        root = math.isqrt(columns.capacity)
        number = min(2 * root, max(FEW_CELLS, min(root, columns.capacity // CELL_ROWS)))
        self._cell_count = cells or number
        self._near, self._seed = near, seed
        self._cells: Cells | None = None

    def _ready(self) -> Cells:
        """Build the cells where there are none, or for less than half of the rows; draw a pool
        where the last has served. Not where counts are only read: that may not change who leaves.
        """
        if self._cells is None or 2 * self._fitted_to < self._columns.occupied:
            self.recount()
        elif self._exhausted or self._served >= len(self._pool_P):
            self._draw_pool()
        assert self._cells is not None
        return self._cells

    def recount(self) -> None:
        """Fit the cells and count every slot anew."""
        columns = self._columns
        self.count_K = torch.zeros(columns.capacity, dtype=torch.float64, device=columns.device)
        self._take_pool(torch.zeros(0, dtype=torch.int64, device=columns.device))
        self.count_P, self._followed_P = self.count_K[:0], self._pool_P.to(torch.bool)
        self._changes = self._counted_cells = 0  # since the beginning
        cells = self._fit()
        for cell in range(len(cells.centre_CA)):
            self._count(cells.slots(cell))
        self._draw_pool()

    def _fit(self) -> Cells:
        columns = self._columns
        cells = Cells.fitted(columns, self._score, self._cell_count, self._near, self._seed)
        self._cells, self._fitted_to, self._fit_then = cells, columns.occupied, cells.fit()
        return cells

    def _count(self, slots: Tensor) -> None:
        """Count these slots of cells from nothing. No pool is drawn."""
        assert self._cells is not None
        if len(slots):
            row_NA = self._columns.descriptors[slots]
            self.count_K[slots] = self._cells.total(row_NA) - self._score.own(row_NA)

    def _count_some(self) -> None:
        """Count again the cells whose turn it is."""
        assert self._cells is not None
        self._changes += self._served
        cells = len(self._cells.centre_CA)
        due = self._changes * cells // (COUNTED_AGAIN * self._columns.occupied)
        due = min(due, self._counted_cells + cells)
        for cell in range(self._counted_cells, due):
            self._count(self._cells.slots(cell % cells))
        self._counted_cells = due

    def _start(self) -> None:
        """Nothing has changed since."""
        assert self._cells is not None
        none_RA = self._columns.descriptors[:0]
        self._joined, self._left = [none_RA], [none_RA]
        self._counted_since = [self._pool_P[:0]]
        self._shift_C = torch.zeros_like(self._cells.sum_CA[:, 0])
        self._served, self._exhausted = 0, False

    def _draw_pool(self) -> None:
        """Take the slots of the largest counts out of the cells, after counting them again."""
        assert self._cells is not None
        k = self._columns.occupied
        known_K = torch.zeros_like(self.count_K, dtype=torch.bool)
        again_K = torch.zeros_like(known_K)
        if len(self._pool_P):
            self.count_K += self._cells.moved(torch.cat(self._joined), torch.cat(self._left))
            self._cells.insert(self._pool_P)
            self.count_K[self._pool_P] = self.count_P
            known_K[self._pool_P] = self._followed_P
            again_K[self._pool_P] = ~self._followed_P  # what is near to newcomers nobody has read
            again_K[torch.cat(self._counted_since)] = True
            if self._cells.outdated(self._fit_then):
                self._fit()
            self._count_some()
        cells = self._cells
        size = min(POOL_ROWS, max(NEWCOMERS + CANDIDATES, POOL_ROOTS * math.isqrt(k)), k)
        again_K[self.count_K[:k].topk(min(k, int(RECOUNTED * size))).indices] = True
        self._count((again_K & ~known_K).nonzero()[:, 0])
        best = again_K.nonzero()[:, 0]
        count_N = self.count_K[best]
        chosen = count_N.topk(size).indices.sort().values
        self._take_pool(best[chosen])
        self.count_P = count_N[chosen]
        cells.remove(self._pool_P)
        outside = (cells.cell_K >= 0).nonzero()[:, 0]
        self._most_C = torch.full_like(cells.sum_CA[:, 0], -torch.inf).scatter_reduce_(
            0, cells.cell_K[outside], self.count_K[outside], "amax"
        )
        self._followed_P = torch.ones_like(self._pool_P, dtype=torch.bool)
        self._start()

    def _take_pool(self, pool_P: Tensor) -> None:
        self._pool_P, capacity = pool_P, self._columns.capacity
        self._place_K = torch.full((capacity,), NOWHERE, device=pool_P.device)
        self._place_K[pool_P] = torch.arange(len(pool_P), device=pool_P.device)

    def choose(self, x_BA: Tensor) -> Tensor:
        """Slots of the first newcomers, at most NEWCOMERS; -1 refuses."""
        cells, x_TA = self._ready(), x_BA[:NEWCOMERS]
        row_PA = self._columns.descriptors[self._pool_P]
        near_TP = self._score.apply_(x_TA @ row_PA.T)
        mean_TC = cells.means(x_TA)
        total_T = mean_TC.to(torch.float64) @ cells.size_C.to(torch.float64)
        total_T += near_TP.sum(dim=1, dtype=torch.float64)

        reach_P = self.count_P + 0.5 * near_TP.sum(dim=0)
        size = min(len(reach_P), CANDIDATES + len(x_TA))
        few = reach_P.topk(size).indices.sort().values
        level = self.count_P.max()  # so that float32 tells the counts apart
        row_WA = torch.cat([row_PA[few], x_TA])
        h_WW = self._score.apply_(row_WA @ row_WA.T).fill_diagonal_(0)
        count_c, count_T = (self.count_P[few] - level).to(h_WW), (total_T - level).to(h_WW)
        column_T, left_T = simulate(count_c, count_T, h_WW, self._compete)
        outside = (self._most_C + self._shift_C).max()
        exhausted_T = left_T + level < (1 - SLACK) * outside
        exhausted_T[: max(1, FEWEST - self._served)] = False
        kept = kept_steps(column_T, exhausted_T, self._pool_P[few])

        turns = kept.held
        x_TA, left_TA = x_TA[:turns], row_WA[column_T[:turns]]
        self._exchange(x_TA, mean_TC[:turns], left_TA)
        self.count_P += near_TP[:turns].sum(dim=0)
        self.count_P -= self._score.apply_(left_TA @ row_PA.T).sum(dim=0)
        h_TW = h_WW[size : size + turns]
        total_T = total_T[:turns] + h_TW[:, size : size + turns].sum(dim=1)
        total_T -= h_TW[:, column_T[:turns]].sum(dim=1)
        took_R, turn_R = to_device(kept.stands_2R, row_WA.device)
        self.count_P[few[took_R]] = total_T[turn_R]
        self._followed_P[few[took_R]] = False
        self._exhausted = turns < len(near_TP)
        return kept.plan

    def _exchange(self, joined_RA: Tensor, mean_RC: Tensor, left_RA: Tensor) -> None:
        """These rows have joined the memory, of this mean h with each cell, and those have left."""
        assert self._cells is not None
        self._shift_C += mean_RC.sum(dim=0, dtype=torch.float64)
        self._shift_C -= self._cells.means(left_RA).sum(dim=0, dtype=torch.float64)
        self._joined.append(joined_RA)
        self._left.append(left_RA)
        self._served += max(len(joined_RA), len(left_RA))

    def on_insert(self, descriptor_BA: Tensor) -> None:
        """Newcomers fill the last of the occupied slots."""
        k = self._columns.occupied
        if self._cells is not None:
            slots = torch.arange(k - len(descriptor_BA), k, device=self._columns.device)
            self._cells.insert(slots)
            self._moved(slots, descriptor_BA, descriptor_BA[:0])
        if k:
            self._ready()

    def on_update(self, slots: Tensor, before_RA: Tensor) -> None:
        """These slots hold other rows than `before_RA` now."""
        if self._cells is None or 2 * len(slots) >= self._columns.occupied:
            if self._columns.occupied:
                self.recount()
            return
        outside = self._cells.cell_K[slots] >= 0
        self._cells.remove(slots[outside], before_RA[outside])
        self._cells.insert(slots[outside])
        self._moved(slots, self._columns.descriptors[slots], before_RA)
        self._ready()

    def _moved(self, slots: Tensor, after_RA: Tensor, before_RA: Tensor) -> None:
        """Take up that these slots have these rows now, and had those before, or none."""
        assert self._cells is not None
        cells, row_PA = self._cells, self._columns.descriptors[self._pool_P]
        self.count_P += self._score.total(row_PA, after_RA) - self._score.total(row_PA, before_RA)
        self._exchange(after_RA, cells.means(after_RA), before_RA)
        count_R = self.total(after_RA) - self._score.own(after_RA)
        place_R, cell_R = self._place_K[slots], cells.cell_K[slots]
        inside, outside = place_R >= 0, cell_R >= 0
        self.count_P[place_R[inside]] = count_R[inside]
        slots, cell_R, count_R = slots[outside], cell_R[outside], count_R[outside]
        self.count_K[slots] = count_R - self._shift_C[cell_R]
        self._counted_since.append(slots)
        self._most_C.scatter_reduce_(0, cell_R, self.count_K[slots], "amax")

    def counts(self) -> Tensor:
        """Approximate N(j) of the occupied slots, float64 [k]."""
        k, device = self._columns.occupied, self._columns.device
        if k == 0:
            return torch.zeros(0, dtype=torch.float64, device=device)
        cell_k = (self._cells or self._ready()).cell_K[:k]
        count_k = self.count_K[:k] + torch.where(cell_k >= 0, self._shift_C[cell_k], 0.0)
        count_k[self._pool_P] = self.count_P
        # An estimate may fall below 0 where there is next to nothing to count.
        return count_k.clamp_(min=0.0)

    def total(self, descriptor_BA: Tensor) -> Tensor:
        """sum_k h(d_b . d_k), float64 [B]."""
        if self._columns.occupied == 0:
            return torch.zeros(len(descriptor_BA), dtype=torch.float64, device=descriptor_BA.device)
        cells = self._cells or self._ready()
        total_B = cells.total(descriptor_BA)
        return total_B + self._score.total(descriptor_BA, self._columns.descriptors[self._pool_P])

    def error(self, sample: int = 256, seed: int = 0) -> Error:
        """Count a draw of slots exactly and compare. Costs `sample` x K similarities."""
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randperm(self._columns.occupied, generator=generator)[:sample]
        if len(drawn) == 0:
            return Error(0.0, 0.0, 0.0, 0.0, 0)
        drawn = drawn.to(self._columns.device)
        row_NA = self._columns.descriptors[drawn]
        exact_N = self._score.total(row_NA, self._columns.descriptor_kA) - self._score.own(row_NA)
        off_N = (self.counts()[drawn] - exact_N) / exact_N.clamp(min=1.0)
        mean, worst = float(off_N.abs().mean()), float(off_N.abs().max())
        wrong = float((off_N.abs() > WRONG).double().mean())
        return Error(mean, worst, float(off_N.mean()), wrong, len(drawn))

    def check(self) -> tuple[bool, str]:
        """(True, "") or (False, what is wrong, or how far the counts are off)."""
        if self._cells is None:
            return True, ""
        held, reason = self._cells.check()
        if not held:
            return held, reason
        error = self.error(CHECKED, seed=self._changes + self._served)
        if error.wrong > WRONG:
            return False, (
                f"counts of {error.wrong:.0%} of {error.sampled} slots are off by more than "
                f"{WRONG:.0%}, in the mean by {error.mean:.3g} and at worst by {error.worst:.3g} "
                "of the exact; where they stay so, as with few slots or few duplicates, use "
                'index="exact"'
            )
        return True, ""

    def state(self) -> dict[str, Tensor]:
        """What `load` needs to go on bit-equal; nothing where nothing is built."""
        if self._cells is None:
            return {}
        cells = self._cells
        numbers = [self._fitted_to, self._changes, self._counted_cells, self._served]
        values = (
            torch.tensor([*numbers, self._exhausted]),
            torch.tensor(self._fit_then, dtype=torch.float64),
            *(cells.centre_CA, cells.cell_K, cells.sum_CA),
            *(self.count_K, torch.cat(self._counted_since)),
            *(self._pool_P, self.count_P, self._followed_P, self._shift_C, self._most_C),
            *(torch.cat(self._joined), torch.cat(self._left)),
        )
        return {f"search.{n}": v.clone() for n, v in zip(KEPT, values, strict=True)}

    def load(self, state: dict[str, Tensor]) -> None:
        """Take over what `state` gave; all is counted anew for any other state that rows came with,
        or rows of another dtype."""
        columns = self._columns
        found = {name.removeprefix("search."): value for name, value in state.items()}
        whole = set(found) == set(KEPT) and fits(found, columns.capacity)
        if not whole or found["joined"].dtype != columns.descriptors.dtype:
            self._cells = None
            if columns.occupied:
                self.recount()
            return
        numbers, fit = found["numbers"].tolist(), found["fit"].tolist()
        self._fitted_to, self._changes, self._counted_cells, self._served, exhausted = numbers
        self._exhausted, self._fit_then = bool(exhausted), (fit[0], fit[1])
        here = {name: value.to(columns.device, copy=True) for name, value in found.items()}
        self._cells = Cells(columns, self._score, here["centres"], self._near)
        self._cells.cell_K, self._cells.sum_CA = here["cells"], here["sums"]
        self._cells.changed()
        self._take_pool(here["pool"])
        self.count_K, self.count_P = here["counts"], here["pool_counts"]
        self._followed_P, self._counted_since = here["followed"], [here["counted_since"]]
        self._shift_C, self._most_C = here["shift"], here["most"]
        self._joined, self._left = [here["joined"]], [here["left"]]


def fits(found: dict[str, Tensor], capacity: int) -> bool:
    """Whether the entries of a state are as long as each other."""
    size = {name: len(value) for name, value in found.items()}
    alike = (
        {size["numbers"], 5},
        {size["fit"], 2},
        {size["cells"], size["counts"], capacity},
        {size[name] for name in ("centres", "sums", "shift", "most")},
        {size[name] for name in ("pool", "pool_counts", "followed")},
    )
    return all(len(sizes) == 1 for sizes in alike)


def pick(capacity: int, score: Score, device: torch.device) -> Literal["exact", "ivf"]:
    """Exact counts, or "ivf" where that is several times as fast.

    Linear counts are exact and fast at any size. On a GPU a pass over the rows a batch is cheap.
    On a CPU exact counts cost a batch O(K), approximate ones O(sqrt(K)) and a pool's share of a
    pass. Samples a second of one core's time, vMF(0.1), D = 128, batches of 256 from 20 unequal
    clusters (python -m benchmarks.approximate):

    | K | exact | ivf |
    |---|---|---|
    | 16,384 | 2,400 | 9,700 |
    | 65,536 | 800 | 7,100 |
    | 262,144 | | 3,300 |
    | 1,048,576 | | 1,900 |
    """
    if isinstance(score, Linear) or device.type != "cpu" or capacity < CROSSOVER:
        return "exact"
    return "ivf"
