"""Most duplicated under any h: a count for every slot.

A batch's similarities to the column are one matrix product; each eviction then costs one pass over
the column, for the similarities of the row that leaves.

Shapes: B newcomers, D embedding, K slots, R slots refreshed, T newcomers taken at a time.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from memory.columns import Columns
from memory.eviction.bounds import Vector
from memory.scores import BLOCK_ELEMENTS, Score

STRIDE = 64
"""Most newcomers taken at a time."""

RECOUNT_SHARE = 16
"""One slot is counted anew for so many newcomers, in turn, which bounds the drift of the counts."""


class ScoredTally:
    """Duplicate counts by any score, and who has the largest.

    Args:
        columns: of the memory; rows are read from them.
        score: h.
    """

    def __init__(self, columns: Columns, score: Score) -> None:
        self._columns, self._score = columns, score
        self._count_K: Vector = np.zeros(columns.capacity)
        self._next = 0  # slot to be counted anew next
        self.recount()

    def recount(self) -> None:
        """Count every slot anew."""
        z_kD = self._columns.z_kD
        self._count_K[: len(z_kD)] = self._score.counts(z_kD).cpu().numpy()

    def joined(self, z_BD: Tensor) -> None:
        z_kD = self._columns.z_kD
        old = len(z_kD) - len(z_BD)
        self._count_K[:old] += self._score.total(z_kD[:old], z_BD).cpu().numpy()
        self._count_slots(torch.arange(old, len(z_kD), device=z_kD.device))

    def choose(self, z_BD: Tensor) -> Tensor:
        """Slots of the first newcomers, STRIDE or what one block of similarities holds."""
        self._recount_some()
        z_KD, count_K = self._columns.embeddings, self._count_K
        x_TD = z_BD[: max(1, min(STRIDE, BLOCK_ELEMENTS // len(z_KD)))]
        near_TK = self._score.apply_(x_TD @ z_KD.T).cpu().numpy()
        among_TT = self._score.apply_(x_TD @ x_TD.T).cpu().numpy()
        plan: list[int] = []
        holder: dict[int, int] = {}  # the newcomer in each slot taken over so far
        for turn, near_K in enumerate(near_TK):
            slot = self._most(x_TD, holder)
            leaving_D = x_TD[holder[slot]] if slot in holder else z_KD[slot]
            count_K -= self._similarities(leaving_D, x_TD, holder)
            near_K[slot] = 0
            count_K += near_K
            count_K[slot] = near_K.sum(dtype=np.float64)
            near_TK[turn + 1 :, slot] = among_TT[turn + 1 :, turn]
            holder[slot] = turn
            plan.append(slot)
        return torch.tensor(plan, dtype=torch.int64)

    def _similarities(self, row_D: Tensor, x_TD: Tensor, holder: dict[int, int]) -> Vector:
        """h of a row with every slot, newcomers of this batch in their places."""
        h_K = self._score.apply_(self._columns.embeddings @ row_D).cpu().numpy()
        if holder:
            h_T = self._score.apply_(x_TD @ row_D).cpu().numpy()
            h_K[list(holder)] = h_T[list(holder.values())]
        return np.asarray(h_K)

    def _most(self, x_TD: Tensor, holder: dict[int, int]) -> int:
        """The slot of the largest count; of rows equal to it bit by bit, the lowest.

        Equal rows have equal counts, but counts are kept up by matrix products, which may round
        them differently.
        """
        count_K = self._count_K
        best = int(count_K.argmax())
        most = float(count_K[best])
        unit = 1e-12 if x_TD.dtype == torch.float64 else 1e-5
        count_K[best] = -np.inf
        rival = float(count_K.max())
        count_K[best] = most
        if rival < (least := most - unit * max(1.0, most)):
            return best
        near = np.flatnonzero(count_K[:best] >= least)
        row_nD = self._columns.embeddings[torch.from_numpy(near).to(x_TD.device)]
        for place, slot in enumerate(near.tolist()):
            if slot in holder:
                row_nD[place] = x_TD[holder[slot]]
        row_D = x_TD[holder[best]] if best in holder else self._columns.embeddings[best]
        equal = near[(row_nD == row_D).all(dim=1).cpu().numpy()]
        return int(equal[0]) if len(equal) else best

    def _recount_some(self) -> None:
        count = min(STRIDE // RECOUNT_SHARE, self._columns.capacity)
        slots = (self._next + np.arange(count)) % self._columns.capacity
        self._count_slots(torch.from_numpy(slots).to(self._columns.device))
        self._next = int(slots[-1] + 1) % self._columns.capacity

    def _count_slots(self, slots: Tensor) -> None:
        z_kD = self._columns.z_kD
        z_RD = z_kD[slots]
        own_R = self._score.apply_((z_RD * z_RD).sum(dim=1))
        self._count_K[slots.cpu().numpy()] = (self._score.total(z_RD, z_kD) - own_R).cpu().numpy()

    def refreshed(self, slots: Tensor, before_RD: Tensor) -> None:
        z_kD = self._columns.z_kD
        change_k = self._score.total(z_kD, z_kD[slots]) - self._score.total(z_kD, before_RD)
        self._count_K[: len(z_kD)] += change_k.cpu().numpy()
        self._count_slots(slots)

    def counts(self) -> Tensor:
        """N(j) of the occupied slots, float64 [k]."""
        count_k = self._count_K[: self._columns.occupied].copy()
        return torch.from_numpy(count_k).to(self._columns.device)

    def total(self, z_BD: Tensor) -> Tensor:
        """sum_k h(z_b . m_k), float64 [B]."""
        return self._score.total(z_BD, self._columns.z_kD)

    def state(self) -> dict[str, Tensor]:
        return {"counts": self.counts().cpu(), "next": torch.tensor([self._next])}

    def load(self, state: dict[str, Tensor]) -> None:
        self._count_K[:] = 0
        self._count_K[: len(state["counts"])] = state["counts"].cpu().numpy()
        self._next = int(state["next"])

    def check(self) -> tuple[bool, str]:
        anew_k = self._score.counts(self._columns.z_kD)
        unit = 1e-9 if self._columns.embeddings.dtype == torch.float64 else 1e-4
        off_k = (self.counts() - anew_k).abs() / anew_k.clamp(min=1)
        if len(off_k) and float(off_k.max()) > unit:
            slot = int(off_k.argmax())
            count = float(self._count_K[slot])
            return False, f"slot {slot}: its count is {count:.9g}, recounted {anew_k[slot]:.9g}"
        return True, ""
