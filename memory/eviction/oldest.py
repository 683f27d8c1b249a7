"""Evict the sample that has been in the memory longest: the queue of MoCo."""

from __future__ import annotations

import torch
from torch import Tensor

from memory.columns import Columns, Rows
from memory.compute import to_host
from memory.eviction.base import Policy


class Oldest(Policy):
    """First in, first out (MoCo, He et al. 2020, section 3.1).

    >>> from memory import WorkingMemory
    >>> memory = WorkingMemory(capacity=2, dim=2, eviction=Oldest())
    >>> memory.add(torch.arange(3), torch.eye(2)[[0, 1, 0]]).evicted.tolist()
    [0]
    """

    name = "oldest"
    across_ranks = True

    def bind(self, columns: Columns, seed: int) -> None:
        super().bind(columns, seed)
        self._head = 0  # empty slots fill in order of arrival, so slot 0 is the oldest

    def choose(self, rows: Rows) -> Tensor:
        slots = self.columns.capacity_of_all
        plan = (self._head + torch.arange(len(rows))) % slots
        self._head = (self._head + len(rows)) % slots
        return plan

    def on_replace(self, slots: Tensor, rows: Rows, before_RA: Tensor) -> None:
        """Raises ValueError unless they were the oldest: a queue is in order of arrival."""
        del before_RA
        in_order = (self._head + torch.arange(len(rows))) % self.columns.capacity
        if not torch.equal(to_host(slots), in_order):
            raise ValueError(
                f"slots {slots.tolist()} were taken over in a queue whose head is slot "
                f"{self._head}: around Oldest, take the oldest first or choose another policy"
            )
        self.choose(rows)

    def state(self) -> dict[str, Tensor]:
        return {"head": torch.tensor([self._head])}

    def load(self, state: dict[str, Tensor]) -> None:
        self._head = int(state["head"])

    def check(self) -> tuple[bool, str]:
        columns, group = self.columns, self.columns.group
        oldest = int(to_host(columns.born.argmin()))
        first = -(-(self._head - group.rank) // group.size) % columns.capacity
        if columns.occupied == columns.capacity and oldest != first:
            return False, f"queue head is slot {first}, the oldest is slot {oldest}"
        return True, ""
