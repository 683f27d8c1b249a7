"""Duplicate counts of all slots by cells, approximately, for memories too large to count exactly.

Rows of like direction form a cell. A slot is counted as in a multipole method: with the rows of
near cells one by one, with those of far cells through their cell's count, mean and spread. From
then on each batch moves all counts of a cell by one linear function of the row, kept with the cell
until the next flush. So a row is read once a flush and not once a batch, and counted again once a
turnover of the memory. The largest counts form a pool, counted again when it is drawn; Algorithm 2
runs among its best and the newcomers.

Shapes: B newcomers, A descriptor, C cells, M near cells of a cell, K slots, k occupied slots,
N rows, n members of a cell, P slots of the pool, c candidates of them, W = c + B columns;
G = A + 1: a linear function of a row, its slope and then its offset.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memory.columns import REFUSED, Columns
from memory.compute import to_host
from memory.duel.simulate import simulate, slots_taken
from memory.index import CellIndex, kmeans
from memory.scores import Linear, Score

STEPS, LEAST_CANDIDATES = 256, 64
"""Most newcomers decided on at a time. Candidates are twice as many: the last has a choice, too."""

SLACK = 0.005
"""Share of a count by which the best candidate may lie below the best slot that is none. Evictions
lower the counts of those as well, which is not followed within a batch."""

TURNOVER, LEAST_CHANGES = 16, 256
"""A flush is due once 1 / TURNOVER of the slots changed, and at least LEAST_CHANGES."""

FIT_LOST, CROWDED = 0.05, 8
"""Cells are fitted again once rows lie so much further from their centres, in mean cosine, or the
largest cell is so many times larger than the largest was. Cells of CROWDED times the mean size are
not counted row by row: their moments must do, and do where rows are many because they are alike."""

MOST_CELLS = np.iinfo(np.int16).max
ROWS_PER_CELL, ROUNDS = 32, 6  # of k-means: the centres need not be the best, only near
LEAST_VARIANCE = 1e-7  # of a cosine, so that a slope exists where all rows of a cell are equal
BLOCK_ELEMENTS = 1 << 17  # similarities of a block, whose intermediates then fit a CPU's cache
WRONG = 0.25  # mean relative error of the counts above which `check` finds them wrong
CROSSOVER = 32_768  # slots from which approximate counts are worth their error on a CPU

Matrix = NDArray[Any]
Vector = NDArray[np.float64]
Slots = NDArray[np.int64]
Cells = NDArray[np.int16]


def pick(capacity: int, score: Score, device: torch.device) -> Literal["exact", "ivf"]:
    """Exact counts, or "ivf" where that was measured to be at least three times as fast.

    Linear counts are exact and fast at any size. On a GPU a pass over the rows a batch is cheap. On
    a CPU exact counts cost a batch O(K), approximate ones O(sqrt(K)); docs/memory.md has a table.
    """
    large = device.type == "cpu" and capacity >= CROSSOVER
    return "ivf" if large and not isinstance(score, Linear) else "exact"


class CountError(NamedTuple):
    """Of (approximate - exact) / exact the mean and largest size, and the mean itself."""

    mean: float
    worst: float
    bias: float
    sampled: int


class ApproximateCounts:
    """Approximate duplicate counts, and who has the largest. Built when first asked.

    A newcomer costs O(C A) and its share of a flush. Counts live on the host, and with them a copy
    of the rows, by cell.

    Args:
        columns: of the memory; descriptors are read from them.
        score: h.
        cells: C; sqrt(K) where not given.
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
        near: int = 3,
        compete: bool = False,
        seed: int = 0,
    ) -> None:
        if near < 1 or (cells is not None and not 1 <= cells <= MOST_CELLS):
            raise ValueError(
                f"{cells} cells, {near} near: cells must lie in [1, {MOST_CELLS}], near above 0"
            )
        self._columns, self._score, self._compete = columns, score, compete
        self._cells = cells or min(MOST_CELLS, math.isqrt(columns.capacity))
        self._near, self._seed = near, seed
        self._due = max(LEAST_CHANGES, columns.capacity // TURNOVER)  # changes before a flush
        self._cell_counts: CellCounts | None = None
        self._pool: CandidatePool | None = None

    def by_cell(self) -> CellCounts:
        """Built where there is nothing, or where it was built for less than half of the rows."""
        if self._cell_counts is None or 2 * self._cell_counts.fitted_to < self._columns.occupied:
            self.recount()
        assert self._cell_counts is not None
        return self._cell_counts

    def recount(self) -> None:
        """Fit the cells and count every slot again."""
        self._pool, row_kA = None, self._columns.descriptor_kA
        centre_CA, cell_k = kmeans(row_kA, self._cells, self._seed, ROUNDS, ROWS_PER_CELL)
        self._cell_counts = CellCounts(self._columns, self._score, to_host(centre_CA).numpy())
        self._cell_counts.count_all(to_host(cell_k).numpy().astype(np.int16), self._near)

    def on_insert(self, descriptor_BA: Tensor) -> None:
        """Newcomers fill the last of the occupied slots."""
        self._pool, counts, stop = None, self._cell_counts, self._columns.occupied
        if counts is not None and len(descriptor_BA):
            slot_B = np.arange(stop - len(descriptor_BA), stop)
            counts.replace(slot_B, None, on_host(descriptor_BA))
            if counts.changes >= self._due:
                counts.flush()

    def on_update(self, slots: Tensor, before_RA: Tensor) -> None:
        """These slots hold other rows than `before_RA` now."""
        counts, pool, slot_R = self._cell_counts, self._pool, to_host(slots).numpy()
        if counts is None or len(slot_R) == 0:
            return
        row_RA = counts.rows(slot_R)
        update_CG = counts.replace(slot_R, on_host(before_RA), row_RA)
        if pool is not None:
            _, place_n, at_n = np.intersect1d(pool.slot_P, slot_R, return_indices=True)
            pool.row_PA[place_n] = row_RA[at_n]
            pool.move(update_CG, counts.index.cell_K, settled=place_n)
            pool.count_P[place_n] = counts.of_slots(pool.slot_P[place_n], pool.row_PA[place_n])

    def choose(self, descriptor_BA: Tensor) -> Tensor:
        """Slots of the first newcomers, at least one; -1 refuses.

        Algorithm 2 among the candidates and the newcomers themselves, up to the step before which
        another slot may have had more.
        """
        counts, pool = self._ready()
        x_BA = on_host(descriptor_BA[:STEPS])
        kernel = counts.moments.kernel(x_BA)
        place_c, floor = pool.best(max(LEAST_CANDIDATES, 2 * len(x_BA)))
        row_WA = torch.from_numpy(np.concatenate([pool.row_PA[place_c], x_BA]))
        count_W = np.concatenate([pool.count_P[place_c], counts.of_newcomers(kernel)])
        first, level = len(place_c), float(pool.count_P[place_c].max())
        h_WW = self._score.apply_(row_WA @ row_WA.T).fill_diagonal_(0.0)
        apart_W = torch.from_numpy(count_W - level).to(h_WW.dtype)  # which float32 tells apart
        column_T, count_T = simulate(apart_W[:first], apart_W[first:], h_WW, self._compete)

        below_T = count_T.numpy() < floor - level
        below_T[0] = False  # the largest of the pool is a candidate
        held = int(below_T.argmax()) if below_T.any() else len(below_T)
        column_L = column_T[:held]
        place_L, stands = slots_taken(column_L.tolist(), place_c.tolist())
        plan_L = np.where(np.array(place_L) == REFUSED, REFUSED, pool.slot_P[place_L])
        count_W += (h_WW[first : first + held].sum(dim=0) - h_WW[column_L].sum(dim=0)).numpy()
        pool.count_P[place_c] = count_W[:first]
        if stands:
            place_N, turn_N = np.array([*stands]), np.array([*stands.values()])
            before_NA, after_NA = pool.row_PA[place_N], x_BA[turn_N]
            pool.row_PA[place_N], pool.count_P[place_N] = after_NA, count_W[first + turn_N]
            slot_N, kernel = pool.slot_P[place_N], kernel.of(turn_N)
            update_CG = counts.replace(slot_N, before_NA, after_NA, kernel)
            pool.move(update_CG, counts.index.cell_K, settled=place_c)
        return torch.from_numpy(plan_L)

    def _ready(self) -> tuple[CellCounts, CandidatePool]:
        counts = self.by_cell()
        if counts.changes >= self._due:
            counts.flush()
            self._pool = None
            if counts.outdated:
                self.recount()
                counts = self.by_cell()
        if self._pool is None or self._pool.exhausted:
            self._pool = self._draw(counts)
        return counts, self._pool

    def _draw(self, counts: CellCounts) -> CandidatePool:
        """The largest counts of all and of every cell.

        Of every cell, because evictions lower the counts of their own neighbourhood, and then
        another's lead.
        """
        k, cells = self._columns.occupied, len(counts.excess_C)
        count_k, cell_k = counts.of_all()[:k], counts.index.cell_K[:k]
        most, share = min(k, self._due + 2 * STEPS), -(-self._due // cells)
        least = np.partition(count_k, k - most)[k - most]
        order = np.lexsort((-count_k, cell_k))
        rank_k = np.arange(k) - np.searchsorted(cell_k[order], cell_k[order])
        largest_k = (rank_k < share) | (count_k[order] >= least)
        reserve_k = ~largest_k & np.roll(largest_k, 1)  # who comes next in each cell
        slot_P = np.concatenate([order[largest_k], order[reserve_k]])
        return CandidatePool(slot_P, counts.rows(slot_P), count_k[slot_P], int(largest_k.sum()))

    def counts(self) -> Tensor:
        """Approximate N(j) of the occupied slots, float64 [k]."""
        count_k = np.zeros(self._columns.occupied)
        if len(count_k):  # an estimate may fall below 0 where there is next to nothing to count
            count_k = self.by_cell().of_all()[: len(count_k)].clip(min=0.0)
        return torch.from_numpy(count_k).to(self._columns.device)

    def total(self, descriptor_BA: Tensor) -> Tensor:
        """sum_k h(d_b . d_k) by the moments of all cells, float64 [B]."""
        if self._columns.occupied == 0:
            return descriptor_BA.new_zeros(len(descriptor_BA), dtype=torch.float64)
        total_B = self.by_cell().moments.kernel(on_host(descriptor_BA)).total()
        return torch.from_numpy(total_B).to(descriptor_BA.device)

    def error(self, sample: int = 256, seed: int = 0) -> CountError:
        """Count a draw of slots exactly and compare. Costs `sample` x K similarities."""
        row_kA = self._columns.descriptor_kA
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randperm(len(row_kA), generator=generator)[:sample]
        if len(drawn) == 0:
            return CountError(0.0, 0.0, 0.0, 0)
        row_NA = row_kA[drawn.to(row_kA.device)]
        own_N = self._score.apply_((row_NA * row_NA).sum(dim=1)).to(torch.float64)
        exact_N = to_host(self._score.total(row_NA, row_kA) - own_N).numpy()
        about_N = self.by_cell().of_slots(drawn.numpy(), on_host(row_NA)).clip(min=0.0)
        off_N = (about_N - exact_N) / exact_N.clip(min=1.0)
        size_N = np.abs(off_N)
        return CountError(
            float(size_N.mean()), float(size_N.max()), float(off_N.mean()), len(drawn)
        )

    def check(self) -> tuple[bool, str]:
        """Whether cells and pool are of the rows, and the counts of some slots about right."""
        counts, pool = self._cell_counts, self._pool
        if counts is None:
            return True, ""
        held, reason = counts.check()
        if not held:
            return False, reason
        if pool is not None and (pool.row_PA != counts.rows(pool.slot_P)).any():
            return False, "the pool holds a row that its slot does not"
        error = self.error(sample=64)
        if error.mean > WRONG:
            return False, (
                f"counts of {error.sampled} slots are off by {error.mean:.3g} of the exact in the "
                f"mean and {error.worst:.3g} at worst: must be within {WRONG}; where they stay "
                'so, as with few slots or few duplicates, use index="exact"'
            )
        return True, ""

    def state(self) -> dict[str, Tensor]:
        """What `load` needs to go on bit-equal; tensors are empty where nothing is built yet."""
        arrays = {} if self._cell_counts is None else self._cell_counts.state()
        if (pool := self._pool) is not None:
            arrays["pool_slots"], arrays["pool_counts"] = pool.slot_P, pool.count_P
            arrays["pool_reserve"] = np.array([pool.first_reserve])
        return {name: torch.from_numpy(arrays.get(name, np.zeros(0)).copy()) for name in STATE}

    def load(self, state: dict[str, Tensor]) -> None:
        """Take over what `state` gave, for the rows in the columns.

        Counted again when asked where nothing was built, or for rows of another dtype or version.
        """
        self._cell_counts = self._pool = None
        row_1A = state.get("row_1A", torch.zeros(0))
        if len(row_1A) and row_1A.dtype == self._columns.descriptors.dtype:
            arrays = {name: to_host(value).numpy().copy() for name, value in state.items()}
            slot_P, count_P, reserve_1 = (arrays[name] for name in POOL)
            counts = CellCounts(self._columns, self._score, arrays["centre_CA"])
            counts.load(arrays)
            self._cell_counts = counts
            if len(slot_P):
                self._pool = CandidatePool(slot_P, counts.rows(slot_P), count_P, int(reserve_1[0]))


@dataclass
class CandidatePool:
    """Slots of the largest counts with their rows, and the best slots among those that are not.

    From `first_reserve` on stand the reserve: the best slot of each cell among all others, by which
    it is seen whether another slot may have more than every candidate.
    """

    slot_P: Slots
    row_PA: Matrix
    count_P: Vector
    first_reserve: int

    @property
    def exhausted(self) -> bool:
        """Whether a slot of the reserve has more than all others."""
        return bool(self.count_P[: self.first_reserve].max() < self.floor)

    @property
    def floor(self) -> float:
        """The count below which a slot of the reserve may have more."""
        return (1 - SLACK) * float(self.count_P[self.first_reserve :].max(initial=-np.inf))

    def best(self, most: int) -> tuple[Slots, float]:
        """Places of the largest counts, and the count below which another slot may have more."""
        count_Q = self.count_P[: self.first_reserve]
        if len(count_Q) <= most:
            return np.arange(len(count_Q)), self.floor
        order = np.argpartition(count_Q, len(count_Q) - most - 1)
        return order[-most:], max(self.floor, (1 - SLACK) * float(count_Q[order[-most - 1]]))

    def move(self, update_CG: Matrix, cell_K: Cells, settled: Slots) -> None:
        """Move all counts by this update, but for places whose counts are settled."""
        rise_P = rises(update_CG, self.row_PA, cell_K[self.slot_P])
        rise_P[settled] = 0.0
        self.count_P += rise_P


class CellCounts:
    """The counts of all slots, by cells of these unit centres (float32)."""

    def __init__(self, columns: Columns, score: Score, centre_CA: Matrix) -> None:
        self._columns, self._score = columns, score
        (cells, dim), dtype = centre_CA.shape, columns.descriptors.dtype
        self.moments = CellMoments(score, centre_CA, dtype)
        self.index = CellIndex(torch.from_numpy(centre_CA), columns.capacity, dtype)
        self.near_CM: Cells = np.zeros((cells, 0), dtype=np.int16)  # -1: a crowded one
        self.count_K: Vector = np.zeros(columns.capacity)  # as at the last flush, less the update
        self.update_CG: Matrix = np.zeros((cells, dim + 1))  # since the last flush
        self.pending: list[tuple[Matrix, ...]] = []  # rows whose update is not yet made exact
        self.excess_C: Vector = np.zeros(cells)  # mean of what near rows count beyond their moments
        self.changed_K = np.zeros(columns.capacity, bool)
        self.changes, self.next_cell = 0, 0  # since the last flush; to be recounted next
        self.fitted_to, self.fit_then, self.largest_then = columns.occupied, 0.0, 0.0

    def count_all(self, cell_k: Cells, near: int) -> None:
        """Count every slot, given its cell; `near` cells are counted row by row."""
        for slot_n in np.array_split(np.arange(len(cell_k)), 1 + (len(cell_k) >> 14)):
            row_nA = self.rows(slot_n)
            self.index.replace(slot_n, row_nA, cell_k[slot_n])
            self.moments.add(row_nA, cell_k[slot_n], 1)
        size_C, centre_CA = self.moments.size_C, torch.from_numpy(self.moments.centre_CA)
        nearest_CM = torch.topk(centre_CA @ centre_CA.T, min(near, len(size_C))).indices.numpy()
        crowded_C = size_C > CROWDED * size_C.mean()
        self.near_CM = np.where(crowded_C[nearest_CM], -1, nearest_CM).astype(np.int16)
        self.fit_then, self.largest_then = self.moments.fit(), float(size_C.max())
        self.changes = len(cell_k)
        self.flush()

    def rows(self, slots: Slots) -> Matrix:
        """Rows of these slots on the host."""
        row_KA = self._columns.descriptors
        return on_host(row_KA[torch.from_numpy(slots).to(row_KA.device)])

    @property
    def outdated(self) -> bool:
        """Whether rows have moved so far that the cells should be fitted again."""
        lost = self.moments.fit() < self.fit_then - FIT_LOST
        return lost or float(self.moments.size_C.max()) > CROWDED * self.largest_then

    def of_slots(self, slots: Slots, row_NA: Matrix) -> Vector:
        """N of these slots, which hold these rows, float64 [N]."""
        rise_N = rises(self.update_CG, row_NA, self.index.cell_K[slots])
        return np.asarray(self.count_K[slots] + rise_N)

    def of_all(self) -> Vector:
        """N of all slots, float64 [K]."""
        count_K = self.count_K.copy()
        for cell, update_G in enumerate(self.update_CG):
            slot_n, row_nA = self.index.members(cell)
            count_K[slot_n] += row_nA @ update_G[:-1].astype(row_nA.dtype) + update_G[-1]
        return count_K

    def of_newcomers(self, kernel: CellKernel) -> Vector:
        """N that these rows would have, each joining alone, float64 [N].

        Near rows are not read: what they count beyond their moments is taken to be as in the mean.
        """
        return kernel.total() + kernel.of_own_cell(kernel.value_NC) + self.excess_C[kernel.cell_N]

    def replace(
        self,
        slots: Slots,
        before_NA: Matrix | None,
        after_NA: Matrix,
        kernel: CellKernel | None = None,
    ) -> Matrix:
        """These slots, all distinct, take new rows; None for the old rows of empty ones.

        Returns:
            By which linear functions [C, G] the counts of all other slots moved.
        """
        kernel = kernel or self.moments.kernel(after_NA)
        update_CG = kernel.update(after_NA)
        own_N = kernel.of_own_cell(kernel.slope_NC) * squares(after_NA)
        own_N += kernel.of_own_cell(kernel.offset_NC)  # its own update moves its own count so far
        self.count_K[slots] = self.of_newcomers(kernel) - own_N
        self.count_K[slots] -= rises(self.update_CG, after_NA, kernel.cell_N)
        self._note(after_NA, kernel, 1)
        if before_NA is not None:
            cell_N = self.index.cell_K[slots]
            leaving = self.moments.kernel(before_NA, cell_N)
            update_CG -= leaving.update(before_NA)
            self._note(before_NA, leaving, -1)
            self.moments.add(before_NA, cell_N, -1)
        self.moments.add(after_NA, kernel.cell_N, 1)
        self.index.replace(slots, after_NA, kernel.cell_N)
        self.update_CG += update_CG
        self.changes += len(slots)
        self.changed_K[slots] = True
        return update_CG

    def _note(self, row_NA: Matrix, kernel: CellKernel, sign: int) -> None:
        near_NM = self.near_CM[kernel.cell_N]
        at = np.arange(len(near_NM))[:, None], near_NM
        sign_N = np.full(len(row_NA), sign, row_NA.dtype)
        self.pending.append(
            (row_NA, near_NM, kernel.offset_NC.numpy()[at], kernel.slope_NC.numpy()[at], sign_N)
        )

    def flush(self) -> None:
        """Take the update into the counts, with near rows one by one; recount slots that changed,
        and as many others, cell by cell in turn: no count is older than a turnover of the memory."""
        self.count_K = self.of_all()
        self.update_CG[:] = 0.0
        if self.pending:
            self._make_exact(*(np.concatenate(parts) for parts in zip(*self.pending, strict=True)))
        cells, counted = [], 0
        slots = [np.flatnonzero(self.changed_K)]
        while counted < self.changes and len(cells) < len(self.excess_C):
            cells.append(self.next_cell)
            slots.append(self.index.members(self.next_cell)[0])
            counted += len(slots[-1])
            self.next_cell = (self.next_cell + 1) % len(self.excess_C)
        self.recount(np.concatenate(slots))
        self.pending, self.changes, self.changed_K[:] = [], 0, False

    def _make_exact(
        self, row_RA: Matrix, near_RM: Cells, offset_RM: Matrix, slope_RM: Matrix, sign_R: Matrix
    ) -> None:
        for cell, row_e, place_e in rows_by_cell(near_RM):
            slot_n, row_nA = self.index.members(cell)
            cosine_ne = torch.from_numpy(row_nA) @ torch.from_numpy(row_RA[row_e]).T
            linear_ne = torch.addcmul(
                torch.from_numpy(offset_RM[row_e, place_e]),
                cosine_ne,
                torch.from_numpy(slope_RM[row_e, place_e]),
            )
            wrong_ne = self._score.apply_(cosine_ne).sub_(linear_ne)
            self.count_K[slot_n] += (wrong_ne @ torch.from_numpy(sign_R[row_e])).numpy()

    def recount(self, slots: Slots) -> None:
        """Count these slots again: near cells row by row, far ones by their moments.

        Right after a flush.
        """
        row_NA, cell_N = self.rows(slots), self.index.cell_K[slots]
        near_NM = self.near_CM[cell_N]
        excess_N = -self._score.apply_(torch.from_numpy(squares(row_NA))).numpy().astype(np.float64)
        for cell, place_n, _ in rows_by_cell(near_NM):
            row_nA, near_nA = row_NA[place_n], self.index.members(cell)[1]
            near_nn = self._score.apply_(torch.from_numpy(row_nA) @ torch.from_numpy(near_nA).T)
            excess_N[place_n] += near_nn.sum(dim=1).numpy()
        parts = 1 + len(slots) * len(self.excess_C) // BLOCK_ELEMENTS
        for place_n in np.array_split(np.arange(len(slots)), parts):
            kernel, near_nM = self.moments.kernel(row_NA[place_n]), near_NM[place_n]
            size_nM = np.where(near_nM >= 0, self.moments.size_C[near_nM], 0.0)
            value_nM = np.take_along_axis(kernel.value_NC.numpy(), near_nM.astype(np.int64), axis=1)
            excess_N[place_n] -= (value_nM * size_nM).sum(axis=1)
            self.count_K[slots[place_n]] = kernel.total() + excess_N[place_n]
        size_C = np.bincount(cell_N, minlength=len(self.excess_C))
        mean_C = np.bincount(cell_N, excess_N, len(self.excess_C)) / np.maximum(size_C, 1)
        self.excess_C = np.where(size_C > 0, mean_C, self.excess_C)

    def check(self) -> tuple[bool, str]:
        """Whether index and moments are of the rows in the columns; if not, what is wrong."""
        for cell, size in enumerate(self.moments.size_C):
            slot_n, row_nA = self.index.members(cell)
            if len(slot_n) != size:
                return False, f"cell {cell} holds {len(slot_n)} rows, counted {size:.0f}"
            other_n = (row_nA != self.rows(slot_n)).any(axis=1)
            if other_n.any():
                return False, f"slot {slot_n[other_n][0]}: the index holds another row"
            off = np.abs(row_nA.sum(axis=0, dtype=np.float64) - self.moments.sum_CA[cell]).max()
            if off > 1e-6 * max(1, len(slot_n)):
                return False, f"cell {cell}: the sum of its rows is off by {off:.3g}"
        return True, ""

    def state(self) -> dict[str, Matrix]:
        """All that does not follow from the columns; `lists` is the order of the index's rows."""
        arrays = {name: getattr(self, name) for name in COUNTS}
        arrays |= {name: getattr(self.moments, name) for name in MOMENTS}
        arrays |= {"lists": self.index.order(), "cell_K": self.index.cell_K}
        arrays["numbers"] = np.array([float(getattr(self, name)) for name in NUMBERS])
        return arrays | {"row_1A": self.rows(arrays["lists"][:1])}

    def load(self, arrays: dict[str, Matrix]) -> None:
        """Take over what `state` gave, for the rows in the columns."""
        for name in (*COUNTS, *MOMENTS):
            setattr(self if name in COUNTS else self.moments, name, arrays[name])
        for name, value in zip(NUMBERS, arrays["numbers"].tolist(), strict=True):
            setattr(self, name, type(getattr(self, name))(value))
        for slot_n in np.array_split(arrays["lists"], 1 + (len(arrays["lists"]) >> 14)):
            self.index.replace(slot_n, self.rows(slot_n), arrays["cell_K"][slot_n])


COUNTS = ("near_CM", "count_K", "update_CG", "excess_C")
MOMENTS = ("centre_CA", "size_C", "sum_CA", "along_C")
NUMBERS = ("changes", "next_cell", "fitted_to", "fit_then", "largest_then")
POOL = ("pool_slots", "pool_counts", "pool_reserve")
STATE = (*COUNTS, *MOMENTS, "numbers", "lists", "cell_K", "row_1A", *POOL)


@dataclass(frozen=True, slots=True)
class CellKernel:
    """What the rows of each cell see of N other rows.

    A row z of cell c has with row x about the similarity offset + slope (z . x): the straight line
    that fits a normal cloud of such z best. Its mean over the cell is `value`. A row belongs to the
    cell whose mean it points along most.
    """

    cell_N: Cells
    size_C: Tensor
    value_NC: Tensor
    slope_NC: Tensor
    offset_NC: Tensor

    def of(self, index: Slots) -> CellKernel:
        """Of the chosen rows."""
        columns = (self.value_NC, self.slope_NC, self.offset_NC)
        rows = torch.from_numpy(index)
        return CellKernel(self.cell_N[index], self.size_C, *(column[rows] for column in columns))

    def of_own_cell(self, column_NC: Tensor) -> Vector:
        """Each row's entry for its own cell, float64 [N]."""
        entry_N = column_NC.numpy()[np.arange(len(self.cell_N)), self.cell_N]
        return np.asarray(entry_N.astype(np.float64))

    def total(self) -> Vector:
        """sum of h of each row with the rows of all cells, float64 [N]."""
        return np.asarray((self.value_NC @ self.size_C).numpy().astype(np.float64))

    def update(self, row_NA: Matrix) -> Matrix:
        """By which linear functions these rows, joining, move the counts, float64 [C, G]."""
        slope_CA = self.slope_NC.T @ torch.from_numpy(row_NA)
        offset_C = self.offset_NC.sum(dim=0, dtype=torch.float64)
        return np.asarray(torch.cat([slope_CA, offset_C[:, None]], dim=1).numpy())


class CellMoments:
    """Count, mean and spread of every cell.

    The cosines of a row x with the rows of a cell are taken as normally distributed, with the mean
    x . m and a spread that is one number along the cell's centre and another across it. The mean of
    h over them is by Gauss and Hermite's three points, exact for polynomials of degree five.
    """

    def __init__(self, score: Score, centre_CA: Matrix, dtype: torch.dtype) -> None:
        self._score, self._dtype, self.centre_CA = score, dtype, centre_CA
        self.size_C: Vector = np.zeros(len(centre_CA))
        self.sum_CA: Vector = np.zeros(centre_CA.shape)
        self.along_C: Vector = np.zeros(len(centre_CA))  # sum over rows of (row . centre)^2
        self._terms: list[Tensor] = []  # of `kernel`, for the rows held now

    def add(self, row_NA: Matrix, cell_N: Cells, weight: int) -> None:
        """Rows join (weight 1) or leave (-1) the sums of their cells."""
        wide_NA = weight * row_NA.astype(np.float64)
        along_N = np.einsum("na,na->n", wide_NA, self.centre_CA[cell_N])
        np.add.at(self.size_C, cell_N, weight)
        np.add.at(self.along_C, cell_N, weight * along_N**2)
        where_N = torch.from_numpy(cell_N.astype(np.int64))  # numpy adds rows far more slowly
        torch.from_numpy(self.sum_CA).index_add_(0, where_N, torch.from_numpy(wide_NA))
        self._terms = []

    def fit(self) -> float:
        """Mean over all rows of the length that is left of them in their cell's mean."""
        length_C = np.linalg.norm(self.sum_CA, axis=1)
        return float(length_C.sum() / max(1.0, self.size_C.sum()))

    def kernel(self, row_NA: Matrix, cell_N: Cells | None = None) -> CellKernel:
        """What all cells see of these rows, members of these cells where they are any yet."""
        self._terms = self._terms or self._work_out()
        size_C, mean_CA, across_C, tilt_C, per_length_C, empty_C = self._terms
        cosine_NC = torch.from_numpy(row_NA) @ mean_CA.T
        wide_NC = torch.addcmul(across_C, cosine_NC * cosine_NC, tilt_C)
        wide_NC.clamp_(min=3 * LEAST_VARIANCE).sqrt_()  # sqrt(3) sigma
        high_NC = self._score.apply_(cosine_NC + wide_NC)
        low_NC = self._score.apply_(cosine_NC - wide_NC)
        slope_NC = (high_NC - low_NC).div_(wide_NC.mul_(2.0))
        value_NC = high_NC.add_(low_NC).mul_(1 / 6).add_(self._score(cosine_NC), alpha=2 / 3)
        offset_NC = torch.addcmul(value_NC, slope_NC, cosine_NC, value=-1)
        if cell_N is None:
            towards_NC = torch.addcmul(empty_C, cosine_NC, per_length_C)
            cell_N = towards_NC.argmax(dim=1).numpy().astype(np.int16)
        return CellKernel(cell_N, size_C, value_NC, slope_NC, offset_NC)

    def _work_out(self) -> list[Tensor]:
        mean_CA = self.sum_CA / np.maximum(self.size_C, 1.0)[:, None]
        square_C = squares(mean_CA)
        middle_C = np.einsum("ca,ca->c", mean_CA, self.centre_CA)
        along_C = np.maximum(self.along_C / np.maximum(self.size_C, 1.0) - middle_C**2, 0.0)
        across_C = np.maximum(1.0 - square_C - along_C, 0.0) / max(1, mean_CA.shape[1] - 1)
        square_C = np.maximum(square_C, 1e-12)
        tilt_C, empty_C = (along_C - across_C) / square_C, np.where(self.size_C > 0, 0.0, -4.0)
        terms = (self.size_C, mean_CA, 3 * across_C, 3 * tilt_C, 1 / np.sqrt(square_C), empty_C)
        return [torch.from_numpy(term).to(self._dtype, copy=True) for term in terms]


def rises(update_CG: Matrix, row_NA: Matrix, cell_N: Cells) -> Vector:
    """What these linear functions of the cells give for rows of these cells, float64 [N]."""
    slope_CA = update_CG[:, :-1].astype(row_NA.dtype)
    rise_N: Vector = update_CG[cell_N, -1]
    for start in range(0, len(row_NA), 1024):  # gathered slopes stay in the cache
        part = slice(start, start + 1024)
        rise_N[part] += np.einsum("na,na->n", row_NA[part], slope_CA[cell_N[part]])
    return rise_N


def rows_by_cell(cell_NM: Cells) -> Iterator[tuple[int, Slots, Slots]]:
    """Each cell that is named in a row, with the rows and the places where it is; -1 is no name."""
    row_E, place_E = np.nonzero(cell_NM >= 0)
    cell_E = cell_NM[row_E, place_E]
    order = np.argsort(cell_E, kind="stable")
    cells, start = np.unique(cell_E[order], return_index=True)
    rows, places = (np.split(index_E[order], start[1:]) for index_E in (row_E, place_E))
    return zip(cells.tolist(), rows, places, strict=False)


def squares(row_NA: Matrix) -> Matrix:
    """Each row's product with itself [N]."""
    return np.asarray(np.einsum("na,na->n", row_NA, row_NA))


def on_host(row_NA: Tensor) -> Matrix:
    return np.ascontiguousarray(to_host(row_NA.detach()).numpy())
