"""Most duplicated under linear h, where the sum of all rows stands for all counts.

N(j) = (K + z_j . s - z_j . z_j) / 2 - 1/2 with s the sum of the rows.

Shapes: B newcomers, D embedding, K slots, R slots refreshed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from memory.columns import Columns
from memory.scores import sum_rows


class LinearTally:
    """Duplicate counts by (1 + x) / 2, and who has the largest."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self._sum_D = sum_rows(columns.z_kD)

    def joined(self, z_BD: Tensor) -> None:
        self._sum_D += sum_rows(z_BD)

    def choose(self, z_BD: Tensor) -> Tensor:
        z_KD = self._columns.embeddings.clone()
        own_K = (z_KD * z_KD).sum(dim=1)
        plan = []
        for x_D in z_BD:
            slot = int((z_KD @ self._sum_D.to(z_KD.dtype) - own_K).argmax())
            self._sum_D += x_D.to(torch.float64) - z_KD[slot].to(torch.float64)
            z_KD[slot], own_K[slot] = x_D, x_D @ x_D
            plan.append(slot)
        return torch.tensor(plan, dtype=torch.int64)

    def refreshed(self, slots: Tensor, before_RD: Tensor) -> None:
        self._sum_D += sum_rows(self._columns.embeddings[slots]) - sum_rows(before_RD)

    def counts(self) -> Tensor:
        z_kD = self._columns.z_kD
        own_k = (z_kD * z_kD).sum(dim=1, dtype=torch.float64)
        return 0.5 * (len(z_kD) - 1 + z_kD.to(torch.float64) @ self._sum_D - own_k)

    def state(self) -> dict[str, Tensor]:
        return {"sum": self._sum_D.clone()}

    def load(self, state: dict[str, Tensor]) -> None:
        self._sum_D = state["sum"].to(self._columns.device, torch.float64).clone()

    def check(self) -> tuple[bool, str]:
        off = float((self._sum_D - sum_rows(self._columns.z_kD)).abs().max())
        if off > 1e-6 * max(1, self._columns.occupied):
            return False, f"the sum of the rows is off by {off:.3g}"
        return True, ""
