"""Slots of all shards that may have the largest count while a block is placed, and the others.

Shapes: T newcomers of the block, D embedding, K slots of this shard, L steps, c candidates, m of
them in this shard, n new ones, X rows of those who were proposed to leave.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from memory.eviction.audit import Outside, Steps
from memory.eviction.block import Block, alike, block_size
from memory.eviction.group import Group
from memory.eviction.race import Proposal, Race, Room, slack
from memory.scores import Score

MOST_CANDIDATES = 4096
"""Of all shards. A memory of no more slots has no others."""

SPARE = 4
"""Of so many rows of who left there is room for one more: they were proposed, and it did not
hold."""


class Rooms:
    """Arrays kept from block to block: fresh memory costs as much as filling it.

    Args:
        z_KD: rows of this shard.
        group: who holds the other shards.
    """

    def __init__(self, z_KD: Tensor, group: Group) -> None:
        turns, slots = block_size(len(z_KD)), len(z_KD) * group.size
        self.near_TK = z_KD.new_empty(turns, len(z_KD))
        self.race = Room(turns, min(slots, max(MOST_CANDIDATES, 2 * group.size)), z_KD)
        most_left = 0 if slots <= MOST_CANDIDATES else turns + max(SPARE, turns // SPARE)
        self.left_XK = z_KD.new_empty(most_left, len(z_KD))


class Candidates:
    """The candidates' race, and the audit of the slots outside.

    Args:
        block: the newcomers.
        z_KD: rows of this shard.
        count_K: their counts, float64.
        score: h.
        unit: relative difference of counts within which they tie.
        compete: DUEL's Algorithm 1.
        group: who holds the other shards.
        rooms: of the same shard.
    """

    def __init__(
        self,
        block: Block,
        z_KD: Tensor,
        count_K: Tensor,
        score: Score,
        unit: float,
        compete: bool,
        group: Group,
        rooms: Rooms,
    ) -> None:
        self._block, self._z_KD, self._score, self._group = block, z_KD, score, group
        self._unit, self._left_XK = unit, rooms.left_XK
        (most_of_ranks,) = group.together(count_K.max()[None])
        level = float(most_of_ranks.max())
        self.outside = Outside((count_K - level).to(z_KD.dtype), compete)
        self.race = Race(block, score, level, unit, compete, rooms.race)
        self._slots = group.size * len(z_KD)
        self._mine = torch.empty(0, dtype=torch.int64, device=z_KD.device)
        self._place_m = torch.empty(0, dtype=torch.int64)  # of mine among all candidates
        self._held = 0  # candidates so far
        self._row: dict[int, int] = {}  # in left_XK, of a column that was proposed to leave

    @property
    def are_all(self) -> bool:
        """Whether no slot is left outside."""
        return self._held == self._slots

    @property
    def take_all(self) -> bool:
        """Whether all slots may join."""
        return self._held + self.race.room == self._slots

    @property
    def room(self) -> int:
        """Slots of this shard that may still join."""
        return self.race.room // self._group.size

    def widen(self, mine: Tensor) -> None:
        """These slots of this shard join, and those that the other ranks name."""
        rank, capacity = self._group.rank, len(self._z_KD)
        slot_n, apart_n, z_nD, near_nT = self._group.together(
            mine + rank * capacity,
            self.outside.apart_K[mine],
            self._z_KD[mine],
            self._block.near_TK.index_select(1, mine).T,
        )
        self.race.widen(
            slot_n.cpu().numpy(), apart_n.cpu().numpy(), z_nD.cpu(), near_nT.T.cpu().numpy()
        )
        own = torch.nonzero(slot_n.cpu() // capacity == rank).flatten()
        self._place_m = torch.cat([self._place_m, self._held + own])
        self._mine = torch.cat([self._mine, mine])
        self._held += len(slot_n)
        self.outside.leave_out(mine)

    def carry_out(self, proposal: Proposal, sure: bool) -> int:
        """Do the steps of the proposal that no slot outside overrules, in any shard: how many; -1
        and none if there is no room to tell."""
        held = len(proposal)
        if not self.are_all:
            if not self._make_left(proposal):
                return -1
            steps = self._steps(proposal)
            held = self._group.least(self.outside.follow(steps, sure=int(sure)))
            self.outside.carry_out(steps, held)
        self.race.keep(proposal, held)
        return held

    def _steps(self, proposal: Proposal) -> Steps:
        near_LK = self._block.near_TK[self.race.turn :][: len(proposal)]
        turns, near_TK = len(self._block), self._block.near_TK
        # A refused newcomer stands behind all slots. Slots are named from this shard's first.
        order_L = np.where(proposal.slot_L < 0, self._slots, proposal.slot_L)
        return Steps(
            near_LK=near_LK,
            left=[
                near_TK[column] if column < turns else self._left_XK[self._row[column]]
                for column in proposal.column_L.tolist()
            ],
            slot_L=order_L - self._group.rank * len(self._z_KD),
            apart_L=proposal.apart_L,
            margin_L=slack(proposal.apart_L + self.race.level, self._unit),
        )

    def _make_left(self, proposal: Proposal) -> bool:
        """Rows of h with all slots of candidates who leave; False if there is no room for them."""
        turns, row = len(self._block), self._row
        columns = [column for column in proposal.column_L.tolist() if column >= turns]
        new = [column for column in columns if column not in row]
        made = slice(len(row), len(row) + len(new))
        if made.stop > len(self._left_XK):
            return False
        if new:
            z_nD = self.race.rows(np.array(new)).to(self._z_KD.device)
            alike(z_nD, self._z_KD, self._score, self._left_XK[made])
            row.update(zip(new, range(made.start, made.stop), strict=True))
        return True

    def add_to(self, count_K: Tensor) -> None:
        """Add what all steps have changed to the counts of this shard."""
        if self.are_all:
            change_c = torch.from_numpy(self.race.change())
            count_K[self._mine] += change_c[self._place_m].to(count_K)
        else:
            weight_T, gone = self.race.weights()
            weight_X = self._left_XK.new_zeros(len(self._row))
            weight_X[torch.tensor([self._row[column] for column in gone], dtype=torch.int64)] = 1
            near_TK = self._block.near_TK
            count_K += torch.from_numpy(weight_T).to(near_TK) @ near_TK
            count_K -= weight_X @ self._left_XK[: len(weight_X)]
        slot_S, count_S = self.race.holders()
        slot_S = slot_S - self._group.rank * len(count_K)
        here_S = (slot_S >= 0) & (slot_S < len(count_K))
        here = torch.from_numpy(slot_S[here_S]).to(count_K.device)
        count_K[here] = torch.from_numpy(count_S[here_S]).to(count_K)
