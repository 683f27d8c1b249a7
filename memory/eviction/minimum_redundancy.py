"""Evict from the closest pair of the memory: MinRed.

Shapes: B newcomers, D embedding, K slots, k occupied slots, R slots whose rows are new,
T newcomers taken at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from memory.columns import Columns, Rows
from memory.eviction.base import Policy
from memory.eviction.neighbours import LIST, Neighbours, Slots, Values
from memory.scores import BLOCK_ELEMENTS

NEWCOMERS = 256
"""Most newcomers taken at a time."""

GROUP = 64
"""Columns whose largest stands for them when the largest of a row are sought."""


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
        self._most = NEWCOMERS
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
        for start in range(0, len(slots), step):
            slot_R = slots[start : start + step]
            floor_k = torch.from_numpy(np.where(new_k, np.inf, lists.floor_K[: len(new_k)]))
            near = self._near(self.columns.z_kD[slot_R.to(self.columns.device)], floor_k, slot_R)
            for turn, slot in enumerate(slot_R.tolist()):
                lists.enter(slot, *near.hits(turn))
                lists.begin(slot, *near.own(turn))

    def _near(self, x_RD: Tensor, floor_k: Tensor, slot_R: Tensor | None = None) -> Near:
        """Who is near to these rows; in the case of rows of the memory, themselves left out."""
        cosine_Rk = x_RD @ self.columns.z_kD.T
        if slot_R is not None:
            here = torch.arange(len(slot_R), device=cosine_Rk.device)
            cosine_Rk[here, slot_R.to(cosine_Rk.device)] = -torch.inf
        return Near.of(cosine_Rk, floor_k.to(cosine_Rk.device, cosine_Rk.dtype))

    def choose(self, rows: Rows) -> Tensor:
        """Slots of the first newcomers: up to where a list must be counted anew."""
        lists, capacity = self._lists, self.columns.capacity
        if capacity == 1:
            return torch.zeros(1, dtype=torch.int64)
        slot, short = lists.closest()
        while short:
            self._renew(short)
            slot, short = lists.closest()
        x_TD = rows.embeddings[: max(1, min(self._most, BLOCK_ELEMENTS // capacity))]
        near = self._near(x_TD, torch.from_numpy(lists.floor_K))
        block = Block(lists, near, (x_TD @ x_TD.T).cpu().numpy())
        block.place(slot)
        while len(block.plan) < len(x_TD):
            slot, short = lists.closest()
            if short:
                break
            block.place(slot)
        done = len(block.plan)
        self._most = min(NEWCOMERS, 2 * done if done < len(x_TD) else 2 * self._most)
        return torch.tensor(block.plan, dtype=torch.int64)

    def _renew(self, short: list[int]) -> None:
        slot_R = torch.tensor(short)
        nobody_k = torch.full((self.columns.occupied,), torch.inf)
        near = self._near(self.columns.z_kD[slot_R.to(self.columns.device)], nobody_k, slot_R)
        for turn, slot in enumerate(short):
            self._lists.begin(slot, *near.own(turn))

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
        state = {name: torch.from_numpy(array[:k].copy()) for name, array in arrays.items()}
        return state | {"most": torch.tensor([self._most])}

    def load(self, state: dict[str, Tensor]) -> None:
        self._most = int(state["most"])
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


@dataclass(frozen=True, slots=True)
class Near:
    """Who is near to each of a block of rows, on the host.

    `top` holds the L + 1 largest cosines of each row and whose they are; `hit` those above the
    floor of the other, row by row from `start`.
    """

    top_cosine: Values
    top_slot: Slots
    hit_cosine: Values
    hit_slot: Slots
    start: Slots

    @classmethod
    def of(cls, cosine_TK: Tensor, floor_K: Tensor) -> Near:
        """From all cosines; -inf marks a pair that is none."""
        top_cosine, top_slot = largest(cosine_TK, min(LIST + 1, cosine_TK.shape[1]))
        turn, slot = torch.nonzero(cosine_TK > floor_K, as_tuple=True)
        counts = torch.bincount(turn, minlength=len(cosine_TK)).cpu().numpy()
        return cls(
            top_cosine.cpu().numpy(),
            top_slot.cpu().numpy(),
            cosine_TK[turn, slot].cpu().numpy(),
            slot.cpu().numpy(),
            np.concatenate([[0], np.cumsum(counts)]),
        )

    def hits(self, turn: int) -> tuple[Slots, Values]:
        part = slice(self.start[turn], self.start[turn + 1])
        return self.hit_slot[part], self.hit_cosine[part]

    def own(self, turn: int) -> tuple[Slots, Values, float]:
        """The nearest of a row, and what no other exceeds."""
        slot_l, cosine_l = self.top_slot[turn], self.top_cosine[turn]
        if len(slot_l) <= LIST or cosine_l[LIST] == -np.inf:
            there = cosine_l > -np.inf
            return slot_l[there], cosine_l[there], -np.inf
        return slot_l[:LIST], cosine_l[:LIST], float(cosine_l[LIST])


def largest(cosine_TK: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """torch.topk over the last dimension; for long rows, over the groups that can hold them."""
    rows, columns = cosine_TK.shape
    whole = columns // GROUP
    if whole < 4 * count:
        return torch.topk(cosine_TK, count)
    group_TGg = cosine_TK[:, : whole * GROUP].view(rows, whole, GROUP)
    group_Tc = torch.topk(group_TGg.amax(dim=2), count).indices
    index_TN = (group_Tc[:, :, None] * GROUP + torch.arange(GROUP, device=cosine_TK.device)).view(
        rows, -1
    )
    rest = torch.arange(whole * GROUP, columns, device=cosine_TK.device).expand(rows, -1)
    index_TN = torch.cat([index_TN, rest], dim=1)
    found = torch.topk(cosine_TK.gather(1, index_TN), count)
    return found.values, index_TN.gather(1, found.indices)


class Block:
    """Newcomers of one block, put into slots in turn.

    Args:
        lists: kept up with every newcomer.
        near: of the newcomers to the rows that the memory held before them.
        among_TT: their cosines with each other.
    """

    def __init__(self, lists: Neighbours, near: Near, among_TT: Values) -> None:
        self._lists, self._near, self._among_TT = lists, near, among_TT
        self._taken_K = np.zeros(len(lists.floor_K), bool)
        self._turn: dict[int, int] = {}  # of the newcomer that stands in a taken slot
        self.plan: list[int] = []

    def place(self, slot: int) -> None:
        """The next newcomer takes over this slot."""
        turn, lists = len(self.plan), self._lists
        lists.leave(slot)
        self._taken_K[slot] = True
        self._turn.pop(slot, None)
        newer = np.fromiter(self._turn.keys(), np.int64, len(self._turn))
        newer_cosine = self._among_TT[turn, list(self._turn.values())]
        hit, hit_cosine = self._near.hits(turn)
        stay = ~self._taken_K[hit]
        lists.enter(
            slot,
            np.concatenate([hit[stay], newer]),
            np.concatenate([hit_cosine[stay], newer_cosine]),
        )
        top, top_cosine, floor = self._near.own(turn)
        stay = ~self._taken_K[top]
        lists.begin(
            slot,
            np.concatenate([top[stay], newer]),
            np.concatenate([top_cosine[stay], newer_cosine]),
            floor,
        )
        self._turn[slot] = turn
        self.plan.append(slot)


def redundancy(z_KD: Tensor) -> float:
    """Sum over slots of the cosine with the nearest other slot; what MinRed keeps low.

    >>> redundancy(torch.eye(3)[[0, 0, 1]])
    2.0
    """
    total = 0.0
    step = max(1, BLOCK_ELEMENTS // max(1, len(z_KD)))
    for start in range(0, len(z_KD) if len(z_KD) > 1 else 0, step):
        cosine_bK = z_KD[start : start + step] @ z_KD.T
        cosine_bK.diagonal(offset=start).fill_(-torch.inf)
        total += float(cosine_bK.amax(dim=1).sum(dtype=torch.float64))
    return total
