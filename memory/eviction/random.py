"""Eviction of a random sample."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from stream_ssl.memory.columns import Columns, Rows
from stream_ssl.memory.compute import Generator, to_host
from stream_ssl.memory.eviction.base import Policy
from stream_ssl.memory.shares import SlotWalk, Turns

TRIES = 16
"""The slots that a newcomer tries while shares bar some. Usually at least half of all are open."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


class Random(Policy):
    """Each newcomer replaces a random slot, drawn uniformly. Ages are geometric with mean K.

    >>> from stream_ssl.memory import WorkingMemory
    >>> memory = WorkingMemory(capacity=1, dim=2, eviction=Random())
    >>> memory.add(torch.arange(3), torch.eye(2)[[0, 1, 0]]).evicted.tolist()
    [0, 1]
    """

    name = "random"

    def bind(self, columns: Columns, seed: int) -> None:
        super().bind(columns, seed)
        self._generator = Generator().manual_seed(seed)

    def choose(self, rows: Rows) -> Tensor:
        return self.uniform(torch.full((len(rows),), self.columns.capacity))

    def choose_shared(self, rows: Rows, turns: Turns) -> Tensor:
        number_B = self.drawn(len(rows))
        return walked(turns, tries(number_B, self.columns.capacity))

    def uniform(self, below_B: Tensor) -> Tensor:
        """Return a random integer in [0, n) for each n in `below_B`, int64 [B] on the CPU."""
        return (self.drawn(len(below_B)) * below_B).floor().to(torch.int64)

    def drawn(self, count: int) -> Tensor:
        """Return random numbers in [0, 1), float64."""
        # float64 draws are the same for a batch as for single samples; randint's may differ.
        return torch.rand(count, generator=self._generator, dtype=torch.float64)

    def state(self) -> dict[str, Tensor]:
        return {"generator": self._generator.get_state()}

    def load(self, state: dict[str, Tensor]) -> None:
        self._generator.set_state(to_host(state["generator"]))


def tries(number_B: Tensor, slots: int) -> list[list[int]]:
    """Return the slots that newcomers try in turn while they find barred ones, `TRIES` each.

    The first is the number's own part of the slots. The others are hashed from the number
    (splitmix64; Steele, Lea and Flood 2014), so each is uniform and independent of the others.

    Args:
        number_B: numbers in [0, 1), float64 on the CPU.
        slots: the number of slots.
    """
    state_BR = number_B.numpy().view(np.uint64)[:, None] + _GOLDEN * np.arange(
        TRIES, dtype=np.uint64
    )
    for shift, factor in _MIX:
        state_BR = (state_BR ^ (state_BR >> np.uint64(shift))) * np.uint64(factor)
    state_BR ^= state_BR >> np.uint64(31)
    slot_BR = ((state_BR >> np.uint64(11)) * 2.0**-53 * slots).astype(np.int64)
    slot_BR[:, 0] = (number_B.numpy() * slots).astype(np.int64)
    found: list[list[int]] = slot_BR.tolist()
    return found


def walked(turns: Turns, tries_BR: Iterable[Sequence[int]]) -> Tensor:
    """Return the slots of newcomers that take open slots in turn, int64 [B].

    Args:
        turns: the turns of the newcomers.
        tries_BR: the slots that each newcomer tries. It takes the first that is open. If none
            is, the last selects one of the open slots. If the first is -1, the newcomer is
            refused, unless its producer is below its guarantee.
    """
    walk, plan = SlotWalk(turns), []
    for tried_R in tries_BR:
        slot = walk.first_open(tried_R)
        walk.take(slot)
        plan.append(slot)
    return torch.tensor(plan, dtype=torch.int64)
