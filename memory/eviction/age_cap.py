"""Too old leaves first; else another policy decides.

Shapes: D embedding, K slots, R slots taken over.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memory.arguments import check_count
from memory.columns import Columns, Rows
from memory.eviction.base import Feedback, Policy

Slots = NDArray[np.int64]


class AgeCap(Policy):
    """Where the oldest slot was born more than `cap` samples before the newcomer, it leaves; else
    the inner policy decides. One newcomer at a time, so after a jump the old leave one by one.

    Args:
        policy: the inner one, over the same columns. It learns of the others by `replaced`.
        cap: in samples offered, at least 1.
    """

    name = "age cap"

    def __init__(self, policy: Policy, cap: int) -> None:
        self._inner, self._cap = policy, check_count("age_cap", cap, 1, "sample")
        self.score = policy.score

    def bind(self, columns: Columns, seed: int) -> None:
        super().bind(columns, seed)
        self._ages = Ages(columns)
        self._owed: tuple[Tensor, Rows, Tensor] | None = None  # what the inner has yet to hear
        self._inner.bind(columns, seed)

    def joined(self, rows: Rows) -> None:
        self._ages = Ages(self.columns)
        self._inner.joined(rows)

    def choose(self, rows: Rows) -> Tensor:
        self._tell()
        born_B = rows.born.cpu().numpy()
        slot_R, born_R = self._ages.oldest(len(rows))
        fresh = int(np.searchsorted(born_B, born_R[0] + self._cap, side="right"))
        if fresh:
            plan = self._inner.choose(rows[:fresh])
            self._ages.take(plan.numpy(), born_B[: len(plan)])
            return plan
        within_R = born_B[: len(slot_R)] - born_R <= self._cap
        count = int(within_R.argmax()) if within_R.any() else len(slot_R)
        plan = torch.from_numpy(slot_R[:count])
        before_RD = self.columns.embeddings[plan.to(self.columns.device)]
        self._owed = plan, rows[:count], before_RD
        self._ages.take(plan.numpy(), born_B[:count])
        return plan

    def _tell(self) -> None:
        """Let the inner policy know of the rows that the memory has written since."""
        if self._owed is not None:
            slots, rows, before_RD = self._owed
            self._owed = None
            self._inner.replaced(slots.to(self.columns.device), rows, before_RD)

    def refreshed(self, slots: Tensor, before_RD: Tensor) -> None:
        self._inner.refreshed(slots, before_RD)

    def replaced(self, slots: Tensor, rows: Rows, before_RD: Tensor) -> None:
        self._tell()
        self._ages.take(slots.cpu().numpy(), rows.born.cpu().numpy())
        self._inner.replaced(slots, rows, before_RD)

    def update(self, feedback: Feedback) -> None:
        self._tell()
        self._inner.update(feedback)
        self.score = self._inner.score

    def counts(self) -> Tensor:
        self._tell()
        return self._inner.counts()

    def total(self, z_BD: Tensor) -> Tensor:
        self._tell()
        return self._inner.total(z_BD)

    def state(self) -> dict[str, Tensor]:
        self._tell()
        return self._inner.state()

    def load(self, state: dict[str, Tensor]) -> None:
        self._ages = Ages(self.columns)
        self._inner.load(state)
        self.score = self._inner.score

    def check(self) -> tuple[bool, str]:
        self._tell()
        born_k = self.columns.born[: self.columns.occupied].cpu().numpy()
        if not np.array_equal(born_k, self._ages.born_k):
            return False, "age cap: slots were born otherwise than it knows"
        return self._inner.check()


class Ages:
    """When each slot was born, and which are the oldest.

    Slots sorted by birth stay so while newcomers, always younger than all, take slots out of the
    order: so one sort serves until all that it sorted have left.
    """

    def __init__(self, columns: Columns) -> None:
        self.born_k: Slots = columns.born[: columns.occupied].cpu().numpy().copy()
        self._sort()

    def _sort(self) -> None:
        self._slot_k = np.argsort(self.born_k)
        self._when_k = self.born_k[self._slot_k]
        self._head = 0

    def take(self, plan: Slots, born_B: Slots) -> None:
        """Newcomers born then took these slots in turn; -1 for those that took none."""
        joins = plan >= 0
        self.born_k[plan[joins]] = born_B[joins]

    def oldest(self, count: int) -> tuple[Slots, Slots]:
        """The `count` oldest slots in order, all where there are fewer; and when they were born."""
        width = count
        while True:
            part = slice(self._head, self._head + width)
            slot_n, when_n = self._slot_k[part], self._when_k[part]
            there_n = self.born_k[slot_n] == when_n
            slot_n, when_n = slot_n[there_n], when_n[there_n]
            if len(slot_n) >= count or (self._head == 0 and len(slot_n) == len(self.born_k)):
                self._head += int(there_n.argmax())
                return slot_n[:count], when_n[:count]
            if self._head + width >= len(self._slot_k):
                self._sort()  # those that joined since are needed too
            width *= 2
