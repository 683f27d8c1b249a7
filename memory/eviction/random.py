"""Eviction of a random sample."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from stream_ssl.memory.columns import REFUSED, Columns, Rows
from stream_ssl.memory.compute import to_host
from stream_ssl.memory.eviction.base import Policy
from stream_ssl.memory.shares import SlotWalk, Turns


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
        self._generator = torch.Generator().manual_seed(seed)

    def choose(self, rows: Rows) -> Tensor:
        return self.uniform(torch.full((len(rows),), self.columns.capacity))

    def choose_shared(self, rows: Rows, turns: Turns) -> Tensor:
        slots = self.columns.capacity
        drawn_B = self.drawn(len(rows)).tolist()
        return walked(turns, [(drawn, int(drawn * slots)) for drawn in drawn_B])

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


def walked(turns: Turns, drawn: Iterable[tuple[float, int]]) -> Tensor:
    """Return the slots of newcomers that take open slots in turn, int64 [B].

    Args:
        turns: the turns of the newcomers.
        drawn: for each newcomer, a number in [0, 1) and a slot. The newcomer takes the slot if all
            slots are open, and -1 refuses it. Otherwise the number selects one of the open slots.
    """
    walk, plan = SlotWalk(turns), []
    for number, slot in drawn:
        open_K = walk.open()
        if walk.must_join if slot == REFUSED else not open_K.all():
            open_n = np.flatnonzero(open_K)
            slot = int(open_n[int(number * len(open_n))])
        walk.take(slot)
        plan.append(slot)
    return torch.tensor(plan, dtype=torch.int64)
