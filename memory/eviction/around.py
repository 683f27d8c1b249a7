"""A policy that has another one rule."""

from __future__ import annotations

from torch import Tensor

from memory.columns import Rows
from memory.eviction.base import Feedback, Policy


class Around(Policy):
    """Hands everything on to the inner policy. Subclasses set `_inner`, and say what differs."""

    _inner: Policy

    def joined(self, rows: Rows) -> None:
        self._inner.joined(rows)

    def choose(self, rows: Rows) -> Tensor:
        return self._inner.choose(rows)

    def refreshed(self, slots: Tensor, before_RD: Tensor) -> None:
        self._inner.refreshed(slots, before_RD)

    def replaced(self, slots: Tensor, rows: Rows, before_RD: Tensor) -> None:
        self._inner.replaced(slots, rows, before_RD)

    def update(self, feedback: Feedback) -> None:
        self._inner.update(feedback)
        self.score = self._inner.score

    def counts(self) -> Tensor:
        return self._inner.counts()

    def total(self, z_BD: Tensor) -> Tensor:
        return self._inner.total(z_BD)

    def state(self) -> dict[str, Tensor]:
        return self._inner.state()

    def load(self, state: dict[str, Tensor]) -> None:
        self._inner.load(state)
        self.score = self._inner.score

    def check(self) -> tuple[bool, str]:
        return self._inner.check()
