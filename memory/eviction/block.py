"""Newcomers taken together, and how like the slots and each other they are.

Shapes: B newcomers, D embedding, K slots, T newcomers of the block, R rows, S slots taken over.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from memory.eviction.bounds import Indices, Vector
from memory.eviction.group import Group
from memory.scores import BLOCK_ELEMENTS, Score

NEWCOMERS = 256
"""Most of a block: more would save nothing."""

FEWEST = 32
"""However large the memory: the cost of finding candidates is shared by a block."""

COLUMN_ROWS = 8192
"""Rows of the column multiplied at a time: the product is still in the cache when h is applied."""


class Block:
    """The first newcomers of a batch. Rows of `near_TK` before `turn` have been placed.

    Args:
        z_BD: unit rows of the batch.
        z_KD: unit rows of the memory.
        score: h.
        group: who holds the other shards.
    """

    def __init__(self, z_BD: Tensor, z_KD: Tensor, score: Score, group: Group) -> None:
        self._group = group
        count = max(FEWEST, min(NEWCOMERS, BLOCK_ELEMENTS // len(z_KD)))
        self.x_TD = z_BD[:count].clone()
        self.near_TK = alike(self.x_TD, z_KD, score)
        among_TT = alike(self.x_TD, self.x_TD, score)
        self.among_TT = among_TT.cpu().numpy()
        self.total_T = self._total(self.near_TK)
        self.turn = 0

    def __len__(self) -> int:
        return len(self.x_TD)

    def goes_on_with(self, z_BD: Tensor) -> bool:
        """Whether these newcomers begin with those not yet placed."""
        return torch.equal(z_BD[: len(self) - self.turn], self.x_TD[self.turn :])

    def _total(self, near_tS: Tensor) -> Vector:
        """Sums of rows over the slots of all shards, float64 [t]."""
        return self._group.total(near_tS.sum(dim=1).double()).cpu().numpy()

    def advance(self, slot_L: Indices) -> None:
        """Newcomers took over these slots, in turn; -1 where one was refused.

        Slots are those of all shards.
        """
        holder = {slot: self.turn + step for step, slot in enumerate(slot_L.tolist()) if slot >= 0}
        self.turn += len(slot_L)
        if self.turn == len(self) or not holder:
            return
        later_tK, capacity = self.near_TK[self.turn :], self.near_TK.shape[1]
        first = self._group.rank * capacity
        mine = {
            slot - first: turn
            for slot, turn in holder.items()
            if slot // capacity == self._group.rank
        }
        slot_S = torch.tensor(list(mine), dtype=torch.int64, device=later_tK.device)
        among_tT = self.among_TT[self.turn :]
        self.total_T[self.turn :] += among_tT[:, list(holder.values())].sum(axis=1, dtype=float)
        self.total_T[self.turn :] -= self._total(later_tK[:, slot_S])
        near_tS = among_tT[:, np.array(list(mine.values()), dtype=np.int64)]
        later_tK[:, slot_S] = torch.from_numpy(near_tS).to(later_tK.device)


def alike(row_RD: Tensor, z_KD: Tensor, score: Score) -> Tensor:
    """h of rows and slots [R, K]."""
    h_RK = torch.empty(len(row_RD), len(z_KD), dtype=z_KD.dtype, device=z_KD.device)
    step = COLUMN_ROWS if z_KD.device.type == "cpu" else len(z_KD)
    for start in range(0, len(z_KD), step):
        part_Rk = h_RK[:, start : start + step]
        torch.mm(row_RD, z_KD[start : start + step].T, out=part_Rk)
        score.apply_(part_Rk)
    return h_RK


def column_sums(h_RK: Tensor) -> Tensor:
    """Over the rows [K]: as a product, which reads them at the speed of the memory they lie in."""
    return h_RK.new_ones(len(h_RK)) @ h_RK
