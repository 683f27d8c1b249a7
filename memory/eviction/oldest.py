"""Eviction of the sample that has been in the memory longest: the queue of MoCo.

Shapes: B newcomers, K slots of all ranks.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stream_ssl.memory.columns import Columns, Rows
from stream_ssl.memory.compute import to_host
from stream_ssl.memory.eviction.base import Policy
from stream_ssl.memory.shares import SlotWalk, Turns

OUT_OF_ORDER = -1
"""The value of the head when slots are not in order of arrival. Births then give the order."""


class Ages:
    """The birth of each slot in a full memory, and the oldest slot; the same on all ranks.

    Slots sorted by birth stay sorted while newcomers take slots out of the order, because newcomers
    are always younger. One sort therefore serves until all sorted slots are replaced.
    """

    def __init__(self, columns: Columns) -> None:
        (born_K,) = columns.group.all_gather(columns.born)
        of_rank_WK = to_host(born_K).view(columns.group.size, -1)  # slot j is on rank j mod W
        self.born_K = of_rank_WK.T.flatten().numpy().copy()
        self._order: list[tuple[int, int]] = []  # slots and births, oldest last

    def oldest(self, open_K: NDArray[np.bool_] | None = None) -> int:
        """Return the oldest of the open slots. None opens all of them."""
        if open_K is not None and not open_K.all():
            open_n = np.flatnonzero(open_K)
            return int(open_n[self.born_K[open_n].argmin()])
        while True:
            while self._order:
                slot, born = self._order[-1]
                if self.born_K[slot] == born:
                    return slot
                self._order.pop()
            slots = np.argsort(-self.born_K)
            self._order = list(zip(slots.tolist(), self.born_K[slots].tolist(), strict=True))


class Oldest(Policy):
    """First in, first out (MoCo, He et al. 2020, section 3.1).

    >>> from stream_ssl.memory import WorkingMemory
    >>> memory = WorkingMemory(capacity=2, dim=2, eviction=Oldest())
    >>> memory.add(torch.arange(3), torch.eye(2)[[0, 1, 0]]).evicted.tolist()
    [0]
    """

    name = "oldest"
    across_ranks = True

    def bind(self, columns: Columns, seed: int) -> None:
        super().bind(columns, seed)
        self._head = 0  # empty slots fill in order of arrival, so slot 0 is the oldest
        self._ages: Ages | None = None

    def choose(self, rows: Rows) -> Tensor:
        if self._head == OUT_OF_ORDER:
            return self._by_birth(rows, None)
        plan = self._in_order(len(rows))
        self._head = (self._head + len(rows)) % self.columns.capacity_of_all
        return plan

    def choose_shared(self, rows: Rows, turns: Turns) -> Tensor:
        plan = self._by_birth(rows, SlotWalk(turns))
        if self._head != OUT_OF_ORDER:
            in_order = torch.equal(plan, self._in_order(len(rows)))
            after = (self._head + len(rows)) % self.columns.capacity_of_all
            self._head = after if in_order else OUT_OF_ORDER
            self._ages = None if in_order else self._ages
        return plan

    def _in_order(self, count: int) -> Tensor:
        """Return the next `count` slots, from the head of the queue on."""
        return (self._head + torch.arange(count)) % self.columns.capacity_of_all

    def _by_birth(self, rows: Rows, walk: SlotWalk | None) -> Tensor:
        """Return the oldest slot at each step, among the slots that the walk leaves open."""
        ages = self._ages = self._ages or Ages(self.columns)
        plan: list[int] = []
        for born in to_host(rows.born).tolist():
            slot = ages.oldest(None if walk is None else walk.open())
            ages.born_K[slot] = born
            plan.append(slot)
            if walk is not None:
                walk.take(slot)
        return torch.tensor(plan, dtype=torch.int64)

    def state(self) -> dict[str, Tensor]:
        return {"head": torch.tensor([self._head])}

    def load(self, state: dict[str, Tensor]) -> None:
        self._head, self._ages = int(state["head"]), None

    def check(self) -> tuple[bool, str]:
        columns, group = self.columns, self.columns.group
        if self._head == OUT_OF_ORDER:
            return True, ""
        oldest = int(to_host(columns.born.argmin()))
        first = -(-(self._head - group.rank) // group.size) % columns.capacity
        if columns.occupied == columns.capacity and oldest != first:
            return False, f"queue head is slot {first}, the oldest is slot {oldest}"
        return True, ""
