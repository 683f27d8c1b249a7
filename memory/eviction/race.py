"""The sequential rule of DUEL among a few candidates, on the host.

Slots that may come to have the largest count, and the newcomers of a block, are columns side by
side. A step adds the row of who comes and subtracts that of who leaves, and opens and closes their
columns: no row ever changes, so steps can be taken back.

Shapes: T newcomers of a block, D embedding, c candidates, R of them whose rows have been made, n
of anything, L steps, W = T + c columns: newcomers, then candidates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from memory.eviction.block import Block
from memory.eviction.bounds import Indices, Matrix, Vector
from memory.scores import Score

Count = TypeVar("Count", float, Vector)

REFUSED = -1
"""In place of a slot: the newcomer itself has the largest count and does not join."""

AHEAD = 8
"""Rows made together when one is missing: of those that are most likely to leave next."""

ROWS = 3
"""Rows of candidates that there is room for, times the newcomers of the block."""

FALL = 8
"""Counts are followed less a level, so that float32 holds what sets the largest apart; when the
largest has fallen to this part of the level, it no longer does."""


class Room:
    """Arrays of a race, kept from block to block: fresh memory costs as much as filling it.

    Args:
        turns: newcomers of a block, at most.
        most: candidates, at most.
        like: rows [any, D] of the type and size of the memory's.
    """

    def __init__(self, turns: int, most: int, like: Tensor) -> None:
        self.most, dim = most, like.shape[1]
        empty = torch.empty(0, dtype=like.dtype).new_empty
        self.h_TW = empty(turns, turns + most).numpy()
        self.h_RW = empty(ROWS * turns + AHEAD, turns + most).numpy()
        self.z_cD = empty(most, dim).numpy()
        self.z_DW = empty(dim, turns + most)  # a few rows times this is twice as fast


@dataclass(frozen=True, slots=True)
class Proposal:
    """Steps that are right if no slot outside the candidates has a larger count."""

    column_L: Indices  # who left: a newcomer, or from T on a candidate
    slot_L: Indices  # its slot, or REFUSED
    apart_L: Vector  # its count, less the level
    total_LT: list[Vector]  # sums of h of the newcomers with the memory after each step

    def __len__(self) -> int:
        return len(self.column_L)


class Race:
    """The candidates and the newcomers of a block, and how like each other they are.

    Args:
        block: the newcomers.
        score: h.
        level: the largest count, which all are followed less.
        unit: relative difference of counts within which they tie.
        compete: DUEL's Algorithm 1, where the newcomer is counted with the others and may be the
            one that leaves; else Algorithm 2.
        room: large enough for the block.
    """

    def __init__(
        self, block: Block, score: Score, level: float, unit: float, compete: bool, room: Room
    ) -> None:
        self._turns = turns = len(block)
        self._score, self._room = score, room
        self.level, self._unit, self._compete = level, unit, compete
        width = turns + room.most
        self._h_TW, self._h_RW = room.h_TW[:turns, :width], room.h_RW[:, :width]
        self._h_TW[:, :turns] = block.among_TT
        room.z_DW[:, :turns] = block.x_TD.T
        self._own_T = block.among_TT.diagonal().astype(np.float64)
        self._total_T = block.total_T
        self._row: dict[int, int] = {}  # of a candidate's column
        self._row_column: list[int] = []
        self._made_W = np.zeros(width, self._h_TW.dtype)  # -inf: has a row
        self._slot_W = np.full(width, REFUSED, np.int64)
        self._apart_W = np.full(width, -np.inf, self._h_TW.dtype)  # -inf: not in the memory
        self._before_W = self._apart_W  # as it was before the last proposal
        self._gone: list[int] = []  # columns of who left
        self._joined: list[int] = []
        self._width = turns
        self.turn = 0

    @property
    def room(self) -> int:
        """Candidates that may still join."""
        return len(self._slot_W) - self._width

    def widen(self, slot_n: Indices, apart_n: Matrix, z_nD: Tensor, near_Tn: Matrix) -> None:
        """More candidates, none of which has changed hands within the block.

        Args:
            slot_n: where they stand.
            apart_n: their counts at this moment, less the level.
            z_nD: their rows, on the host.
            near_Tn: h of the newcomers and them.
        """
        first, last = self._width, self._width + len(slot_n)
        self._room.z_cD[first - self._turns : last - self._turns] = z_nD
        self._room.z_DW[:, first:last] = z_nD.T
        self._h_TW[:, first:last] = near_Tn
        self._slot_W[first:last], self._apart_W[first:last] = slot_n, apart_n
        self._width = last
        column_R = np.array(self._row_column, np.int64)
        due_r = np.flatnonzero(self._apart_W[column_R] > -np.inf)  # the others have left
        if len(due_r):
            h_rn = self._score.apply_(self.rows(column_R[due_r]) @ z_nD.T)
            self._h_RW[due_r, first:last] = h_rn.numpy()

    def run(self, steps: int) -> Proposal:
        """Let newcomers in, one by one, each evicting the largest count of its moment.

        Fewer than `steps` at the end of the block, where there is no room for rows, or counts have
        fallen too far. `keep` must follow.
        """
        self._before_W, total_T = self._apart_W.copy(), self._total_T.copy()
        columns, slots, aparts, totals = [], [], [], []
        for now in range(self.turn, min(self.turn + steps, self._turns)):
            if self._compete:
                self._apart_W[: self._width] += self._h_TW[now, : self._width]
            column, apart = self._largest()
            own = float(total_T[now]) - self.level
            refused = self._compete and own > apart + slack(apart + self.level, self._unit)
            low = (apart + self.level + 0.25) * FALL < self.level + 0.25
            if low or not (refused or self._has_row(column, now)):
                if self._compete:
                    self._apart_W[: self._width] -= self._h_TW[now, : self._width]
                break
            if refused:
                column, apart = now, own
            self._exchange(now, column, total_T)
            columns.append(column)
            slots.append(REFUSED if refused else int(self._slot_W[column]))
            aparts.append(apart)
            totals.append(total_T.copy())
        return Proposal(
            np.array(columns, np.int64), np.array(slots, np.int64), np.array(aparts), totals
        )

    def most(self) -> float:
        """The largest count that the next step sees, less the level; -inf without candidates."""
        seen_W = self._apart_W[: self._width]
        return float((seen_W + self._h_TW[self.turn, : self._width] * self._compete).max())

    def keep(self, proposal: Proposal, held: int) -> None:
        """The first steps are done, the others taken back."""
        if held < len(proposal):
            self._apart_W, total_T = self._before_W, self._total_T.copy()
            for step, column in enumerate(proposal.column_L[:held].tolist()):
                now = self.turn + step
                if self._compete:
                    self._apart_W[: self._width] += self._h_TW[now, : self._width]
                self._exchange(now, column, total_T)
        if held:
            self._total_T = proposal.total_LT[held - 1]
        stays = proposal.slot_L[:held] != REFUSED
        self._joined += (self.turn + np.flatnonzero(stays)).tolist()
        self._gone += proposal.column_L[:held][stays].tolist()
        self.turn += held

    def _exchange(self, now: int, column: int, total_T: Vector) -> None:
        """A newcomer takes the place of who stands in a column; its own, where it is refused."""
        gone_W = self._made(column)
        self._apart_W[: self._width] -= gone_W
        if not self._compete:
            self._apart_W[: self._width] += self._h_TW[now, : self._width]
        if column == now:
            return
        total_T += self._h_TW[now, : self._turns]
        total_T -= gone_W[: self._turns]
        self._apart_W[column] = -np.inf
        self._apart_W[now] = total_T[now] - self._own_T[now] - self.level
        self._slot_W[now] = self._slot_W[column]

    def holders(self) -> tuple[Indices, Vector]:
        """Slots that changed hands, and the counts of the newcomers who hold them."""
        turns = sorted(set(self._joined) - set(self._gone))
        return self._slot_W[turns], self._total_T[turns] - self._own_T[turns]

    def weights(self) -> tuple[Vector, list[int]]:
        """Whose rows have been added to the counts: of each newcomer how often, 0 or 1 [T]; and
        the columns of candidates whose rows have been subtracted."""
        weight_T = np.zeros(self._turns)
        weight_T[self._joined] = 1
        weight_T[[column for column in self._gone if column < self._turns]] = 0
        return weight_T, [column for column in self._gone if column >= self._turns]

    def change(self) -> Vector:
        """By how much the counts of those candidates who stay have changed [c]."""
        weight_T, gone = self.weights()
        weight_R = np.zeros(len(self._row_column), self._h_TW.dtype)
        weight_R[[self._row[column] for column in gone]] = 1
        part = slice(self._turns, self._width)
        change_c: Vector = weight_T.astype(weight_R.dtype) @ self._h_TW[:, part]
        change_c -= weight_R @ self._h_RW[: len(weight_R), part]
        return change_c

    def rows(self, column_n: Indices) -> Tensor:
        """Rows of candidates [n, D]."""
        return torch.from_numpy(self._room.z_cD[column_n - self._turns])

    def _largest(self) -> tuple[int, float]:
        """Who has the largest count, and the count less the level. Of those that tie, the lowest
        slot."""
        apart_W = self._apart_W[: self._width]
        column = int(apart_W.argmax())
        apart = float(apart_W[column])
        tied_W = apart_W >= apart - slack(apart + self.level, self._unit)
        if np.count_nonzero(tied_W) > 1:
            tied = np.flatnonzero(tied_W)
            column = int(tied[self._slot_W[tied].argmin()])
        return column, apart

    def _made(self, column: int) -> Matrix:
        """h of who stands in a column with all columns."""
        h_W: Matrix = self._h_TW[column] if column < self._turns else self._h_RW[self._row[column]]
        return h_W[: self._width]

    def _has_row(self, column: int, now: int) -> bool:
        """Make rows, if this column's is missing; False if there is no room for them."""
        if column < self._turns or column in self._row:
            return True
        if len(self._row_column) + AHEAD > len(self._h_RW):
            return False
        self._make(self._foresee(column, now))
        return True

    def _foresee(self, column: int, now: int) -> Indices:
        """This candidate and those that may leave after it."""
        near_lc = self._h_TW[now : now + AHEAD, self._turns : self._width]
        # Half of what joins: evictions take about as much away where counts are largest.
        reach_c = np.full(len(near_lc), 0.5, near_lc.dtype) @ near_lc
        reach_c += self._apart_W[self._turns : self._width]
        reach_c += self._made_W[self._turns : self._width]
        reach_c[column - self._turns] = np.inf
        number = min(AHEAD, len(reach_c))
        likely_n = np.argpartition(reach_c, len(reach_c) - number)[-number:]
        ahead: Indices = likely_n[reach_c[likely_n] > -np.inf] + self._turns
        return ahead

    def _make(self, column_n: Indices) -> None:
        first, width = len(self._row_column), self._width
        made = slice(first, first + len(column_n))
        h_nW = torch.from_numpy(self._h_RW[made, :width])
        torch.mm(self.rows(column_n), self._room.z_DW[:, :width], out=h_nW)
        self._score.apply_(h_nW)
        self._row.update(zip(column_n.tolist(), range(made.start, made.stop), strict=True))
        self._row_column += column_n.tolist()
        self._made_W[column_n] = -np.inf


def slack(most: Count, unit: float) -> Count:
    """How far below the largest a count may lie and still tie with it."""
    return unit * (most + 0.25)  # what left a count of almost none has left its rounding there
