"""A duplicate count for every slot, kept up as rows change.

Shapes: B newcomers, D embedding, K slots, k occupied slots, R slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

from memory.columns import Columns
from memory.eviction.group import ALONE, Group
from memory.scores import BLOCK_ELEMENTS, Score

RECOUNT_SHARE = 16
"""One slot is counted anew for so many newcomers, in turn, which bounds the drift of the counts."""


class Counts:
    """N(j) of DUEL, eq. 5, by any score, over the slots of all shards.

    Args:
        columns: of this shard; rows are read from them.
        score: h.
        group: who holds the other shards. All its ranks must call alike.
    """

    def __init__(self, columns: Columns, score: Score, group: Group = ALONE) -> None:
        self._columns, self.score, self._group = columns, score, group
        self.count_K = torch.zeros(columns.capacity, dtype=torch.float64, device=columns.device)
        self._next = 0  # slot to be counted anew next
        self._owed = 0  # newcomers since the last were
        self.recount()

    def recount(self) -> None:
        """Count every slot anew, a block at a time."""
        z_kD = self._columns.z_kD
        self.count_K.zero_()
        if self._group.size == 1:
            self.count_K[: len(z_kD)] = self.score.counts(z_kD)
            return
        step = max(1, BLOCK_ELEMENTS // self._columns.dim)
        for start in range(0, self._columns.capacity, step):
            (z_ND,) = self._group.together(z_kD[start : start + step])
            self.count_K[: len(z_kD)] += self.score.total(z_kD, z_ND)
        self.count_K[: len(z_kD)] -= self._own(z_kD)

    def _own(self, z_RD: Tensor) -> Tensor:
        return self.score.apply_((z_RD * z_RD).sum(dim=1))

    def joined(self, z_BD: Tensor) -> None:
        """Newcomers fill the last of the occupied slots."""
        z_kD = self._columns.z_kD
        old = len(z_kD) - len(z_BD)
        (z_ND,) = self._group.together(z_BD)
        self.count_K[:old] += self.score.total(z_kD[:old], z_ND)
        self._count(torch.arange(old, len(z_kD), device=z_kD.device))

    def refreshed(self, slots: Tensor, before_RD: Tensor) -> None:
        """These slots hold other rows than `before_RD` now."""
        z_kD = self._columns.z_kD
        if self._group.size == 1 and 2 * len(slots) >= len(z_kD):
            self.recount()
            return
        after_ND, before_ND = self._group.together(z_kD[slots], before_RD)
        self.count_K[: len(z_kD)] += self.score.total(z_kD, after_ND)
        self.count_K[: len(z_kD)] -= self.score.total(z_kD, before_ND)
        self._count(slots)

    def placed(self, newcomers: int) -> None:
        """So many newcomers have been placed, which pay for counting slots anew."""
        self._owed += newcomers

    def recount_due(self) -> None:
        """Count the next slots anew, as many as have been paid for."""
        number = min(self._owed // RECOUNT_SHARE, self._columns.capacity)
        if number < min(RECOUNT_SHARE, self._columns.capacity):
            return  # few at a time would cost as much as many
        self._owed = 0
        places = torch.arange(self._next, self._next + number, device=self._columns.device)
        self._count(places % self._columns.capacity)
        self._next = (self._next + number) % self._columns.capacity

    def _count(self, slots: Tensor) -> None:
        z_RD = self._columns.z_kD[slots]
        z_ND, rank_N = self._group.together(z_RD, torch.full_like(slots, self._group.rank))
        total_N = self._group.total(self.score.total(z_ND, self._columns.z_kD))
        self.count_K[slots] = total_N[rank_N == self._group.rank] - self._own(z_RD)

    def state(self) -> dict[str, Tensor]:
        """What `load` needs to go on bit-equal."""
        return {
            "counts": self.count_K[: self._columns.occupied].cpu().clone(),
            "next": torch.tensor([self._next, self._owed]),
        }

    def load(self, state: dict[str, Tensor]) -> None:
        """Take over what `state` gave."""
        self.count_K.zero_()
        self.count_K[: len(state["counts"])] = state["counts"].to(self.count_K.device)
        self._next, self._owed = state["next"].tolist()

    def check(self) -> tuple[bool, str]:
        """Recount: (True, "") or (False, which slot is off by how much)."""
        z_kD = self._columns.z_kD
        kept_K = self.count_K.clone()
        self.recount()
        anew_k, self.count_K = self.count_K[: len(z_kD)].clone(), kept_K
        # Of a sharp score a float32 cosine's rounding alone may be more.
        narrow = max(1e-4, 1e-6 * (1 + self.score.slope))
        unit = 1e-9 if z_kD.dtype == torch.float64 else narrow
        off_k = (self.count_K[: len(z_kD)] - anew_k).abs() / anew_k.clamp(min=1)
        if len(off_k) and float(off_k.max()) > unit:
            slot = int(off_k.argmax())
            count = float(self.count_K[slot])
            return False, f"slot {slot}: its count is {count:.9g}, recounted {anew_k[slot]:.9g}"
        return True, ""
