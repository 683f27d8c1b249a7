"""A uniform sample of all samples that were ever offered."""

from __future__ import annotations

import torch
from torch import Tensor

from stream_ssl.memory.columns import REFUSED, Columns, Rows
from stream_ssl.memory.eviction.random import Random, tries, walked
from stream_ssl.memory.shares import Turns


class Reservoir(Random):
    """After n samples, each of them is held with probability K / n (Vitter 1985, algorithm R).

    Sample n joins with probability K / n and then replaces a slot drawn uniformly.
    """

    name = "reservoir"

    def bind(self, columns: Columns, seed: int) -> None:
        super().bind(columns, seed)
        self._seen = columns.occupied

    def bind_after_removal(self, columns: Columns, seed: int, share: float) -> None:
        """Continue as if the removed samples' share of the stream had never been offered."""
        seen = self._seen
        super().bind_after_removal(columns, seed, share)
        self._seen = max(columns.occupied, round(seen * share))

    def on_insert(self, rows: Rows) -> None:
        self._seen += len(rows)

    def choose(self, rows: Rows) -> Tensor:
        plan = self.uniform(self._seen + 1 + torch.arange(len(rows)))
        self._seen += len(rows)
        return torch.where(plan < self.columns.capacity, plan, REFUSED)

    def choose_shared(self, rows: Rows, turns: Turns) -> Tensor:
        slots = self.columns.capacity
        number_B, seen_B = self.drawn(len(rows)), self._seen + 1 + torch.arange(len(rows))
        self._seen += len(rows)
        slot_B = (number_B * seen_B).floor()
        # A newcomer that is not drawn may still have to join. It tries slots by the same number.
        tries_BR = tries(torch.where(slot_B < slots, number_B * seen_B / slots, number_B), slots)
        for tried_R, slot in zip(tries_BR, slot_B.long().tolist(), strict=True):
            tried_R[0] = slot if slot < slots else REFUSED
        return walked(turns, tries_BR)

    def state(self) -> dict[str, Tensor]:
        return {"seen": torch.tensor([self._seen]), **super().state()}

    def load(self, state: dict[str, Tensor]) -> None:
        super().load(state)
        self._seen = int(state["seen"])

    def check(self) -> tuple[bool, str]:
        if self._seen < self.columns.occupied:
            return False, f"reservoir has seen {self._seen} samples, fewer than it holds"
        return True, ""
