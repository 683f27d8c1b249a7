"""The sequential rule of DUEL inside a small block of candidates, under linear h.

Shapes: B newcomers, D embedding, K slots, P rows of the pool, R rows replaced, S rows of the
shortlist.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from memory.eviction.bounds import Ceiling, Matrix, Vector, exact_gain, rounding

Indices = NDArray[np.int64]

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
    """

    def __init__(self, pool: Pool, sum_D: Vector, size: int, radii: tuple[float, float]) -> None:
        self._pool, self._radii = pool, radii
        limit = pool.ceiling(sum_D - pool.ceiling.sum_D)
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
        self._row_SD = pool.row_PD[self._index]
        self._gain_S = gains(self._row_SD, sum_D)

    def run(self, x_BD: Matrix, sum_D: Vector, plan: list[int]) -> int:
        """Take newcomers in turn until one cannot be certified. Returns how many were taken.

        A step is certified while the best candidate has more than any row outside can have. Where
        rounding could decide between candidates, `settle` does.

        Args:
            x_BD: the newcomers.
            sum_D: s, moved along.
            plan: the slot of each newcomer taken is appended.
        """
        row_SD, gain_S, ceiling = self._row_SD, self._gain_S, self._ceiling
        slot_S = self._pool.slots[self._index]
        wide_BD = x_BD.astype(np.float64, copy=False)
        joining_B = gains(wide_BD, ceiling.sum_D)
        noise = rounding(len(sum_D), float(np.finfo(row_SD.dtype).eps)) * self._radii[1]
        floor = rounding(len(sum_D), WIDE_EPS) * (1 + float(np.linalg.norm(sum_D)))
        least = self._radii[0] ** 2
        move_S, now_S = np.empty(len(row_SD), row_SD.dtype), np.empty(len(row_SD))
        taken = []
        for turn in range(len(x_BD)):
            moved_D = sum_D - ceiling.sum_D
            np.dot(row_SD, moved_D.astype(row_SD.dtype), out=move_S)
            np.add(gain_S, move_S, out=now_S)
            best = int(now_S.argmax())
            most = float(now_S[best])
            slack = 2 * (noise * float(moved_D @ moved_D) ** 0.5 + floor)
            if not most - slack > ceiling(moved_D) - least:
                break
            now_S[best] = -np.inf
            if now_S[now_S.argmax()] >= most - slack:
                now_S[best] = most
                near = np.flatnonzero(now_S >= most - slack)
                best = int(near[settle(row_SD[near], slot_S[near], sum_D)])
            sum_D += wide_BD[turn]
            sum_D -= row_SD[best]
            row_SD[best] = x_BD[turn]
            gain_S[best] = joining_B[turn]
            taken.append(best)
        plan.extend(slot_S[taken].tolist())
        self._pool.row_PD[self._index[taken]] = row_SD[taken]
        return len(taken)


def gains(row_ND: Matrix, sum_D: Vector) -> Vector:
    """z . s - z . z of each row, to float64 rounding."""
    wide_ND = row_ND.astype(np.float64, copy=False)
    return np.asarray(wide_ND @ sum_D - np.einsum("nd,nd->n", wide_ND, wide_ND))


def settle(row_ND: Matrix, slot_N: Indices, sum_D: Vector) -> int:
    """The index of the row with the largest exact gain; ties go to the lowest slot."""
    gain_N = exact_gain(row_ND, sum_D)
    equal = np.flatnonzero(gain_N == gain_N.max())
    return int(equal[slot_N[equal].argmin()])
