"""Another policy, with an age cap: what it would keep for ever leaves after so many samples.

Shapes: B newcomers, K slots of all ranks, k occupied slots, R slots.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from memory.admission import check_plan
from memory.checks import check_count
from memory.columns import Columns, Rows
from memory.compute import to_host
from memory.eviction.ages import Ages
from memory.eviction.base import Feedback, Policy, check_free, described
from memory.eviction.most_duplicated import MostDuplicated
from memory.shares import SlotWalk, Turns


class Hybrid(Policy):
    """Any policy, but where the oldest slot was born more than `age_cap` samples before the
    newcomer, that one leaves. One newcomer at a time, so after a jump the old leave one by one.

    Args:
        policy: who decides else; MostDuplicated() where not given. It learns of the others by
            `on_replace`.
        age_cap: in samples offered, at least 1. None for no cap: the policy alone decides.

    >>> import torch
    >>> from memory import WorkingMemory
    >>> from memory.eviction import policy
    >>> memory = WorkingMemory(3, 2, Hybrid(policy("most-duplicated"), age_cap=3))
    >>> z = torch.eye(2)[[0, 1, 1, 1, 1]]
    >>> len(memory.add(torch.arange(5), z).evicted), int(memory.born.min())
    (2, 2)
    """

    name = "hybrid"

    def __init__(self, policy: Policy | None = None, age_cap: int | None = None) -> None:
        inner = MostDuplicated() if policy is None else policy
        check_free("policy", inner)
        self._inner, self.score = inner, inner.score
        self._cap = None if age_cap is None else check_count("age_cap", age_cap, 1, "sample")
        # A rank tells its policy of its own rows; one with an order of all slots needs them all.
        follows = type(inner).on_replace is Policy.on_replace
        self.across_ranks = inner.across_ranks and follows
        self._unheard: tuple[Tensor, Rows, Tensor] | None = None
        self._ages: Ages | None = None

    def settings(self) -> dict[str, Any]:
        inner = {f"inner {name}": value for name, value in described(self._inner).items()}
        return {"age_cap": self._cap, **inner}

    @property
    def inner(self) -> Policy:
        """The inner policy, told of the rows that the memory has written by this one's plans."""
        if self._unheard is not None:
            replaced, self._unheard = self._unheard, None
            self._inner.on_replace(*replaced)
        return self._inner

    def bind(self, columns: Columns, seed: int) -> None:
        self._unheard, self._ages = None, None
        super().bind(columns, seed)
        self._inner.bind(columns, seed)

    def on_insert(self, rows: Rows) -> None:
        self.inner.on_insert(rows)

    def choose(self, rows: Rows) -> Tensor:
        return self._choose(rows, None)

    def choose_shared(self, rows: Rows, turns: Turns) -> Tensor:
        """The same: the oldest of the open slots leaves where it is too old."""
        return self._choose(rows, turns)

    @property
    def keeps_shares(self) -> bool:
        return self._inner.keeps_shares

    def _inner_choice(self, rows: Rows, turns: Turns | None) -> Tensor:
        if turns is None:
            return self._inner.choose(rows)
        return self._inner.choose_shared(rows, turns[: len(rows)])

    def _choose(self, rows: Rows, turns: Turns | None) -> Tensor:
        inner = self.inner
        if self._cap is None:
            return self._inner_choice(rows, turns)
        columns, born_B = self.columns, to_host(rows.born).numpy()
        ages = self._ages = self._ages or Ages(columns)
        slots: list[int] = []
        walk = None if turns is None else SlotWalk(turns)
        for born in born_B.tolist():
            oldest = ages.oldest(None if walk is None else walk.open())
            if not ages.born_K[oldest] < min(born - self._cap, born_B[0]):
                break  # it is not too old, or took the slot in this very run
            ages.born_K[oldest] = born
            slots.append(oldest)
            if walk is not None:
                walk.take(oldest)
        if slots:
            plan = torch.tensor(slots)
            mine = columns.group.mine(plan).nonzero()[:, 0]
            here = columns.group.own(plan[mine]).to(columns.device)
            self._unheard = here, rows[mine.to(columns.device)], columns.descriptors[here]
            return plan
        # While no slot at all is too old, no open one is.
        too_old = ages.born_K[ages.oldest()] + self._cap
        within = max(1, int(np.searchsorted(born_B, too_old, side="right")))
        plan = self._inner_choice(rows[:within], turns)
        check_plan(plan, inner, within, columns.capacity_of_all)
        ages.take(plan.numpy(), born_B[: len(plan)])
        return plan

    def on_replace(self, slots: Tensor, rows: Rows, before_RA: Tensor) -> None:
        if self._ages is not None:
            self._ages.take(to_host(slots).numpy(), to_host(rows.born).numpy())
        self.inner.on_replace(slots, rows, before_RA)

    def on_update(self, slots: Tensor, before_RA: Tensor) -> None:
        self.inner.on_update(slots, before_RA)

    def update(self, feedback: Feedback) -> None:
        self.inner.update(feedback)
        self.score = self._inner.score

    def counts(self) -> Tensor:
        return self.inner.counts()

    @property
    def keeps_counts(self) -> bool:
        return self._inner.keeps_counts

    def total(self, descriptor_BA: Tensor) -> Tensor:
        return self.inner.total(descriptor_BA)

    def state(self) -> dict[str, Tensor]:
        return self.inner.state()

    def load(self, state: dict[str, Tensor]) -> None:
        self._ages = None
        self.inner.load(state)
        self.score = self._inner.score

    def check(self) -> tuple[bool, str]:
        columns, group = self.columns, self.columns.group
        born_k = to_host(columns.born[: columns.occupied]).numpy()
        if self._ages is not None and not np.array_equal(
            born_k, self._ages.born_K[group.rank :: group.size]
        ):
            return False, "age cap: slots were born otherwise than it knows"
        return self.inner.check()
