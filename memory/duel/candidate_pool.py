"""The sequential rule of DUEL among the slots that an index counts highest.

The pool holds copies of the rows with the largest approximate counts, drawn from all slots at each
flush and counted anew. A batch is decided among the best of the pool and the batch itself: all
their similarities are one block, and each step is exact within it.

Shapes: B newcomers, D embedding, Q places on the pool, S places shortlisted, W = S + B candidates.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memory.duel.cells_counts import CellCounts
from memory.duel.cells_grid import Matrix, Slots, Vector
from memory.duel.cells_moments import LinearUpdate

SHORTLIST_ROWS = 512
"""S. Twice the newcomers of a block, so that the last step still has a choice."""

SLACK = 0.005
"""Share of a count by which the best candidate may lie below the best outside before another
shortlist or pool is drawn. Evictions lower the counts outside too, which is not followed."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a block of newcomers.

    Attributes:
        plan: the slot of each newcomer, -1 where it was refused.
        slots: those that have a new row now, distinct.
        before_ND: their old rows.
        newest_N: which newcomer stands in each.
    """

    plan: list[int]
    slots: Slots
    before_ND: Matrix
    newest_N: Slots


class CandidatePool:
    """The slots of the largest counts, with their rows.

    Args:
        slots: int64 [Q], distinct, in rising order.
        row_QD: copies of their rows.
        count_Q: their counts.
        outside: a pool of the best slot of each cell among the others, or None.
        capacity: K.
    """

    def __init__(
        self,
        slots: Slots,
        row_QD: Matrix,
        count_Q: Vector,
        capacity: int,
        outside: CandidatePool | None = None,
    ) -> None:
        self.slots, self.row_QD, self.count_Q = slots, row_QD, count_Q
        self.outside = outside
        self._kept: Slots = np.empty(0, dtype=np.int64)
        self._place_K = np.full(capacity, -1, dtype=np.int32)
        self._place_K[slots] = np.arange(len(slots))

    def take(self, x_BD: Matrix, count_B: Vector, counts: CellCounts, compete: bool) -> Outcome:
        """Decide on newcomers in turn, at least one, while a candidate has the largest count.

        The pool then holds their rows; the counts of all other slots are still to be moved.

        Args:
            count_B: N that each newcomer would have, joining alone.
            compete: a newcomer joins first and may be the one that leaves (DUEL, Algorithm 1).
        """
        top, floor = self._shortlist()
        simulation = CandidateSimulation(self.row_QD[top], self.count_Q[top], x_BD, count_B, counts)
        where = [simulation.step(0, compete)]
        while len(where) < len(x_BD) and simulation.best() >= floor:
            where.append(simulation.step(len(where), compete))
        place_B = np.array([top[place] if place >= 0 else -1 for place in where])
        plan = [int(self.slots[place]) if place >= 0 else -1 for place in place_B]
        self.count_Q[top] = simulation.count_W[: len(top)]
        newest = {place: turn for turn, place in enumerate(place_B.tolist()) if place >= 0}
        places = np.array(sorted(newest), dtype=np.int64)
        turns = np.array([newest[place] for place in sorted(newest)], dtype=np.int64)
        before_ND = self.row_QD[places]
        self.row_QD[places] = x_BD[turns]
        self.count_Q[places] = simulation.count_W[len(top) + turns]
        self._kept = np.union1d(top, places)
        return Outcome(plan, self.slots[places], before_ND, turns)

    def moved(self, line: LinearUpdate, counts: CellCounts) -> None:
        """All counts but those of the last block's candidates moved along this line."""
        rise_Q = line.at(self.row_QD, counts.grid.cell_K[self.slots])
        rise_Q[self._kept] = 0.0
        self.count_Q += rise_Q
        self._kept = np.empty(0, dtype=np.int64)
        if self.outside is not None:
            self.outside.moved(line, counts)

    def refreshed(self, slots: Slots, z_ND: Matrix, line: LinearUpdate, counts: CellCounts) -> None:
        """These slots have new rows; the counts of all others moved along the line."""
        self._overwrite(slots, z_ND)
        if self.outside is not None:
            self.outside._overwrite(slots, z_ND)
        self.moved(line, counts)
        self._reestimate(slots, counts)
        if self.outside is not None:
            self.outside._reestimate(slots, counts)

    def _overwrite(self, slots: Slots, z_ND: Matrix) -> None:
        place_N = self._place_K[slots]
        self.row_QD[place_N[place_N >= 0]] = z_ND[place_N >= 0]

    def _reestimate(self, slots: Slots, counts: CellCounts) -> None:
        places = self._place_K[slots]
        places = places[places >= 0]
        self.count_Q[places] = counts.estimate(self.slots[places], self.row_QD[places])

    @property
    def exhausted(self) -> bool:
        """Whether a slot that is not on the pool has more than all that are."""
        if self.outside is None or len(self.outside.slots) == 0:
            return False
        return bool(self.count_Q.max() < (1 - SLACK) * self.outside.count_Q.max())

    def _shortlist(self) -> tuple[Slots, float]:
        """Places of the largest counts, and the count at which another slot may have more.

        In slot order: of equal counts the lowest goes first.
        """
        floor = -np.inf
        if self.outside is not None and len(self.outside.slots):
            floor = float(self.outside.count_Q.max())
        size = min(SHORTLIST_ROWS, len(self.slots))
        if size == len(self.slots):
            return np.arange(size), (1 - SLACK) * floor
        order: Slots = np.argpartition(self.count_Q, len(self.slots) - size - 1)
        floor = max(floor, float(self.count_Q[order[-size - 1]]))
        return np.sort(order[-size:]).astype(np.int64), (1 - SLACK) * floor


class CandidateSimulation:
    """Counts of all candidates while newcomers are taken in turn.

    Args:
        row_SD: rows shortlisted.
        count_S: their counts.
        x_BD: newcomers.
        count_B: N that each would have, joining alone.
        counts: gives the similarities.
    """

    def __init__(
        self,
        row_SD: Matrix,
        count_S: Vector,
        x_BD: Matrix,
        count_B: Vector,
        counts: CellCounts,
    ) -> None:
        row_WD = np.concatenate([row_SD, x_BD])
        self._h_WW = counts.similar(row_WD, row_WD)
        np.fill_diagonal(self._h_WW, 0.0)
        self.count_W = np.concatenate([count_S, count_B])
        self._bar_W = np.zeros(len(row_WD))  # -inf for who is not in the memory
        self._bar_W[len(row_SD) :] = -np.inf
        self._place_W = np.arange(len(row_WD))  # in the shortlist
        self._first = len(row_SD)

    def best(self) -> float:
        """The largest count of this moment."""
        return float((self.count_W + self._bar_W).max())

    def step(self, turn: int, compete: bool) -> int:
        """Place one newcomer. Returns the shortlist's place that it takes, or -1."""
        new, count_W = self._first + turn, self.count_W
        if compete:
            self._join(new)
        gone = int((count_W + self._bar_W).argmax())
        count_W -= self._h_WW[gone]
        self._bar_W[gone] = -np.inf
        if gone == new:
            return -1
        if not compete:
            self._join(new)
        self._place_W[new] = self._place_W[gone]
        return int(self._place_W[gone])

    def _join(self, new: int) -> None:
        self.count_W += self._h_WW[new]
        self._bar_W[new] = 0.0
