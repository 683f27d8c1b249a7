"""Evict from the closest pair of the memory: MinRed.

Shapes: B newcomers, D embedding, K slots, k occupied slots, R slots whose rows are new,
T newcomers taken at a time.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from memory.columns import Columns, Rows
from memory.eviction.base import Policy
from memory.eviction.near import Block, Near, exclude
from memory.eviction.neighbours import Neighbours
from memory.scores import BLOCK_ELEMENTS

NEWCOMERS = 64
"""Most newcomers taken at a time."""


class MinimumRedundancy(Policy):
    """For each newcomer in turn, evict one of the two most similar samples of the memory.

    MinRed (Purushwalkam et al. 2022, The Challenges of Continuous Self-Supervised Learning,
    section 4.2), one newcomer at a time: the pair is sought in the memory without the newcomer,
    which then takes over the slot and is never refused. Of the pair, the one leaves whose
    next-nearest neighbour is closer; then the lowest slot. Cosines that differ by rounding alone
    tie: where several pairs are the closest, that rule is applied to all their slots.

    Exact for any batch size. Costs O(K D) a newcomer, in one matrix product a block, and when the
    memory fills O(K^2 D) once; holds O(K) beside the slots.

    >>> from memory import WorkingMemory
    >>> memory = WorkingMemory(capacity=3, dim=2, eviction=MinimumRedundancy())
    >>> z = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0], [-1.0, 0.0]])
    >>> memory.add(torch.arange(4), z).evicted.tolist()
    [1]
    """

    name = "minimum-redundancy"

    def bind(self, columns: Columns, seed: int) -> None:
        super().bind(columns, seed)
        self._count_anew()

    def _count_anew(self) -> None:
        z_kD = self.columns.z_kD
        dtype = torch.empty(0, dtype=z_kD.dtype).numpy().dtype
        self._lists = Neighbours(self.columns.capacity, dtype)
        self._arrive(torch.arange(len(z_kD)))

    def joined(self, rows: Rows) -> None:
        occupied = self.columns.occupied
        self._arrive(torch.arange(occupied - len(rows), occupied))

    def refreshed(self, slots: Tensor, before_RD: Tensor) -> None:
        del before_RD
        self._lists.leave(slots.cpu().numpy())
        self._arrive(slots.cpu())

    def _arrive(self, slots: Tensor) -> None:
        """The rows of these slots are new, to themselves and to all others."""
        lists, new_k = self._lists, np.zeros(self.columns.occupied, bool)
        new_k[slots.numpy()] = True
        step = max(1, BLOCK_ELEMENTS // max(1, self.columns.occupied))
        z_kD = self.columns.z_kD
        for start in range(0, len(slots), step):
            slot_R = slots[start : start + step]
            floor_k = None
            if not new_k.all():
                floor_k = torch.from_numpy(np.where(new_k, np.inf, lists.floor_K[: len(new_k)]))
            cosine_Rk = z_kD[slot_R.to(z_kD.device)] @ z_kD.T
            exclude(cosine_Rk, slot_R)
            near = Near.of(cosine_Rk, floor_k)
            for turn, slot in enumerate(slot_R.tolist()):
                lists.enter(slot, *near.hits(turn))
                lists.begin(slot, *near.own(turn))

    def choose(self, rows: Rows) -> Tensor:
        lists, columns = self._lists, self.columns
        if columns.capacity == 1:
            return torch.zeros(len(rows), dtype=torch.int64)
        x_TD = rows.embeddings[: max(1, min(NEWCOMERS, BLOCK_ELEMENTS // columns.capacity))]
        block = Block(lists, columns.embeddings, x_TD)
        while len(block.plan) < len(x_TD):
            slot, short = lists.closest()
            if short:
                block.renew(short)
            else:
                block.place(slot)
        return torch.tensor(block.plan, dtype=torch.int64)

    def state(self) -> dict[str, Tensor]:
        lists, k = self._lists, self.columns.occupied
        lists.strike()
        arrays = {
            "cosines": lists.cosine_KL,
            "slots": lists.slot_KL,
            "floors": lists.floor_K,
            "nearest": lists.first_K,
            "next": lists.second_K,
        }
        return {name: torch.from_numpy(array[:k].copy()) for name, array in arrays.items()}

    def load(self, state: dict[str, Tensor]) -> None:
        if state["cosines"].dtype != self.columns.embeddings.dtype:
            self._count_anew()  # they are of narrower rows
            return
        lists, k = self._lists, self.columns.occupied
        self._lists = lists = Neighbours(self.columns.capacity, lists.cosine_KL.dtype)
        lists.cosine_KL[:k], lists.slot_KL[:k] = state["cosines"].cpu(), state["slots"].cpu()
        lists.floor_K[:k] = state["floors"].cpu()
        lists.first_K[:k], lists.second_K[:k] = state["nearest"].cpu(), state["next"].cpu()

    def check(self) -> tuple[bool, str]:
        """Whether every list and every bound holds; O(K^2 D)."""
        z_kD, lists = self.columns.z_kD, self._lists
        unit = 1e-12 if z_kD.dtype == torch.float64 else 1e-5
        step = max(1, BLOCK_ELEMENTS // max(1, len(z_kD)))
        for start in range(0, len(z_kD), step):
            slot_n = np.arange(start, min(start + step, len(z_kD)))
            live_nL = lists.live(slot_n)
            cosine_nk = (z_kD[start : start + step] @ z_kD.T).cpu().numpy()
            cosine_nk[np.arange(len(slot_n)), slot_n] = -np.inf
            turn, entry = np.nonzero(live_nL > -np.inf)
            other = lists.slot_KL[slot_n[turn], entry]
            off = np.abs(cosine_nk[turn, other] - live_nL[turn, entry])
            if len(off) and off.max() > unit:
                worst = int(off.argmax())
                slot = int(slot_n[turn[worst]])
                return False, f"slot {slot}: its cosine with slot {other[worst]} is not as listed"
            cosine_nk[turn, other] = -np.inf
            over_n = cosine_nk.max(axis=1) > lists.floor_K[slot_n] + unit
            over_n |= live_nL.max(axis=1) > lists.first_K[slot_n]
            if over_n.any():
                slot = int(slot_n[over_n.argmax()])
                return False, f"slot {slot}: a neighbour is missing from its list"
        return True, ""
