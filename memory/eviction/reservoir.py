"""Keep a uniform sample of everything seen."""

from __future__ import annotations

import torch
from torch import Tensor

from memory.columns import Columns, Rows
from memory.compute import to_host
from memory.eviction.base import Policy


class Reservoir(Policy):
    """After n samples each of them is held with probability K / n (Vitter 1985, algorithm R).

    Sample n joins with probability K / n and then replaces a uniformly drawn slot.
    """

    name = "reservoir"

    def bind(self, columns: Columns, seed: int) -> None:
        super().bind(columns, seed)
        self._seen = columns.occupied
        self._generator = torch.Generator().manual_seed(seed)

    def on_insert(self, rows: Rows) -> None:
        self._seen += len(rows)

    def choose(self, rows: Rows) -> Tensor:
        seen_B = self._seen + 1 + torch.arange(len(rows))
        drawn_B = torch.rand(len(rows), generator=self._generator, dtype=torch.float64)
        plan = (drawn_B * seen_B).floor().to(torch.int64)
        self._seen += len(rows)
        return torch.where(plan < self.columns.capacity, plan, -1)

    def on_replace(self, slots: Tensor, rows: Rows, before_RA: Tensor) -> None:
        del slots, before_RA
        self._seen += len(rows)

    def state(self) -> dict[str, Tensor]:
        return {"seen": torch.tensor([self._seen]), "generator": self._generator.get_state()}

    def load(self, state: dict[str, Tensor]) -> None:
        self._seen = int(state["seen"])
        self._generator.set_state(to_host(state["generator"]))

    def check(self) -> tuple[bool, str]:
        if self._seen < self.columns.occupied:
            return False, f"reservoir has seen {self._seen}, fewer than the slots it filled"
        return True, ""
