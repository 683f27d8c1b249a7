"""Most duplicated under linear h, where the sum of all rows stands for all counts.

N(j) = (K - 1 + z_j . s - z_j . z_j) / 2 with s the sum of the rows, so the largest count is an
inner product search with the query s. Three nested sets keep it exact and cheap: a shortlist,
in which every newcomer's eviction is found; a pool on the host, from which shortlists are drawn;
the whole column, from which the pool is drawn. Each level bounds what lies outside it (bounds.py),
and is drawn anew only when its bound no longer proves the next step. A pool outlasts many batches,
so the column is read less than once a batch.

Where pools do not last, the column is swept (sweep.py): a shortlist goes on while no other slot has
more, which is looked up for some steps at once. And where even that fails, as among more copies of
one row than a shortlist holds, it is searched for each newcomer.

Shapes: B newcomers, D embedding, K slots, P rows of the pool, R slots refreshed, S shortlist.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from memory.columns import Columns
from memory.eviction.bounds import Ceiling, Matrix, Vector, rounding
from memory.eviction.shortlist import REFUSED, Pool, Shortlist, settle
from memory.eviction.sweep import Sweep
from memory.scores import BLOCK_ELEMENTS, sum_rows

POOL_ROWS = 8192
"""Largest pool. Its rows are read for each shortlist, the column for each pool."""

SHORTLIST_ROWS = 1024
"""Smallest shortlist. A smaller one saves little at a step, and lasts for fewer of them."""

POOL, SWEEP, SEARCH = range(3)
"""The ways, cheapest first."""

WORTH = 4
"""Steps for which a draw must serve. Where it does not, the next way is taken for a while."""

LONGEST = 1024
"""Most newcomers before the first way is tried again."""

RECOUNT_AFTER = 1 << 20
"""Newcomers and refreshed rows, besides four a slot, after which the sum is taken anew."""

NEWCOMERS = 1024
"""Most newcomers taken at a time."""


class LinearTally:
    """Duplicate counts by (1 + x) / 2, and who has the largest.

    Args:
        columns: of the memory. Rows are read from them when a pool is drawn.
        compete: a newcomer is counted with the others, and may be the one that leaves.
    """

    def __init__(self, columns: Columns, compete: bool = False) -> None:
        self._columns, self._compete = columns, compete
        self._pool: Pool | None = None
        self._shortlist: Shortlist | None = None  # of the pool; it may outlast a batch
        self._size = SHORTLIST_ROWS
        self._served = 0  # newcomers, by this pool
        self._way = POOL
        self._left = 0  # newcomers before POOL is tried again
        self._wait = [0, 0]  # how many they were when a POOL, and a SWEEP, last failed
        self.recount()

    def recount(self) -> None:
        """Sum anew, and so forget the rounding of all additions and subtractions since."""
        self._sum_D = sum_rows(self._columns.z_kD).cpu().numpy()
        self._radii = norms(self._columns.z_kD)
        self._since = 0

    def joined(self, z_BD: Tensor) -> None:
        self._sum_D += sum_rows(z_BD).cpu().numpy()
        self._widen(z_BD)
        self._draw_anew()

    def _draw_anew(self) -> None:
        self._pool = self._shortlist = None

    def choose(self, z_BD: Tensor) -> Tensor:
        """Slots of the first newcomers, at least one: as many as a pool can prove."""
        if self._since > 4 * self._columns.capacity + RECOUNT_AFTER:
            self.recount()
            self._draw_anew()
        z_BD = z_BD[:NEWCOMERS]
        self._widen(z_BD)
        x_BD = z_BD.cpu().numpy()
        plan: list[int] = []
        if self._left <= 0 and self._pool is None:
            self._way = POOL
        while not plan and self._way < SEARCH:
            self._take(x_BD, plan)
        if not plan:
            plan.append(self._search(x_BD[0]))
        self._left -= len(plan)
        self._since += len(plan)
        return torch.tensor(plan, dtype=torch.int64)

    def _take(self, x_BD: Matrix, plan: list[int]) -> None:
        """Place newcomers by shortlists of one pool, until all are placed or the pool is spent."""
        if self._pool is None:
            self._pool, self._served = self._draw_pool(), 0
        pool = self._pool
        while len(plan) < len(x_BD):
            if self._shortlist is None:
                size = len(pool) if self._way == SWEEP else min(self._size, len(pool))
                self._shortlist = Shortlist(pool, self._sum_D, size, self._radii, self._compete)
            shortlist, before = self._shortlist, len(plan)
            over = shortlist.run(x_BD[len(plan) :], self._sum_D, plan)
            self._served += len(plan) - before
            if over:
                return  # and it serves the next newcomers too
            self._shortlist = None
            # About the microseconds that a core takes to draw a shortlist, and for its steps.
            size = len(shortlist)
            draw, steps = len(pool) / 30 + size / 5 + 50, shortlist.taken * (size / 400 + 13)
            too_short = steps < 2 * draw
            if self._way == SWEEP or (too_short and shortlist.bounded_by_pool):
                self._give_up()
                return
            if too_short:
                self._size = 2 * size
            elif steps > 9 * draw:
                self._size = max(SHORTLIST_ROWS, int(0.8 * size))

    def _give_up(self) -> None:
        """Leave a pool that proves no more, and its way if it served too few."""
        self._draw_anew()
        if self._served >= WORTH:
            self._wait[self._way] = 0
        else:
            self._left = self._wait[self._way] = min(LONGEST, 2 * self._wait[self._way] + WORTH)
            self._way += 1

    def _draw_pool(self) -> Pool:
        z_KD, capacity = self._columns.embeddings, self._columns.capacity
        if capacity <= POOL_ROWS:
            everything = np.arange(capacity)
            nobody = Ceiling(self._sum_D, -math.inf, self._radii[1])
            return Pool(everything, np.array(z_KD.cpu().numpy()), capacity, nobody)
        gain_K, slack = self._gains()
        size = SHORTLIST_ROWS if self._way == SWEEP else POOL_ROWS
        place_P, below = _largest(gain_K, size)
        slots, radius = place_P.cpu().numpy(), self._radii[1]
        ceiling: Ceiling | Sweep = Ceiling(self._sum_D, below + slack, radius)
        if self._way == SWEEP:
            ceiling = Sweep(self._columns, slots, self._sum_D, radius)
        return Pool(slots, z_KD[place_P].cpu().numpy(), capacity, ceiling)

    def _gains(self, shift_D: Vector | float = 0.0) -> tuple[Tensor, float]:
        """z . (s + shift) of every slot, and how far rounding may have moved it."""
        z_KD = self._columns.embeddings
        query_D = self._sum_D + shift_D
        sum_D = torch.from_numpy(query_D).to(z_KD.device, z_KD.dtype)
        unit = rounding(len(query_D), torch.finfo(z_KD.dtype).eps)
        return z_KD @ sum_D, unit * float(np.linalg.norm(query_D)) * self._radii[1]

    def _search(self, x_D: Matrix) -> int:
        """One step, searching the whole column; for when no pool can prove even that."""
        gain_K, slack = self._gains(x_D.astype(np.float64) if self._compete else 0.0)
        slack = 2 * slack + self._radii[1] ** 2 - self._radii[0] ** 2
        near = torch.nonzero(gain_K >= gain_K.max() - slack).flatten()
        row_nD = self._columns.embeddings[near].cpu().numpy()
        chosen = settle(row_nD, near.cpu().numpy(), self._sum_D, x_D, self._compete)
        if chosen == REFUSED:
            return REFUSED
        self._sum_D += x_D.astype(np.float64) - row_nD[chosen]
        return int(near[chosen])

    def refreshed(self, slots: Tensor, before_RD: Tensor) -> None:
        after_RD = self._columns.embeddings[slots]
        self._since += len(slots)
        self._sum_D += (sum_rows(after_RD) - sum_rows(before_RD)).cpu().numpy()
        self._widen(after_RD)
        self._shortlist = None
        if self._pool is not None:
            self._pool.replace(slots.cpu().numpy(), after_RD.cpu().numpy())

    def _widen(self, z_BD: Tensor) -> None:
        """Keep the range of norms, for which pools and shortlists hold: it only loosens bounds, so
        it is never narrowed but anew."""
        least, most = norms(z_BD)
        if least < self._radii[0] or most > self._radii[1]:
            self._radii = min(self._radii[0], least), max(self._radii[1], most)
            self._draw_anew()

    def counts(self) -> Tensor:
        """N(j) of the occupied slots, float64 [k]."""
        z_kD = self._columns.z_kD
        sum_D = torch.from_numpy(self._sum_D).to(z_kD.device)
        count_k = torch.empty(len(z_kD), dtype=torch.float64, device=z_kD.device)
        step = max(1, BLOCK_ELEMENTS // z_kD.shape[1])
        for start in range(0, len(z_kD), step):
            wide_bD = z_kD[start : start + step].to(torch.float64)
            count_k[start : start + step] = (wide_bD * (sum_D - wide_bD)).sum(dim=1)
        return count_k.add_(len(z_kD) - 1).mul_(0.5)

    def total(self, z_BD: Tensor) -> Tensor:
        """sum_k h(z_b . m_k), float64 [B], without reading the column."""
        sum_D = torch.from_numpy(self._sum_D).to(z_BD.device)
        return 0.5 * (self._columns.occupied + z_BD.to(torch.float64) @ sum_D)

    def state(self) -> dict[str, Tensor]:
        return {"sum": torch.from_numpy(self._sum_D.copy()), "since": torch.tensor([self._since])}

    def load(self, state: dict[str, Tensor]) -> None:
        self._sum_D = state["sum"].cpu().numpy().astype(np.float64)
        self._since = int(state["since"])
        self._radii = norms(self._columns.z_kD)
        self._draw_anew()

    def check(self) -> tuple[bool, str]:
        off = float(np.abs(self._sum_D - sum_rows(self._columns.z_kD).cpu().numpy()).max())
        if off > 1e-9 * max(1, self._columns.occupied):
            return False, f"the sum of the rows is off by {off:.3g}"
        return True, ""


def _largest(value_K: Tensor, size: int) -> tuple[Tensor, float]:
    """Where the `size` largest values stand, in order of place, and the largest of the others."""
    if value_K.device.type == "cpu":  # ten times as fast as topk
        cut = len(value_K) - size - 1
        order = np.argpartition(value_K.numpy(), cut)
        return torch.from_numpy(np.sort(order[cut + 1 :])), float(value_K[order[cut]])
    most = torch.topk(value_K, size + 1)
    return torch.sort(most.indices[:-1]).values, float(most.values[-1])


def norms(z_BD: Tensor) -> tuple[float, float]:
    """Least and largest norm of the rows, widened by rounding; (1, 1) for none."""
    if len(z_BD) == 0:
        return 1.0, 1.0
    norm_B = torch.linalg.vector_norm(z_BD, dim=1)
    unit = rounding(z_BD.shape[1], torch.finfo(z_BD.dtype).eps)
    return float(norm_B.min()) * (1 - unit), float(norm_B.max()) * (1 + unit)
