"""Newcomers taken together, and how like the slots and each other they are.

Shapes: B newcomers, D embedding, K slots, T newcomers of the block, R rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from memory.eviction.bounds import Vector
from memory.eviction.group import Group
from memory.scores import BLOCK_ELEMENTS, Score

NEWCOMERS = 256
"""Most of a block: more would save nothing."""

FEWEST = 32
"""However large the memory: the cost of finding candidates is shared by a block."""

PART_ELEMENTS = 1 << 21
"""Of a product that is made at a time: it is still in the cache when h is applied."""


class Block:
    """The first newcomers of a batch.

    Args:
        z_BD: unit rows of the batch.
        z_KD: unit rows of the memory.
        score: h.
        group: who holds the other shards.
        room_RK: to hold `near_TK`, which is as good as long as nothing else is written there.

    Attributes:
        x_TD: their rows.
        near_TK: h of them and the slots of this shard, as those are before the block.
        among_TT: h of them among themselves, on the host.
        total_T: sum of h of each with the slots of all shards, float64, on the host.
    """

    def __init__(
        self, z_BD: Tensor, z_KD: Tensor, score: Score, group: Group, room_RK: Tensor
    ) -> None:
        self.x_TD = z_BD[: len(room_RK)].clone()
        self.near_TK = alike(self.x_TD, z_KD, score, room_RK[: len(self.x_TD)])
        among_TT = alike(self.x_TD, self.x_TD, score)
        self.among_TT = among_TT.cpu().numpy()
        total_T = group.total(self.near_TK.sum(dim=1).double())
        self.total_T: Vector = total_T.cpu().numpy()

    def __len__(self) -> int:
        return len(self.x_TD)


def block_size(capacity: int) -> int:
    """How many newcomers a memory of so many slots takes together."""
    return max(FEWEST, min(NEWCOMERS, BLOCK_ELEMENTS // capacity))


def alike(row_RD: Tensor, z_KD: Tensor, score: Score, room_RK: Tensor | None = None) -> Tensor:
    """h of rows and slots [R, K]; in `room_RK`, where it is given."""
    h_RK = z_KD.new_empty(len(row_RD), len(z_KD)) if room_RK is None else room_RK
    step = max(1, PART_ELEMENTS // max(1, len(row_RD))) if z_KD.device.type == "cpu" else len(z_KD)
    for start in range(0, len(z_KD), step):
        part_Rk = h_RK[:, start : start + step]
        torch.mm(row_RD, z_KD[start : start + step].T, out=part_Rk)
        score.apply_(part_Rk)
    return h_RK


def column_sums(h_RK: Tensor, weight: float) -> Tensor:
    """Weight times the sum of the rows [K]: as a product, which reads them at the speed of the
    memory they lie in."""
    return h_RK.new_full((len(h_RK),), weight) @ h_RK
