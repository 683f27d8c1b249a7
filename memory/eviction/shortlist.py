"""The sequential rule of DUEL inside a small block of candidates, under linear h.

Shapes: B newcomers, D embedding, G = D + 1: a row and its gain, K slots, L steps that hold, P rows
of the pool, R rows replaced, S rows of the shortlist, T steps taken before they are judged,
W = S + T columns: candidates, then newcomers; F columns that are raced.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memory.eviction.bounds import Ceiling, Indices, Matrix, Vector, exact_gain, rounding
from memory.eviction.sweep import Sweep

STRIDE = 64
"""Largest T."""

FEW = 160
"""Candidates that are raced. Whether another would have won is seen when the race is judged."""

SPARE = 8
"""Steps taken besides those that are thought to hold."""

AFTER = np.tri(STRIDE, k=-1, dtype=bool).T
SINCE = np.tri(STRIDE, dtype=bool).T
"""[t, u]: whether step u is behind step t; or is not before it."""

REFUSED = -1
"""In place of a row: the newcomer has the largest count itself, and does not join."""

WIDE_EPS = float(np.finfo(np.float64).eps)


class Pool:
    """Rows on the host among which every eviction of the next newcomers is expected.

    Args:
        slots: of the rows, int64 [P], distinct.
        row_PD: copies of the rows, kept in step with the memory.
        capacity: K.
        ceiling: of the rows that are not in the pool. A `Sweep` where shortlists take all of it.
    """

    def __init__(
        self, slots: Indices, row_PD: Matrix, capacity: int, ceiling: Ceiling | Sweep
    ) -> None:
        self.slots, self.row_PD, self.ceiling = slots, row_PD, ceiling
        self._where_K = np.full(capacity, -1, dtype=np.int64)
        self._where_K[slots] = np.arange(len(slots))

    def __len__(self) -> int:
        return len(self.slots)

    def replace(self, slots: Indices, row_RD: Matrix) -> None:
        """Take new rows for these slots. Those that the ceiling no longer covers join the pool."""
        where_R = self._where_K[slots]
        inside_R = where_R >= 0
        self.row_PD[where_R[inside_R]] = row_RD[inside_R]
        join_R = ~inside_R & ~self.ceiling.covers(row_RD)
        if join_R.any():
            self._where_K[slots[join_R]] = len(self) + np.arange(np.count_nonzero(join_R))
            self.slots = np.concatenate([self.slots, slots[join_R]])
            self.row_PD = np.concatenate([self.row_PD, row_RD[join_R]])


class Shortlist:
    """The rows of the pool with the largest z . s, and the bound of all others.

    Args:
        pool: to choose from.
        sum_D: s, the sum of the memory's rows, at this moment.
        size: S, at most P.
        radii: least and largest norm of any row.
        compete: a newcomer is counted with the others, and may be the one that leaves.

    Attributes:
        taken: newcomers so far.
        bounded_by_pool: whether it is the rows outside the pool that may have most outside.
    """

    def __init__(
        self,
        pool: Pool,
        sum_D: Vector,
        size: int,
        radii: tuple[float, float],
        compete: bool = False,
    ) -> None:
        self._pool, self._radii, self._compete = pool, radii, compete
        self.taken = 0
        self._index, below = np.arange(size), -np.inf
        if size < len(pool):
            gain_P = pool.row_PD @ sum_D.astype(pool.row_PD.dtype)
            cut = len(pool) - size - 1
            order = np.argpartition(gain_P, cut)
            self._index = order[cut + 1 :]
            unit = rounding(len(sum_D), float(np.finfo(gain_P.dtype).eps))
            below = float(gain_P[order[cut]]) + unit * float(np.linalg.norm(sum_D)) * radii[1]
        self._ceiling = pool.ceiling.anew(sum_D, below)
        self.bounded_by_pool = size == len(pool) or self._ceiling.limit > below
        self._slot_S = pool.slots[self._index]
        self._row_WG = np.zeros((size + STRIDE, len(sum_D) + 1), pool.row_PD.dtype)
        self._row_SG = self._row_WG[:size]
        self._row_SG[:, :-1] = pool.row_PD[self._index]
        gain_S = gains(self._row_SG[:, :-1], sum_D)
        # Gains are kept below the largest of this moment, so that float32 holds their differences.
        self._top = float(gain_S.max())
        self._unit = rounding(len(sum_D) + 1, float(np.finfo(pool.row_PD.dtype).eps)) * radii[1]
        self._row_SG[:, -1] = gain_S - self._top

    def __len__(self) -> int:
        return len(self._slot_S)

    def run(self, x_BD: Matrix, sum_D: Vector, plan: list[int]) -> bool:
        """Take newcomers in turn until one cannot be certified. Returns whether all could.

        A step is certified while the best candidate has more than any row outside can have. Steps
        are taken some at a time and judged together: those behind one that fails were for nothing.

        Args:
            x_BD: the newcomers.
            sum_D: s, moved along.
            plan: the slot of each newcomer taken is appended.
        """
        taken: list[int] = []  # places in the shortlist, or REFUSED
        stride = STRIDE
        wide_BD = x_BD.astype(np.float64, copy=False)
        gain_B = gains(wide_BD, self._ceiling.sum_D) - self._top
        while len(taken) < len(x_BD):
            next_T = slice(len(taken), len(taken) + stride)
            heat = self._race(wide_BD[next_T], gain_B[next_T], sum_D)
            verdict = self._judge(heat, sum_D)
            sum_D[:] = verdict.sum_D
            taken += self._keep(heat, verdict.column_L)
            if verdict.spent:
                break
            stride = min(STRIDE, 2 * len(verdict.column_L), verdict.ahead)
        place_L = np.array(taken, np.int64)
        stays = place_L != REFUSED
        plan.extend(np.where(stays, self._slot_S[place_L], REFUSED).tolist())
        changed = place_L[stays]
        self._pool.row_PD[self._index[changed]] = self._row_SG[changed, :-1]
        self.taken += len(taken)
        return len(taken) == len(x_BD)

    def _race(self, x_TD: Matrix, gain_T: Vector, sum_D: Vector) -> Heat:
        """Take these newcomers among the candidates that have most now, whatever the others do."""
        size, turns = len(self._row_SG), len(x_TD)
        row_WG = self._row_WG[: size + turns]
        row_WG[size:, :-1] = x_TD
        row_WG[size:, -1] = gain_T
        now_W = row_WG @ np.append(sum_D - self._ceiling.sum_D, 1.0).astype(row_WG.dtype)
        few = min(FEW, size)
        leading = np.argpartition(now_W[:size], size - few)[size - few :]
        column_F = np.concatenate([leading, np.arange(size, size + turns)])
        row_FD, now_F = row_WG[column_F, :-1], now_W[column_F]
        alike_FF = row_FD @ row_FD.T
        best_T = np.empty(turns, np.int64)
        for turn, own in enumerate(range(few, few + turns)):
            if self._compete:
                now_F += alike_FF[own]
            best_T[turn] = best = now_F[: own + self._compete].argmax()  # of those who have come
            if not self._compete:
                now_F += alike_FF[own]
            now_F -= alike_FF[best]
            now_F[best] = -np.inf
        best_T = column_F[best_T]
        place_W = np.arange(size + turns)
        place_W[size:] = best_T
        for turn in np.flatnonzero(best_T >= size).tolist():  # in place of another newcomer
            place_W[size + turn] = place_W[best_T[turn]]
        return Heat(x_TD, row_WG, best_T, place_W)

    def _judge(self, heat: Heat, sum_D: Vector) -> Verdict:
        """Which steps hold. Where rounding could decide between columns, `settle` does."""
        turns, dim = heat.x_TD.shape
        path = np.empty((turns + 1, dim))
        path[0] = sum_D
        np.subtract(heat.x_TD, heat.row_WD[heat.best_T], out=path[1:])
        np.add.accumulate(path, axis=0, out=path)  # in turn, so rounded as single steps are
        moved_TD = path[:-1] - self._ceiling.sum_D
        if self._compete:
            moved_TD += heat.x_TD
        raced_T, gain_WT = self._followed(heat, moved_TD)
        rival_T = column_max(gain_WT)
        most_T = np.maximum(raced_T, rival_T)
        square_T = np.einsum("td,td->t", moved_TD, moved_TD)
        length_T = np.sqrt(square_T)
        wide = rounding(dim, WIDE_EPS) * (1 + self._ceiling.norm + float(length_T.max()))
        margin_T = 2 * (self._unit * (2 * length_T + 4.0 + np.abs(most_T)) + wide)
        least_T = most_T - margin_T
        lead_T = least_T + self._radii[0] ** 2 + self._top - self._ceiling(moved_TD, square_T)
        held_T = (lead_T > 0) & (rival_T < raced_T - margin_T)
        for turn in np.flatnonzero(~held_T).tolist():
            if lead_T[turn] <= 0:
                return Verdict(heat.best_T[:turn], path[turn], spent=True)
            gain_WT[heat.best_T[turn], turn] = raced_T[turn]
            best = self._settle(
                heat, turn, np.flatnonzero(gain_WT[:, turn] >= least_T[turn]), path[turn]
            )
            if best != heat.best_T[turn]:
                column_L = np.append(heat.best_T[:turn], best)
                path[turn] += heat.x_TD[turn] - heat.row_WD[best]
                return Verdict(column_L, path[turn])
        return Verdict(heat.best_T, path[turns], ahead=steps_left(lead_T))

    def _followed(self, heat: Heat, moved_TD: Matrix) -> tuple[Vector, Matrix]:
        """At each step the gain of who left, and of all others; -inf of who has left before, or not
        come yet."""
        turns, size = len(moved_TD), len(self._row_SG)
        query_TG = np.ones((turns, moved_TD.shape[1] + 1), heat.row_WG.dtype)
        query_TG[:, :-1] = moved_TD
        gain_WT: Matrix = heat.row_WG @ query_TG.T
        gone_TT = gain_WT[heat.best_T]
        raced_T = gone_TT.diagonal().copy()
        np.copyto(gone_TT, -np.inf, where=SINCE[:turns, :turns])
        gain_WT[heat.best_T] = gone_TT
        yet_TT = AFTER if self._compete else SINCE
        np.copyto(gain_WT[size:], -np.inf, where=yet_TT[:turns, :turns].T)
        return raced_T, gain_WT

    def _settle(self, heat: Heat, turn: int, near: Indices, sum_D: Vector) -> int:
        """The column that leaves at this step, of some that tie within rounding."""
        own = len(self._row_SG) + turn
        near = near[near != own]
        slot_N = self._slot_S[heat.place_W[near]]
        found = settle(heat.row_WD[near], slot_N, sum_D, heat.x_TD[turn], self._compete)
        return own if found == REFUSED else int(near[found])

    def _keep(self, heat: Heat, column_L: Indices) -> list[int]:
        """Put the newcomers of these steps in the places of who left; the places, or REFUSED."""
        place_L = heat.place_W[column_L]
        size, turn_L = len(self._row_SG), np.arange(len(place_L))
        place_L[column_L == size + turn_L] = REFUSED
        stays = place_L >= 0
        # Of some who took one place in turn the last has it.
        self._row_SG[place_L[stays]] = heat.row_WG[size + turn_L[stays]]
        places: list[int] = place_L.tolist()
        return places


@dataclass(frozen=True, slots=True)
class Heat:
    """Steps taken in a shortlist, not yet judged. Columns are candidates, then the newcomers: no
    row changes, so nothing needs to be taken back."""

    x_TD: Matrix  # newcomers, float64
    row_WG: Matrix  # of all columns; the gain is that when the shortlist was made, below its top
    best_T: Indices  # column that left, the newcomer's own where it was refused
    place_W: Indices  # in the shortlist, of each column: a newcomer has that of who left for it

    @property
    def row_WD(self) -> Matrix:
        return self.row_WG[:, :-1]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What holds of a heat."""

    column_L: Indices  # who left, step by step
    sum_D: Vector  # s after them
    spent: bool = False  # whether the next step wants another shortlist
    ahead: int = STRIDE  # steps worth taking next


def steps_left(lead_T: Vector) -> int:
    """Steps worth taking: those that hold if the lead goes on to fall as it did, and some more."""
    lead = float(lead_T[-1])
    fall = (float(lead_T[0]) - lead) / len(lead_T)
    return SPARE + int(1.5 * lead / fall) if lead < STRIDE * fall else STRIDE


def column_max(value_NT: Matrix) -> Vector:
    """The largest of each column. numpy alone takes short rows one by one; halves are long ones."""
    while len(value_NT) > 16:
        half = (len(value_NT) + 1) // 2
        value_NT = np.maximum(value_NT[:half], value_NT[-half:])
    return np.asarray(value_NT.max(axis=0))


def gains(row_ND: Matrix, sum_D: Vector) -> Vector:
    """z . s - z . z of each row: z . s to float64 rounding, z . z to that of the rows."""
    wide_ND = row_ND.astype(np.float64, copy=False)
    return np.asarray(wide_ND @ sum_D - np.einsum("nd,nd->n", row_ND, row_ND))


def settle(row_ND: Matrix, slot_N: Indices, sum_D: Vector, x_D: Matrix, compete: bool) -> int:
    """The index of the row with the largest exact gain, to float64 rounding; ties go to the lowest
    slot.

    With `compete` the newcomer x_D is counted too: REFUSED where its own gain is larger still.
    """
    if compete:
        sum_D = sum_D + x_D
    margin = rounding(len(sum_D), WIDE_EPS) * (1 + float(np.linalg.norm(sum_D)))
    # Many rivals are many copies of a few rows, as of an encoder that has collapsed: what cannot
    # be the largest is left out first, and of equal rows one speaks for all.
    rough_N = gains(row_ND.astype(np.float64, copy=False), sum_D)
    near_n = np.flatnonzero(rough_N >= rough_N.max(initial=-np.inf) - 4 * margin)
    row_nD = row_ND[near_n]
    if len(near_n) and (row_nD == row_nD[0]).all():
        row_nD = row_nD[:1]
    gain_n = exact_gain(row_nD, sum_D)
    most = gain_n.max(initial=-np.inf)
    if compete and exact_gain(x_D[None], sum_D)[0] > most + margin:
        return REFUSED
    equal = near_n if len(gain_n) < len(near_n) else near_n[gain_n >= most - margin]
    return int(equal[slot_N[equal].argmin()])
