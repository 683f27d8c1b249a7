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
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from stream_ssl.memory.columns import Columns
from stream_ssl.memory.compute import sum_in_float64, to_device, to_host
from stream_ssl.memory.duel.cells import NOWHERE, Cells, CountLines, Seen, blocks
from stream_ssl.memory.duel.simulate import kept_steps, simulate
from stream_ssl.memory.scores import Score
from stream_ssl.memory.shares import Groups, Turns

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

WRONG = 0.25
"""The share of slots, and the share of their counts, above which `check` reports an error."""

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


@dataclass(frozen=True, slots=True)
class Error:
    """The error of approximate counts against exact counts of the same rows.

    Attributes:
        mean: the mean of |approximate - exact| / exact over the sampled slots.
        worst: the largest of these values.
        bias: the mean of (approximate - exact) / exact. A common error of all slots causes no wrong
            eviction.
        wrong: the share of sampled slots that are off by more than WRONG.
        sampled: the number of sampled slots.
    """

    mean: float
    worst: float
    bias: float
    wrong: float
    sampled: int

    @classmethod
    def of(cls, count_N: Tensor, exact_N: Tensor) -> Error:
        """Return the error of these counts of slots, 0 without slots."""
        if not len(count_N):
            return cls(0.0, 0.0, 0.0, 0.0, 0)
        off_N = (count_N - exact_N) / exact_N.clamp(min=1.0)
        mean, worst = float(off_N.abs().mean()), float(off_N.abs().max())
        wrong = float((off_N.abs() > WRONG).double().mean())
        return cls(mean, worst, float(off_N.mean()), wrong, len(off_N))

    def reason(self) -> str:
        """Return why the counts are too inaccurate, or "" if they are not."""
        if self.wrong <= WRONG:
            return ""
        return (
            f"counts of {self.wrong:.0%} of {self.sampled} slots are off by more than {WRONG:.0%}, "
            f"in the mean by {self.mean:.3g} and at worst by {self.worst:.3g} of the exact; where "
            'they stay so, as with few slots or few duplicates, use index="exact"'
        )


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
            self._groups = Groups(shared, shared.of_shard(x_BA.device))
        try:
            return self._choose(self._ready().cells, x_TA, shared)
        finally:
            self._groups = None

    def _choose(self, cells: Cells, x_TA: Tensor, shared: Turns | None) -> Tensor:
        row_PA, pool_P = self._row_PA, self._pool_P
        near_TP = self._score.apply_(x_TA @ row_PA.T)
        cell_T = cells.of(x_TA)
        seen = cells.see(x_TA, cell_T)
        total_T = seen.total_N + sum_in_float64(near_TP, dim=1)

        few = self._candidates(near_TP)
        level = self.count_P.max()  # subtracted to save float32 precision
        row_WA, cell_W = torch.cat([row_PA[few], x_TA]), torch.cat([self._cell_P[few], cell_T])
        h_WW = similarities(row_WA, near_TP.index_select(1, few), self._score)
        count_c, count_T = (self.count_P[few] - level).to(h_WW), (total_T - level).to(h_WW)
        gate = None if shared is None else shared.gate(pool_P[few])
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
        self.count_P -= self._score.apply_(left_TA @ row_PA.T).sum(dim=0)
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
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randperm(self._columns.occupied, generator=generator)[:sample]
        drawn = drawn.to(self._columns.device)
        row_NA = self._columns.descriptors[drawn]
        exact_N = self._score.total(row_NA, self._columns.descriptor_kA) - self._score.own(row_NA)
        return Error.of(self.counts()[drawn], exact_N)

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
    h_cc, h_TT = score.apply_(row_cA @ row_cA.T), score.apply_(x_TA @ x_TA.T)
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
