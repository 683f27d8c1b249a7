"""Most duplicated by approximate counts, for memories too large to count exactly.

Shapes: B newcomers, C cells, D embedding, K slots, k occupied slots, N rows, Q places on the pool.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memory.columns import Columns
from memory.duel.approximate_state import load, save
from memory.duel.candidate_pool import SHORTLIST_ROWS, CandidatePool
from memory.duel.cells_check import check
from memory.duel.cells_counts import LEAST_CHANGES, TURNOVER, CellCounts
from memory.duel.cells_grid import MOST_CELLS, Matrix, Vector
from memory.scores import Linear, Score

TAKEN = 256
"""Most newcomers decided on at a time."""

WRONG = 0.25
"""Mean relative error of the counts above which `check` finds them wrong."""

CROSSOVER = 32_768
"""Slots from which approximate counts are worth their error on a CPU; see `pick`."""


@dataclass(frozen=True, slots=True)
class Error:
    """Approximate counts against exact ones of the same rows.

    Attributes:
        mean: of |approximate - exact| / exact over the sampled slots.
        worst: the largest of them.
        bias: mean of (approximate - exact) / exact: an error that all share evicts nobody wrongly.
        sampled: how many slots.
    """

    mean: float
    worst: float
    bias: float
    sampled: int


class ApproximateCounts:
    """Duplicate counts by an index of cells, and who has the largest.

    Rows of like direction form a cell. Rows of near cells are counted one by one, those of far
    cells by the cell's count, mean and spread, as a multipole method does. A newcomer costs
    O(C D) and its share of a flush; nothing of K x B is held. Built when first asked.

    Args:
        columns: of the memory; rows are read from them.
        score: h.
        cells: C; 2 sqrt(K) where not given.
        near: cells counted row by row, at least 1 (the row's own); more is dearer and more exact.
        compete: newcomers may be refused (DUEL, Algorithm 1).
        seed: of the clustering.

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
        near: int = 4,
        compete: bool = False,
        seed: int = 0,
    ) -> None:
        if near < 1 or (cells is not None and not 1 <= cells <= MOST_CELLS):
            raise ValueError(
                f"{cells} cells, {near} near: cells must lie in [1, {MOST_CELLS}], near above 0"
            )
        self._columns, self._score, self._compete = columns, score, compete
        self._cells = cells or min(MOST_CELLS, 2 * math.isqrt(columns.capacity) or 1)
        self._near, self._seed = near, seed
        self._counts: CellCounts | None = None
        self._pool: CandidatePool | None = None

    @property
    def counts_by_cell(self) -> CellCounts:
        """Built where there is none, or where it was built for less than half of the rows."""
        if self._counts is None or 2 * self._counts.fitted_to < self._columns.occupied:
            self.recount()
        assert self._counts is not None
        return self._counts

    def recount(self) -> None:
        """Fit the cells and count every slot anew."""
        self._pool = None
        self._counts = CellCounts(self._columns, self._score, self._cells, self._near, self._seed)

    def on_insert(self, z_BD: Tensor) -> None:
        occupied = self._columns.occupied
        self._pool = None
        if self._counts is not None and len(z_BD):
            slots = np.arange(occupied - len(z_BD), occupied)
            self._counts.replace(slots, None, on_host(z_BD))
            if self._counts.due:
                self._counts.flush()

    def choose(self, z_BD: Tensor) -> Tensor:
        """Slots of the first newcomers, at most TAKEN; -1 refuses."""
        counts, pool = self._ready()
        x_BD = on_host(z_BD[:TAKEN])
        seen = counts.moments().see(x_BD)
        far_B, near_B = counts.newcomers(seen)
        outcome = pool.take(x_BD, far_B + near_B, counts, self._compete)
        if len(outcome.slots):
            line = counts.replace(
                outcome.slots, outcome.before_ND, x_BD[outcome.newest_N], seen.of(outcome.newest_N)
            )
            pool.moved(line, counts)
        return torch.tensor(outcome.plan, dtype=torch.int64)

    def _ready(self) -> tuple[CellCounts, CandidatePool]:
        counts = self.counts_by_cell
        if counts.due:
            counts.flush()
            self._pool = None
            if counts.grid.outdated:
                self.recount()
                counts = self.counts_by_cell
        if self._pool is None or self._pool.exhausted:
            self._pool = self._draw(counts)
        return counts, self._pool

    def _draw(self, counts: CellCounts) -> CandidatePool:
        """The largest counts of all and of every cell, counted anew after a flush.

        Of every cell, because evictions lower the counts of their own neighbourhood, and then
        another's lead.
        """
        count_k = self.counts().cpu().numpy()
        newcomers = max(LEAST_CHANGES, self._columns.capacity // TURNOVER)
        chosen_k = largest(count_k, newcomers + SHORTLIST_ROWS)
        members, edges = counts.grid.members()
        share = -(-newcomers // len(counts.grid.size_C))
        best = []
        for start, stop in itertools.pairwise(edges):
            slots = members[start:stop]
            chosen_k[slots[largest(count_k[slots], share)]] = True
            others = slots[~chosen_k[slots]]
            if len(others):
                best.append(others[count_k[others].argmax()])
        slots, outside = np.flatnonzero(chosen_k), np.sort(np.array(best, dtype=np.int64))
        row_QD, capacity = counts.rows(slots), self._columns.capacity
        if not counts.changed_K.any():
            counts.recount(slots, row_QD)
        return CandidatePool(
            slots,
            row_QD,
            counts.estimate(slots, row_QD),
            capacity,
            CandidatePool(outside, counts.rows(outside), count_k[outside], capacity),
        )

    def on_update(self, slots: Tensor, before_RD: Tensor) -> None:
        if self._counts is None or len(slots) == 0:
            return
        counts, slots_N = self._counts, slots.cpu().numpy()
        z_ND = counts.rows(slots_N)
        line = counts.replace(slots_N, on_host(before_RD), z_ND)
        if counts.due:
            counts.flush()
            self._pool = None
        if self._pool is not None:
            self._pool.refreshed(slots_N, z_ND, line, counts)

    def counts(self) -> Tensor:
        """Approximate N(j) of the occupied slots, float64 [k]."""
        occupied, device = self._columns.occupied, self._columns.device
        if occupied == 0:
            return torch.zeros(0, dtype=torch.float64, device=device)
        counts = self.counts_by_cell
        count_k = np.empty(occupied)
        for start in range(0, occupied, BLOCK_ROWS):
            slots = np.arange(start, min(start + BLOCK_ROWS, occupied))
            count_k[slots] = counts.estimate(slots, counts.rows(slots))
        # An estimate may fall below 0 where there is next to nothing to count.
        return torch.from_numpy(count_k.clip(min=0.0)).to(device)

    def total(self, z_BD: Tensor) -> Tensor:
        """sum_k h(z_b . m_k) by the moments of all cells, float64 [B]."""
        if self._columns.occupied == 0:
            return torch.zeros(len(z_BD), dtype=torch.float64, device=z_BD.device)
        seen = self.counts_by_cell.moments().see(on_host(z_BD))
        size_C = self.counts_by_cell.moments().size_C.to(z_BD.dtype)
        return (seen.value_NC @ size_C).to(torch.float64).to(z_BD.device)

    def error(self, sample: int = 256, seed: int = 0) -> Error:
        """Count a draw of slots exactly and compare. Costs `sample` x K similarities."""
        occupied = self._columns.occupied
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randperm(occupied, generator=generator)[:sample]
        if len(drawn) == 0:
            return Error(0.0, 0.0, 0.0, 0)
        z_ND = self._columns.descriptors[drawn.to(self._columns.device)]
        own_N = self._score.apply_((z_ND * z_ND).sum(dim=1)).to(torch.float64)
        exact_N = self._score.total(z_ND, self._columns.descriptor_kA) - own_N
        counts = self.counts_by_cell
        about_N = counts.estimate(drawn.numpy(), on_host(z_ND)).clip(min=0.0)
        off_N = (torch.from_numpy(about_N) - exact_N.cpu()) / exact_N.cpu().clamp(min=1.0)
        mean, worst = float(off_N.abs().mean()), float(off_N.abs().max())
        return Error(mean, worst, float(off_N.mean()), len(drawn))

    def check(self) -> tuple[bool, str]:
        if self._counts is None:
            return True, ""
        held, reason = check(self._counts)
        if not held:
            return held, reason
        error = self.error(sample=64)
        if error.mean > WRONG:
            return False, (
                f"counts of {error.sampled} slots are off by {error.mean:.3g} of the exact in the "
                f"mean and {error.worst:.3g} at worst: must be within {WRONG}; where they stay "
                'so, as with few slots or few duplicates, use index="exact"'
            )
        return True, ""

    def state(self) -> dict[str, Tensor]:
        return save(self._counts, self._pool)

    def load(self, state: dict[str, Tensor]) -> None:
        self._counts, self._pool = load(state, self._columns, self._score)


BLOCK_ROWS = 1 << 14
"""Slots estimated at a time."""


def largest(count_N: Vector, most: int) -> NDArray[np.bool_]:
    """Which are the `most` largest, all where there are no more, bool [N]."""
    chosen_N = np.full(len(count_N), len(count_N) <= most)
    if len(count_N) > most:
        chosen_N[np.argpartition(count_N, len(count_N) - most)[-most:]] = True
    return chosen_N


def on_host(z_ND: Tensor) -> Matrix:
    return np.ascontiguousarray(z_ND.detach().cpu().numpy())


def pick(capacity: int, score: Score, device: torch.device) -> Literal["exact", "ivf"]:
    """Exact counts, or "ivf" where that is at least three times as fast.

    Linear counts are exact and fast at any size. On a GPU a pass over the rows a batch is cheap.
    On a CPU exact counts cost a batch O(K), approximate ones O(sqrt(K)). Samples a second of one
    core's time, vMF(0.1), D = 128, batches of 256 from 20 unequal clusters:

    | K | exact | ivf |
    |---|---|---|
    | 4,096 | 8,100 | 8,500 |
    | 16,384 | 2,400 | 6,400 |
    | 32,768 | 900 | 5,500 |
    """
    if isinstance(score, Linear) or device.type != "cpu" or capacity < CROSSOVER:
        return "exact"
    return "ivf"
