"""The sequential rule of DUEL inside a small block of candidates, under linear h.

Shapes: B newcomers, D embedding, K slots, P rows of the pool, R rows replaced, S rows of the
shortlist, T steps taken before they are judged.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memory.eviction.bounds import Ceiling, Indices, Matrix, Vector, exact_gain, rounding

STRIDE = 32
"""Largest T."""

REFUSED = -1
"""In place of a row: the newcomer has the largest count itself, and does not join."""

WIDE_EPS = float(np.finfo(np.float64).eps)


class Pool:
    """Rows on the host among which every eviction of the next newcomers is expected.

    Args:
        slots: of the rows, int64 [P], distinct.
        row_PD: copies of the rows, kept in step with the memory.
        capacity: K.
        ceiling: of the rows that are not in the pool.
    """

    def __init__(self, slots: Indices, row_PD: Matrix, capacity: int, ceiling: Ceiling) -> None:
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
        limit = float(pool.ceiling((sum_D - pool.ceiling.sum_D)[None])[0])
        self.bounded_by_pool = size == len(pool)
        if size == len(pool):
            self._index = np.arange(size)
        else:
            gain_P = pool.row_PD @ sum_D.astype(pool.row_PD.dtype)
            cut = len(pool) - size - 1
            order = np.argpartition(gain_P, cut)
            self._index = order[cut + 1 :]
            unit = rounding(len(sum_D), float(np.finfo(gain_P.dtype).eps))
            below = float(gain_P[order[cut]]) + unit * float(np.linalg.norm(sum_D)) * radii[1]
            self.bounded_by_pool = limit > below
            limit = max(limit, below)
        self._ceiling = Ceiling(sum_D, limit, radii[1])
        self._slot_S = pool.slots[self._index]
        self._row_SD = pool.row_PD[self._index]
        gain_S = gains(self._row_SD, sum_D)
        # Gains are kept below the largest of this moment, so that float32 holds their differences.
        self._top = float(gain_S.max())
        self._gain_S = (gain_S - self._top).astype(self._row_SD.dtype)

    def run(self, x_BD: Matrix, sum_D: Vector, plan: list[int]) -> int:
        """Take newcomers in turn until one cannot be certified. Returns how many were taken.

        A step is certified while the best candidate has more than any row outside can have. Steps
        are taken some at a time and judged together; those that fail are taken back. Where rounding
        could decide between candidates, `settle` does.

        Args:
            x_BD: the newcomers.
            sum_D: s, moved along.
            plan: the slot of each newcomer taken is appended.
        """
        taken: list[int] = []  # places in the shortlist, or REFUSED
        stride = STRIDE
        while len(taken) < len(x_BD):
            x_TD = x_BD[len(taken) : len(taken) + stride]
            heat = self._race(x_TD, sum_D)
            steps, tied = self._judge(heat, sum_D)
            taken.extend(heat.best_T[:steps].tolist())
            stride = min(STRIDE, 2 * stride)
            if steps < len(x_TD):
                self._take_back(heat, steps)
                if tied is None:
                    break
                taken.append(self._settle(tied, x_TD[steps], sum_D))
                stride = max(1, stride // 2)
        plan.extend(self._slot_S[place] if place >= 0 else REFUSED for place in taken)
        changed = [place for place in taken if place >= 0]
        self._pool.row_PD[self._index[changed]] = self._row_SD[changed]
        return len(taken)

    def _race(self, x_TD: Matrix, sum_D: Vector) -> Heat:
        """Take these newcomers without looking at any bound."""
        row_SD, gain_S = self._row_SD, self._gain_S
        joining_T = (gains(x_TD, self._ceiling.sum_D) - self._top).astype(gain_S.dtype)
        gain_TS = np.empty((len(x_TD), len(row_SD)), gain_S.dtype)
        gone_TD, best_T = np.empty_like(x_TD), np.empty(len(x_TD), np.int64)
        lost_T = np.empty_like(joining_T)
        most_T = np.empty_like(joining_T)
        moved_D = (sum_D - self._ceiling.sum_D).astype(row_SD.dtype)
        for turn, (x_D, now_S) in enumerate(zip(x_TD, gain_TS, strict=True)):
            if self._compete:
                moved_D += x_D
            np.dot(row_SD, moved_D, out=now_S)
            now_S += gain_S
            best_T[turn] = best = now_S.argmax()
            most_T[turn] = now_S[best]
            if self._compete and (own := joining_T[turn] + x_D @ moved_D) > now_S[best]:
                best_T[turn], most_T[turn], gone_TD[turn] = REFUSED, own, x_D
                moved_D -= x_D
                continue
            row_D = row_SD[best]
            gone_TD[turn] = row_D
            if not self._compete:
                moved_D += x_D
            moved_D -= row_D
            row_D[:] = x_D
            lost_T[turn] = gain_S[best]
            gain_S[best] = joining_T[turn]
        return Heat(x_TD, gain_TS, joining_T, best_T, most_T, gone_TD, lost_T)

    def _judge(self, heat: Heat, sum_D: Vector) -> tuple[int, Indices | None]:
        """How many steps hold, moving s along; and the rivals, where a near tie ended them."""
        turns, dim = heat.x_TD.shape
        path = np.empty((turns + 1, dim))
        path[0] = sum_D
        np.subtract(heat.x_TD, heat.gone_TD, out=path[1:], dtype=np.float64)
        np.add.accumulate(path, axis=0, out=path)  # in turn, so rounded as single steps are
        moved_TD = path[:-1] - self._ceiling.sum_D
        if self._compete:
            moved_TD += heat.x_TD
        most_T = heat.most_T
        length_T = np.sqrt(np.einsum("td,td->t", moved_TD, moved_TD))
        unit = rounding(dim + 2 * STRIDE, float(np.finfo(most_T.dtype).eps)) * self._radii[1]
        wide = rounding(dim, WIDE_EPS) * (1 + self._ceiling.norm + float(length_T.max()))
        slack_T = 2 * (unit * (np.maximum.accumulate(length_T) + 2.0 + np.abs(most_T)) + wide)
        certain_T = most_T - slack_T > self._ceiling(moved_TD) - self._radii[0] ** 2 - self._top
        near_TS = heat.gain_TS >= (most_T - slack_T).astype(most_T.dtype)[:, None]
        rivals_T = np.count_nonzero(near_TS, axis=1) - (heat.best_T >= 0)
        if self._compete:  # the newcomer of the step is a rival too, where it did not win
            own_T = np.einsum("td,td->t", heat.x_TD, moved_TD) + heat.joining_T
            rivals_T += (heat.best_T >= 0) & (own_T >= most_T - slack_T)
        held_T = certain_T & (rivals_T == 0)
        steps = turns if held_T.all() else int(held_T.argmin())
        sum_D[:] = path[steps]
        tied = steps < turns and bool(certain_T[steps])
        return steps, np.flatnonzero(near_TS[steps]) if tied else None

    def _take_back(self, heat: Heat, steps: int) -> None:
        for turn in range(len(heat.best_T) - 1, steps - 1, -1):
            best = heat.best_T[turn]
            if best == REFUSED:
                continue
            self._row_SD[best], self._gain_S[best] = heat.gone_TD[turn], heat.lost_T[turn]

    def _settle(self, near: Indices, x_D: Matrix, sum_D: Vector) -> int:
        """Take one newcomer where candidates, or one and the newcomer, tie within rounding."""
        found = settle(self._row_SD[near], self._slot_S[near], sum_D, x_D, self._compete)
        if found == REFUSED:
            return REFUSED
        best = int(near[found])
        sum_D += x_D.astype(np.float64) - self._row_SD[best]
        self._row_SD[best] = x_D
        self._gain_S[best] = gains(x_D[None], self._ceiling.sum_D)[0] - self._top
        return best


@dataclass(frozen=True, slots=True)
class Heat:
    """Steps taken in a shortlist, not yet judged. Gains are relative to the shortlist's top."""

    x_TD: Matrix  # newcomers
    gain_TS: Matrix  # of every candidate before each step
    joining_T: Vector  # gains of the newcomers when the shortlist was made
    best_T: Indices  # who left, by place in the shortlist, or REFUSED
    most_T: Vector  # its gain
    gone_TD: Matrix  # its row
    lost_T: Matrix  # and its gain when the shortlist was made


def gains(row_ND: Matrix, sum_D: Vector) -> Vector:
    """z . s - z . z of each row, to float64 rounding."""
    wide_ND = row_ND.astype(np.float64, copy=False)
    return np.asarray(wide_ND @ sum_D - np.einsum("nd,nd->n", wide_ND, wide_ND))


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
    rough_N = gains(row_ND, sum_D)
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
