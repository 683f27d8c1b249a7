"""Balance the classes by their labels: an oracle to compare with.

Shapes: B newcomers, C classes, k occupied slots.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush

import numpy as np
import torch
from torch import Tensor

from memory.columns import Columns, Rows
from memory.compute import to_host
from memory.eviction.base import Policy
from memory.shares import SlotWalk, Turns

Member = tuple[int, int]
"""born, slot"""


class ClassBalanced(Policy):
    """For each newcomer in turn, evict the oldest sample of the class that holds the most slots.

    The classes are counted before the newcomer joins. Ties go to the lowest label; samples
    without one, -1, are a class of their own. Reads labels, which no policy for use may: the
    balance it keeps is the best that any policy could.

    >>> from memory import WorkingMemory
    >>> memory = WorkingMemory(capacity=3, dim=2, eviction=ClassBalanced())
    >>> z, labels = torch.eye(2)[[0, 0, 0, 0]], torch.tensor([4, 7, 7, 4])
    >>> memory.add(torch.arange(4), z, labels=labels).evicted.tolist()
    [1]
    """

    name = "class-balanced"

    def bind(self, columns: Columns, seed: int) -> None:
        super().bind(columns, seed)
        self._read_columns()

    def _read_columns(self) -> None:
        """All that is kept follows from the columns; the oldest of each class is a heap's head."""
        k = self.columns.occupied
        self._members = members_of(_lists(self.columns.labels[:k], self.columns.born[:k]))

    def on_insert(self, rows: Rows) -> None:
        first = self.columns.occupied - len(rows)
        for slot, (label, when) in enumerate(_lists(rows.labels, rows.born), first):
            heappush(self._members.setdefault(label, []), (when, slot))

    def choose(self, rows: Rows) -> Tensor:
        plan = []
        for label, when in _lists(rows.labels, rows.born):
            fullest = min(self._members, key=lambda c: (-len(self._members[c]), c))
            _, slot = heappop(self._members[fullest])
            if not self._members[fullest]:
                del self._members[fullest]
            heappush(self._members.setdefault(label, []), (when, slot))
            plan.append(slot)
        return torch.tensor(plan, dtype=torch.int64)

    def choose_shared(self, rows: Rows, turns: Turns) -> Tensor:
        """The same of the classes that have an open slot, and of the open slots."""
        walk, plan = SlotWalk(turns), []
        columns = self.columns.labels, self.columns.born
        label_K, born_K = (to_host(of).numpy().copy() for of in columns)
        for label, when in _lists(rows.labels, rows.born):
            open_n = np.flatnonzero(walk.open())
            classes, sizes = np.unique(label_K, return_counts=True)
            sizes[~np.isin(classes, label_K[open_n])] = 0
            open_n = open_n[label_K[open_n] == classes[sizes.argmax()]]
            slot = int(open_n[born_K[open_n].argmin()])
            label_K[slot], born_K[slot] = label, when
            walk.take(slot)
            plan.append(slot)
        self._members = members_of(zip(label_K.tolist(), born_K.tolist(), strict=True))
        return torch.tensor(plan, dtype=torch.int64)

    def on_replace(self, slots: Tensor, rows: Rows, before_RA: Tensor) -> None:
        del slots, rows, before_RA
        self._read_columns()

    def load(self, state: dict[str, Tensor]) -> None:
        del state
        self._read_columns()

    def check(self) -> tuple[bool, str]:
        held = Counter(to_host(self.columns.labels[: self.columns.occupied]).tolist())
        counted = {label: len(members) for label, members in self._members.items()}
        if counted != dict(held):
            return False, f"class-balanced counts {counted} slots by label, there are {dict(held)}"
        return True, ""


def members_of(slots: Iterable[tuple[int, int]]) -> dict[int, list[Member]]:
    """The slots of each class, as heaps, from the label and the birth of each slot."""
    members: dict[int, list[Member]] = {}
    for slot, (label, when) in enumerate(slots):
        members.setdefault(label, []).append((when, slot))
    for one in members.values():
        heapify(one)
    return members


def _lists(labels: Tensor, born: Tensor) -> Iterator[tuple[int, int]]:
    return zip(to_host(labels).tolist(), to_host(born).tolist(), strict=True)
