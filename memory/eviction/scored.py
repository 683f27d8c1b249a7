"""Most duplicated under any h: a count for every slot.

Shapes: B newcomers, D embedding, K slots, R slots refreshed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from memory.columns import Columns
from memory.scores import Score


class ScoredTally:
    """Duplicate counts by any score, each slot's own h(1) included, and who has the largest."""

    def __init__(self, columns: Columns, score: Score) -> None:
        self._columns, self._score = columns, score
        self._count_K = torch.zeros(columns.capacity, dtype=torch.float64, device=columns.device)
        self._count_K[: columns.occupied] = score.counts(columns.z_kD)

    def joined(self, z_BD: Tensor) -> None:
        del z_BD
        self._count_K[: self._columns.occupied] = self._score.counts(self._columns.z_kD)

    def choose(self, z_BD: Tensor) -> Tensor:
        z_KD = self._columns.embeddings.clone()
        count_K = self._count_K
        plan = []
        for x_D in z_BD:
            slot = int(count_K.argmax())
            count_K -= self._score.apply_(z_KD @ z_KD[slot])
            near_K = self._score.apply_(z_KD @ x_D)
            near_K[slot] = 0
            z_KD[slot] = x_D
            count_K += near_K
            count_K[slot] = near_K.sum(dtype=torch.float64)
            plan.append(slot)
        return torch.tensor(plan, dtype=torch.int64)

    def refreshed(self, slots: Tensor, before_RD: Tensor) -> None:
        after_RD = self._columns.embeddings[slots]
        z_kD = self._columns.z_kD
        count_k = self._count_K[: len(z_kD)]
        others_kD = z_kD.clone()
        others_kD[slots] = before_RD
        # Slots that stay lose the old rows and gain the new ones; the refreshed are counted anew.
        count_k -= self._score.total(z_kD, before_RD) - self._score.total(z_kD, after_RD)
        own_R = self._score.apply_((after_RD * after_RD).sum(dim=1)).to(torch.float64)
        count_k[slots] = self._score.total(after_RD, z_kD) - own_R

    def counts(self) -> Tensor:
        return self._count_K[: self._columns.occupied].clone()

    def state(self) -> dict[str, Tensor]:
        return {"counts": self.counts()}

    def load(self, state: dict[str, Tensor]) -> None:
        counts = state["counts"]
        self._count_K.zero_()
        self._count_K[: len(counts)] = counts.to(self._columns.device)

    def check(self) -> tuple[bool, str]:
        return True, ""
