"""A queue that newcomers pass through before another policy rules them.

Shapes: D embedding, K slots, k occupied slots, n slots of the front, R slots refreshed.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from memory.admission import REFUSED, carry_out
from memory.columns import Columns, Rows
from memory.eviction.base import Feedback, Policy


class Front(Policy):
    """The newest n samples stand in a queue; the inner policy rules the K - n others, the body.

    A newcomer joins the queue's end; the sample at its head moves on to the body, as a newcomer of
    the inner policy, whose rule sees the body alone. Nothing moves in the memory: the newcomer
    takes the slot of whom the inner policy evicts, and which slots are the body is this policy's
    book. Where the inner policy refuses the one that moves on, that one leaves.

    The inner policy needs its rows side by side, so the body's are held a second time, without
    images: (K - n) D values beside the slots.

    Args:
        policy: the inner one.
        front: n, at least 1 and below the memory's capacity.
    """

    name = "front"

    def __init__(self, policy: Policy, front: int) -> None:
        if front < 1:
            raise ValueError(f"front is {front}: must be at least 1 slot")
        self._inner, self._size = policy, front
        self.score = policy.score

    def bind(self, columns: Columns, seed: int) -> None:
        if columns.capacity <= self._size:
            raise ValueError(
                f"front is {self._size} of {columns.capacity} slots: must leave some to the inner "
                "policy; take a smaller front or a larger memory"
            )
        super().bind(columns, seed)
        self._seed = seed
        order = torch.argsort(columns.born[: columns.occupied]).cpu()
        older = max(0, len(order) - self._size)
        self._arrange(order[:older].sort().values, order[older:])
        self._inner.bind(self._body, seed)

    def _arrange(self, slots: Tensor, front: Tensor) -> None:
        """Let the body be these slots of the memory, in this order, and the queue those."""
        columns = self.columns
        self._body = Columns(
            columns.capacity - self._size,
            columns.dim,
            None,
            columns.device,
            columns.embeddings.dtype,
        )
        self._slots: list[int] = slots.tolist()
        self._front: deque[int] = deque(front.tolist())
        self._body.occupied = len(self._slots)
        here = torch.arange(len(self._slots), device=columns.device)
        self._body.write(here, self._rows(self._slots))
        self._body.encoded[here] = columns.encoded[slots.to(columns.device)]

    def _rows(self, slots: list[int]) -> Rows:
        columns = self.columns
        at = torch.tensor(slots, dtype=torch.int64, device=columns.device)
        return Rows(
            columns.ids[at],
            columns.embeddings[at],
            columns.labels[at],
            columns.hashes[at],
            columns.born[at],
        )

    def joined(self, rows: Rows) -> None:
        occupied = self.columns.occupied
        self._front.extend(range(occupied - len(rows), occupied))
        moving = [self._front.popleft() for _ in range(len(self._front) - self._size)]
        if moving:
            start = len(self._slots)
            self._slots += moving
            graduates = self._rows(moving)
            here = torch.arange(start, len(self._slots), device=self.columns.device)
            self._body.write(here, graduates)
            self._body.occupied = len(self._slots)
            self._inner.joined(graduates)

    def choose(self, rows: Rows) -> Tensor:
        # Those that move on while this batch joins: the queue, and behind it the batch itself.
        graduates = _behind(self._rows(list(self._front)), rows)[: len(rows)]
        within = self._inner.choose(graduates)
        carry_out(within, graduates[: len(within)], self._body)
        plan = []
        for place in within.tolist():
            slot = moving = self._front.popleft()
            if place != REFUSED:
                slot = self._slots[place]
                self._slots[place] = moving
            self._front.append(slot)
            plan.append(slot)
        return torch.tensor(plan, dtype=torch.int64)

    def refreshed(self, slots: Tensor, before_RD: Tensor) -> None:
        place_K = torch.full((self.columns.capacity,), -1, device=slots.device)
        place_K[self._slots] = torch.arange(len(self._slots), device=slots.device)
        place_R = place_K[slots]
        inside = place_R >= 0
        place, slot = place_R[inside], slots[inside]
        if len(place):
            self._body.embeddings[place] = self.columns.embeddings[slot]
            self._body.encoded[place] = self.columns.encoded[slot]
            self._inner.refreshed(place, before_RD[inside])

    def replaced(self, slots: Tensor, rows: Rows, before_RD: Tensor) -> None:
        """Raises ValueError: see there."""
        del slots, rows, before_RD
        raise ValueError(
            "a front must be outermost, as every newcomer passes through it: put the other policy "
            "inside, Hybrid(Hybrid(policy, age_cap=...), front=...)"
        )

    def update(self, feedback: Feedback) -> None:
        self._inner.update(feedback)
        self.score = self._inner.score

    def counts(self) -> Tensor:
        front = torch.tensor(list(self._front), dtype=torch.int64, device=self.columns.device)
        front_nD, body_kD = self.columns.embeddings[front], self._body.z_kD
        count_k = torch.empty(
            self.columns.occupied, dtype=torch.float64, device=self.columns.device
        )
        count_k[self._slots] = self._inner.counts() + self.score.total(body_kD, front_nD)
        count_k[front] = self.score.counts(front_nD) + self._inner.total(front_nD)
        return count_k

    def total(self, z_BD: Tensor) -> Tensor:
        front_nD = self.columns.embeddings[list(self._front)]
        return self._inner.total(z_BD) + self.score.total(z_BD, front_nD)

    def state(self) -> dict[str, Tensor]:
        inner = {f"inner.{name}": value for name, value in self._inner.state().items()}
        front = torch.tensor(list(self._front), dtype=torch.int64)
        return {"slots": torch.tensor(self._slots, dtype=torch.int64), "front": front, **inner}

    def load(self, state: dict[str, Tensor]) -> None:
        self._arrange(state["slots"].cpu()[:0], state["front"].cpu()[:0])
        self._inner.bind(self._body, self._seed)
        body = self._body
        self._arrange(state["slots"].cpu(), state["front"].cpu())
        body.load(self._body.state())
        self._body = body  # the columns that the inner policy is bound to
        self._inner.load({n[6:]: value for n, value in state.items() if n.startswith("inner.")})
        self.score = self._inner.score

    def check(self) -> tuple[bool, str]:
        columns, occupied = self.columns, self.columns.occupied
        if sorted([*self._slots, *self._front]) != list(range(occupied)):
            return False, "front: its queue and its body are not all slots, each once"
        born = columns.born[:occupied]
        newest = torch.argsort(born)[max(0, occupied - self._size) :].tolist()
        if newest != list(self._front):
            return False, f"front: its queue is slots {list(self._front)}, the newest are {newest}"
        rows = self._rows(self._slots)
        for name in ("ids", "embeddings", "labels", "hashes", "born"):
            held = getattr(self._body, name)[: self._body.occupied]
            if not torch.equal(held, getattr(rows, name)):
                return False, f"front: {name} of the body are not those of its slots"
        return self._inner.check()


def _behind(first: Rows, then: Rows) -> Rows:
    return Rows(
        torch.cat([first.ids, then.ids]),
        torch.cat([first.embeddings, then.embeddings]),
        torch.cat([first.labels, then.labels]),
        torch.cat([first.hashes, then.hashes]),
        torch.cat([first.born, then.born]),
    )
