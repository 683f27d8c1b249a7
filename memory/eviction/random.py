"""Evict whoever the dice name."""

from __future__ import annotations

import torch
from torch import Tensor

from memory.columns import Columns, Rows
from memory.compute import to_host
from memory.eviction.base import Policy


class Random(Policy):
    """Each newcomer replaces a uniformly drawn slot, so ages are geometric with mean K.

    >>> from memory import WorkingMemory
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

    def uniform(self, below_B: Tensor) -> Tensor:
        """A whole number in [0, n) for each of these n, int64 [B], on the CPU."""
        # In float64, as batches must draw what single samples draw: randint does not promise that.
        drawn_B = torch.rand(len(below_B), generator=self._generator, dtype=torch.float64)
        return (drawn_B * below_B).floor().to(torch.int64)

    def state(self) -> dict[str, Tensor]:
        return {"generator": self._generator.get_state()}

    def load(self, state: dict[str, Tensor]) -> None:
        self._generator.set_state(to_host(state["generator"]))
