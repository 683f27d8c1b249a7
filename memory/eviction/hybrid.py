"""Another policy, with an age cap, behind a FIFO stage, or both.

Shapes: A descriptor, B newcomers, K slots, k occupied slots, n slots of the FIFO stage, R slots.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memory.admission import check_plan
from memory.checks import check_count
from memory.columns import REFUSED, Columns, Rows
from memory.compute import to_host
from memory.eviction.base import Policy, PolicyWrapper, check_free, described
from memory.eviction.most_duplicated import MostDuplicated

Slots = NDArray[np.int64]


class Hybrid(PolicyWrapper):
    """Any policy, held back by age where it would keep what is stale or take what is new.

    With both options a newcomer passes the FIFO stage first, and the policy behind it has the cap:
    ages are then counted from the one that leaves the stage. With neither, the policy alone
    decides.

    Args:
        policy: who decides else; MostDuplicated() where not given.
        age_cap: in samples offered. A slot born more than this before the newcomer leaves first,
            the oldest of all at a time (see AgeCap). None for no cap.
        front: slots of a FIFO stage that every newcomer passes before the policy may evict it (see
            FifoStage). 0 for none.

    >>> import torch
    >>> from memory import WorkingMemory
    >>> from memory.eviction import policy
    >>> memory = WorkingMemory(3, 2, Hybrid(policy("most-duplicated"), age_cap=3))
    >>> z = torch.eye(2)[[0, 1, 1, 1, 1]]
    >>> len(memory.add(torch.arange(5), z).evicted), int(memory.born.min())
    (2, 2)
    """

    name = "hybrid"

    def __init__(
        self, policy: Policy | None = None, age_cap: int | None = None, front: int = 0
    ) -> None:
        inner = MostDuplicated() if policy is None else policy
        check_free("policy", inner)
        self._policy, self._age_cap = inner, age_cap
        self._front = check_count("front", front, 0, "slots")
        if age_cap is not None:
            if isinstance(inner, Hybrid) and inner._front:
                raise ValueError(
                    f"age_cap around a FIFO stage of {inner._front} slots: the stage must be "
                    "outermost; give both to one Hybrid"
                )
            self._age_cap = check_count("age_cap", age_cap, 1, "sample")
            inner = AgeCap(inner, self._age_cap)
        super().__init__(FifoStage(inner, self._front) if self._front else inner)

    def settings(self) -> dict[str, Any]:
        inner = {f"inner {name}": value for name, value in described(self._policy).items()}
        return {"age_cap": self._age_cap, "front": self._front, **inner}


class AgeCap(PolicyWrapper):
    """Where the oldest slot was born more than `cap` samples before the newcomer, it leaves; else
    the inner policy decides. One newcomer at a time, so after a jump the old leave one by one.

    Args:
        policy: the inner one, over the same columns. It learns of the others by `on_replace`.
        cap: in samples offered, at least 1.
    """

    name = "age cap"

    def __init__(self, policy: Policy, cap: int) -> None:
        super().__init__(policy)
        self._cap = cap
        self._unheard: tuple[Tensor, Rows, Tensor] | None = None

    @property
    def inner(self) -> Policy:
        """The inner policy, told of the rows that the memory has written by this one's plans."""
        if self._unheard is not None:
            replaced, self._unheard = self._unheard, None
            self._inner.on_replace(*replaced)
        return self._inner

    def bind(self, columns: Columns, seed: int) -> None:
        self._unheard, self._ages = None, Ages(columns)
        super().bind(columns, seed)

    def on_insert(self, rows: Rows) -> None:
        last = self.columns.occupied
        self._ages.take(np.arange(last - len(rows), last), to_host(rows.born).numpy())
        super().on_insert(rows)

    def choose(self, rows: Rows) -> Tensor:
        inner, ages, born_B = self.inner, self._ages, to_host(rows.born).numpy()
        slots: list[int] = []
        for born in born_B.tolist():
            oldest = ages.oldest()
            if not ages.born_K[oldest] < min(born - self._cap, born_B[0]):
                break  # it is not too old, or took the slot in this very run
            ages.born_K[oldest] = born
            slots.append(oldest)
        if slots:
            plan = torch.tensor(slots)
            here = plan.to(self.columns.device)
            self._unheard = here, rows[: len(plan)], self.columns.descriptors[here]
            return plan
        within = int(np.searchsorted(born_B, ages.born_K[oldest] + self._cap, side="right"))
        plan = inner.choose(rows[:within])
        check_plan(plan, inner, within, self.columns.capacity)
        ages.take(plan.numpy(), born_B[: len(plan)])
        return plan

    def on_replace(self, slots: Tensor, rows: Rows, before_RA: Tensor) -> None:
        self._ages.take(to_host(slots).numpy(), to_host(rows.born).numpy())
        super().on_replace(slots, rows, before_RA)

    def load(self, state: dict[str, Tensor]) -> None:
        self._ages = Ages(self.columns)
        super().load(state)

    def check(self) -> tuple[bool, str]:
        k = self.columns.occupied
        if not np.array_equal(to_host(self.columns.born[:k]).numpy(), self._ages.born_K[:k]):
            return False, "age cap: slots were born otherwise than it knows"
        return super().check()


class Ages:
    """When each slot was born, and which is the oldest.

    Slots sorted by birth stay so while newcomers, always younger than all, take slots out of the
    order: so one sort serves until all that it sorted have left.
    """

    def __init__(self, columns: Columns) -> None:
        self.born_K: Slots = np.zeros(columns.capacity, np.int64)
        self.born_K[: columns.occupied] = to_host(columns.born[: columns.occupied]).numpy()
        self._order: list[tuple[int, int]] = []  # slot and birth, the oldest last

    def take(self, slots: Slots, born_B: Slots) -> None:
        """Newcomers born then took these slots in turn; -1 for those that took none."""
        joins = slots != REFUSED
        self.born_K[slots[joins]] = born_B[joins]

    def oldest(self) -> int:
        """The slot born first, of a memory that is full."""
        while True:
            while self._order:
                slot, born = self._order[-1]
                if self.born_K[slot] == born:
                    return slot
                self._order.pop()
            slots = np.argsort(-self.born_K)
            self._order = list(zip(slots.tolist(), self.born_K[slots].tolist(), strict=True))


class FifoStage(PolicyWrapper):
    """The newest n samples wait in a queue; the inner policy rules the others, the main part.

    A newcomer joins the queue's end; the sample at its head is promoted to the main part, as a
    newcomer of the inner policy, whose rule sees that part alone. Nothing moves in the memory: the
    newcomer takes the slot of whom the inner policy evicts, and which slots are the main part is
    this policy's book. Where the inner policy refuses the one promoted, that one leaves.

    The inner policy needs its rows side by side, so their descriptors are held a second time:
    (K - n) A values beside the slots. They are what it finds as embeddings too.

    Args:
        policy: the inner one.
        size: n, at least 1 and below the memory's capacity.
    """

    name = "FIFO stage"

    def __init__(self, policy: Policy, size: int) -> None:
        super().__init__(policy)
        self._size = size

    def bind(self, columns: Columns, seed: int) -> None:
        if columns.capacity <= self._size:
            raise ValueError(
                f"front is {self._size} of {columns.capacity} slots: must leave some to the inner "
                "policy; take a smaller stage or a larger memory"
            )
        self.columns = columns
        self._main = Columns(
            columns.capacity - self._size,
            columns.descriptors.shape[1],
            device=columns.device,
            dtype=columns.descriptors.dtype,
        )
        by_age = to_host(torch.argsort(columns.born[: columns.occupied]))
        older = max(0, len(by_age) - self._size)
        self._arrange(by_age[:older].sort().values, by_age[older:])
        self._inner.bind(self._main, seed)

    def _arrange(self, slots: Tensor, queue: Tensor) -> None:
        """Let the main part be these slots of the memory, in this order, and the queue those."""
        self._slots: list[int] = slots.tolist()
        self._queue: deque[int] = deque(queue.tolist())
        self._main.occupied = len(self._slots)
        self._write(torch.arange(len(self._slots)), self._rows(self._slots))

    def _rows(self, slots: list[int]) -> Rows:
        at = torch.tensor(slots, dtype=torch.int64, device=self.columns.device)
        return alone(self.columns.rows(at))

    def _write(self, places: Tensor, rows: Rows) -> None:
        self._main.write(places.to(self._main.device), rows)

    def on_insert(self, rows: Rows) -> None:
        occupied = self.columns.occupied
        self._queue.extend(range(occupied - len(rows), occupied))
        slots = [self._queue.popleft() for _ in range(len(self._queue) - self._size)]
        if slots:
            promoted, first = self._rows(slots), len(self._slots)
            self._slots += slots
            self._main.occupied = len(self._slots)
            self._write(torch.arange(first, len(self._slots)), promoted)
            self._inner.on_insert(promoted)

    def choose(self, rows: Rows) -> Tensor:
        # Promoted while this batch joins: the queue, and behind it the batch itself.
        waiting = self._rows(list(islice(self._queue, len(rows))))
        promoted = concatenated(waiting, alone(rows[: len(rows) - len(waiting)]))
        within = self._inner.choose(promoted)
        check_plan(within, self._inner, len(promoted), self._main.capacity)
        plan, last = [], {}
        for turn, place in enumerate(within.tolist()):
            slot = moving = self._queue.popleft()
            if place != REFUSED:
                slot, self._slots[place], last[place] = self._slots[place], moving, turn
            self._queue.append(slot)
            plan.append(slot)
        places, turns = (torch.tensor(list(n), dtype=torch.int64) for n in (last, last.values()))
        self._write(places, promoted[turns])
        return torch.tensor(plan)

    def on_update(self, slots: Tensor, before_RA: Tensor) -> None:
        place_K = torch.full((self.columns.capacity,), -1)
        place_K[self._slots] = torch.arange(len(self._slots))
        place_R = place_K[to_host(slots)]
        inside = (place_R >= 0).nonzero()[:, 0]
        if len(inside):
            place, inside = (n.to(slots.device) for n in (place_R[inside], inside))
            self._main.descriptors[place] = self.columns.descriptors[slots[inside]]
            self._inner.on_update(place, before_RA[inside])

    def on_replace(self, slots: Tensor, rows: Rows, before_RA: Tensor) -> None:
        """Raises ValueError: see there."""
        del slots, rows, before_RA
        raise ValueError(
            "a FIFO stage must be outermost, as every newcomer passes through it: put the other "
            "policy inside, Hybrid(Hybrid(policy, age_cap=...), front=...)"
        )

    def counts(self) -> Tensor:
        columns, main = self.columns, self._main
        slots, queue = (
            torch.tensor(list(n), dtype=torch.int64, device=columns.device)
            for n in (self._slots, self._queue)
        )
        queue_nA = columns.descriptors[queue]
        count_k = torch.empty(columns.occupied, dtype=torch.float64, device=columns.device)
        count_k[slots] = self._inner.counts() + self.score.total(main.descriptor_kA, queue_nA)
        count_k[queue] = self._inner.total(queue_nA) + self.score.counts(queue_nA)
        return count_k

    def total(self, descriptor_BA: Tensor) -> Tensor:
        queue_nA = self.columns.descriptors[list(self._queue)]
        return self._inner.total(descriptor_BA) + self.score.total(descriptor_BA, queue_nA)

    def state(self) -> dict[str, Tensor]:
        inner = {f"inner.{name}": value for name, value in self._inner.state().items()}
        queue = torch.tensor(list(self._queue), dtype=torch.int64)
        return {"slots": torch.tensor(self._slots, dtype=torch.int64), "front": queue, **inner}

    def load(self, state: dict[str, Tensor]) -> None:
        self._arrange(state["slots"], state["front"])
        prefix = "inner."
        super().load({n[len(prefix) :]: v for n, v in state.items() if n.startswith(prefix)})

    def check(self) -> tuple[bool, str]:
        columns, main = self.columns, self._main
        newest = to_host(torch.argsort(columns.born[: columns.occupied]))[-self._size :].tolist()
        if list(self._queue) != newest:
            return False, f"FIFO stage: its queue is slots {list(self._queue)}, not {newest}"
        rows, held = self._rows(self._slots), main.rows(torch.arange(main.occupied))
        for name in ("ids", "descriptors", "labels", "hashes", "born"):
            if not torch.equal(getattr(held, name), getattr(rows, name)):
                return False, f"FIFO stage: {name} of its main part are not those of its slots"
        return self._inner.check()


def alone(rows: Rows) -> Rows:
    """These rows with what an inner policy may read: descriptors in place of embeddings."""
    return replace(rows, embeddings=rows.descriptors, images=None, multiplicity=None)


def concatenated(first: Rows, then: Rows) -> Rows:
    """Both, neither with images nor multiplicities."""
    names = ("ids", "embeddings", "descriptors", "labels", "hashes", "born")
    return Rows(*(torch.cat([getattr(first, name), getattr(then, name)]) for name in names))
