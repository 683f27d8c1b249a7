"""Who is near to a block of rows, and a block of newcomers put into slots in turn.

Shapes: D embedding, K slots, L entries of a list, R rows, T newcomers, e slots counted anew.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from memory.eviction.neighbours import LIST, Neighbours, Slots, Values

GROUPS = 4.0
"""Groups of columns, for each root of their number, where the largest of a long row are sought."""


@dataclass(frozen=True, slots=True)
class Near:
    """The largest cosines of each of R rows and whose they are; and, row by row from `start`, those
    above the floor of the other. On the host.
    """

    top_cosine: Values
    top_slot: Slots
    hit_cosine: Values
    hit_slot: Slots
    start: Slots

    @classmethod
    def of(cls, cosine_RK: Tensor, floor_K: Tensor | None) -> Near:
        """From all cosines, -inf for a pair that is none; without floors nobody is above one."""
        top_cosine, top_slot = largest(cosine_RK, min(LIST + 1, cosine_RK.shape[1]))
        hit = np.zeros(0, np.int64)
        if floor_K is not None:
            above_RK = cosine_RK > floor_K.to(cosine_RK.device, cosine_RK.dtype)
            hit = where_true(above_RK.view(-1))
        hit_cosine = cosine_RK.view(-1)[torch.from_numpy(hit).to(cosine_RK.device)]
        turn, slot = np.divmod(hit, cosine_RK.shape[1])
        return cls(
            top_cosine.cpu().numpy(),
            top_slot.cpu().numpy(),
            hit_cosine.cpu().numpy(),
            slot,
            np.searchsorted(turn, np.arange(len(cosine_RK) + 1)),
        )

    def hits(self, turn: int) -> tuple[Slots, Values]:
        """Slots to whose lists this row may belong, and its cosines with them."""
        part = slice(self.start[turn], self.start[turn + 1])
        return self.hit_slot[part], self.hit_cosine[part]

    def own(self, turn: int) -> tuple[Slots, Values, float]:
        """The nearest of a row, and what no other exceeds."""
        return own(self.top_slot[turn], self.top_cosine[turn])


class Block:
    """Newcomers of one block, put into slots in turn while the columns stay as they were.

    Args:
        lists: kept up with every newcomer.
        z_KD: what the memory held before them.
        x_TD: the newcomers.
    """

    def __init__(self, lists: Neighbours, z_KD: Tensor, x_TD: Tensor) -> None:
        self._lists, self._z_KD, self._x_TD = lists, z_KD, x_TD
        self._cosine_TK = x_TD @ z_KD.T
        self._near = Near.of(self._cosine_TK, torch.from_numpy(lists.floor_K))
        self._among_TT = (x_TD @ x_TD.T).cpu().numpy()
        self._taken_K = np.zeros(len(z_KD), bool)
        self._anew_K = np.zeros(len(z_KD), bool)
        self._anew_e: Slots = np.zeros(0, np.int64)
        self._anew_Te = self._among_TT[:, :0]  # cosines of the newcomers with those
        self._turn: dict[int, int] = {}  # of the newcomer that stands in each slot taken over
        self.plan: list[int] = []

    def place(self, slot: int) -> None:
        """The next newcomer takes over this slot."""
        turn, lists = len(self.plan), self._lists
        lists.evict(slot)
        self._taken_K[slot] = True
        self._turn.pop(slot, None)
        newer, newer_cosine = self._newer(self._among_TT[turn])
        hit, hit_cosine = self._near.hits(turn)
        near, anew = ~(self._taken_K[hit] | self._anew_K[hit]), ~self._taken_K[self._anew_e]
        lists.enter(
            slot,
            np.concatenate([hit[near], self._anew_e[anew], newer]),
            np.concatenate([hit_cosine[near], self._anew_Te[turn, anew], newer_cosine]),
        )
        self._begin(slot, *self._near.own(turn), newer, newer_cosine)
        self._turn[slot] = turn
        self.plan.append(slot)

    def renew(self, short: list[int]) -> None:
        """Count the lists of these slots anew, newcomers placed so far in their slots."""
        row_RD = self._z_KD[torch.tensor(short, device=self._z_KD.device)]
        for place, slot in enumerate(short):
            if slot in self._turn:
                row_RD[place] = self._x_TD[self._turn[slot]]
        cosine_RK = row_RD @ self._z_KD.T
        taken = torch.tensor(list(self._turn), dtype=torch.int64, device=cosine_RK.device)
        cosine_RK[:, taken] = row_RD @ self._x_TD[list(self._turn.values())].T
        exclude(cosine_RK, torch.tensor(short))
        top_cosine, top_slot = largest(cosine_RK, min(LIST + 1, cosine_RK.shape[1]))
        for slot, other, cosine in zip(
            short, top_slot.cpu().numpy(), top_cosine.cpu().numpy(), strict=True
        ):
            self._lists.begin(slot, *own(other, cosine))
        # The hits were found by the old floors: of these slots, every cosine counts from now on.
        anew = [slot for slot in short if not (self._taken_K[slot] or self._anew_K[slot])]
        self._anew_K[anew] = True
        self._anew_e = np.concatenate([self._anew_e, np.array(anew, np.int64)])
        cosine_Te = self._cosine_TK[:, anew].cpu().numpy()
        self._anew_Te = np.concatenate([self._anew_Te, cosine_Te], axis=1)

    def _newer(self, cosine_T: Values) -> tuple[Slots, Values]:
        """The slots of the newcomers that stand in one, and of all these cosines theirs."""
        slots = np.fromiter(self._turn.keys(), np.int64, len(self._turn))
        return slots, cosine_T[list(self._turn.values())]

    def _begin(
        self,
        slot: int,
        top: Slots,
        top_cosine: Values,
        floor: float,
        newer: Slots,
        newer_cosine: Values,
    ) -> None:
        stay = ~self._taken_K[top]
        other = np.concatenate([top[stay], newer])
        self._lists.begin(slot, other, np.concatenate([top_cosine[stay], newer_cosine]), floor)


def own(other_l: Slots, cosine_l: Values) -> tuple[Slots, Values, float]:
    """Of the largest cosines of a row, L at most, and what no other exceeds."""
    if len(other_l) <= LIST or cosine_l[LIST] == -np.inf:
        there = cosine_l > -np.inf
        return other_l[there], cosine_l[there], -np.inf
    return other_l[:LIST], cosine_l[:LIST], float(cosine_l[LIST])


def exclude(cosine_RK: Tensor, slot_R: Tensor) -> None:
    """Rows of the memory are no neighbours of themselves."""
    here = torch.arange(len(slot_R), device=cosine_RK.device)
    cosine_RK[here, slot_R.to(cosine_RK.device)] = -torch.inf


def where_true(mask: Tensor) -> Slots:
    """Indices where a flat mask is True, on the host; numpy finds the rare ones far faster."""
    if mask.device.type != "cpu":
        return np.asarray(torch.nonzero(mask).flatten().cpu().numpy())
    return np.flatnonzero(mask.numpy())


def largest(cosine_RK: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """torch.topk over the last dimension; of long rows, over the groups that can hold them."""
    rows, columns = cosine_RK.shape
    groups = int(GROUPS * columns**0.5)
    deep = columns // max(1, groups)
    if deep < 8 or count > groups:
        return torch.topk(cosine_RK, count)
    # Group g holds the columns g, g + G, g + 2 G, ... of G groups.
    inside_RdG = cosine_RK[:, : deep * groups].view(rows, deep, groups)
    group_Rc = torch.topk(inside_RdG.amax(dim=1), count).indices
    step_d = groups * torch.arange(deep, device=cosine_RK.device)
    index_RN = (group_Rc[:, :, None] + step_d).view(rows, -1)
    rest = torch.arange(deep * groups, columns, device=cosine_RK.device).expand(rows, -1)
    index_RN = torch.cat([index_RN, rest], dim=1)
    found = torch.topk(cosine_RK.gather(1, index_RN), count)
    return found.values, index_RN.gather(1, found.indices)
