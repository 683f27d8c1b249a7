"""Another policy, with an age cap, behind a queue, or both."""

from __future__ import annotations

from typing import Any

from memory.arguments import check_count
from memory.columns import Columns
from memory.eviction.age_cap import AgeCap
from memory.eviction.around import Around
from memory.eviction.base import Policy, check_free, described
from memory.eviction.front import Front
from memory.eviction.most_duplicated import MostDuplicated


class Hybrid(Around):
    """Any policy, held back by age where it would keep what is stale or take what is new.

    With both options a newcomer passes the front first, and what lies behind it has the cap: ages
    are then counted from the one that leaves the front. With neither, the policy alone decides.

    Args:
        policy: who decides else; MostDuplicated() where not given.
        age_cap: in samples offered. A slot born more than this before the newcomer leaves first,
            the oldest of all at a time (see AgeCap). None for no cap.
        front: slots of a queue that every newcomer passes through before the policy may evict it
            (see Front). 0 for none.

    >>> import torch
    >>> from memory import WorkingMemory
    >>> from memory.eviction import policy
    >>> memory = WorkingMemory(3, 2, Hybrid(policy("most-duplicated"), age_cap=3))
    >>> z = torch.eye(2)[[0, 1, 1, 1, 1]]
    >>> memory.add(torch.arange(5), z).evicted.tolist()
    [1, 0]
    """

    name = "hybrid"

    _front: int

    def __init__(
        self, policy: Policy | None = None, age_cap: int | None = None, front: int = 0
    ) -> None:
        inner = MostDuplicated() if policy is None else policy
        check_free("policy", inner)
        front = check_count("front", front, 0, "slots")
        if age_cap is not None:
            age_cap = check_count("age_cap", age_cap, 1, "sample")
        self._policy, self._age_cap, self._front = inner, age_cap, front
        if age_cap is not None:
            if isinstance(inner, Hybrid) and inner._front:
                raise ValueError(
                    f"age_cap around a front of {inner._front} slots: a front must be outermost; "
                    "give both to one Hybrid"
                )
            inner = AgeCap(inner, age_cap)
        if front:
            inner = Front(inner, front)
        self._inner = inner
        self.score = inner.score

    def settings(self) -> dict[str, Any]:
        inner = {f"inner {name}": value for name, value in described(self._policy).items()}
        return {"age_cap": self._age_cap, "front": self._front, **inner}

    def bind(self, columns: Columns, seed: int) -> None:
        super().bind(columns, seed)
        self._inner.bind(columns, seed)
