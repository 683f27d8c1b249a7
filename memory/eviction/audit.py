"""Whether slots outside the candidates would have overruled a proposal, step by step.

Their counts are followed exactly: each step adds the row of who came and subtracts the row of who
left. Nothing is bounded, so no step is lost to a loose bound, whatever h is.

Shapes: K slots, L steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from memory.eviction.bounds import Indices, Vector


@dataclass(frozen=True, slots=True)
class Steps:
    """Steps to be judged. Counts are less the same level as those outside."""

    near_LK: Tensor  # h of each newcomer with all slots
    left: Sequence[Tensor]  # h of who left with all slots; of the newcomer where it was refused
    slot_L: Indices  # of who left; behind all slots where it was the newcomer, refused
    apart_L: Vector  # count of who left
    margin_L: Vector  # counts that lie no farther apart tie, and go to the lowest slot

    def __len__(self) -> int:
        return len(self.slot_L)


class Outside:
    """The counts of the slots outside, followed through proposals.

    Args:
        apart_K: counts before the first step, less a level: so float32 holds the differences near
            the largest.
        compete: newcomers are counted before the largest is sought.

    Attributes:
        apart_K: counts after the steps that were carried out; of candidates -inf.
    """

    def __init__(self, apart_K: Tensor, compete: bool) -> None:
        self.apart_K, self._compete = apart_K, compete
        self._moved_K, self._followed = apart_K, 0  # counts after so many of the steps asked for

    def leave_out(self, slots: Tensor) -> None:
        """These are candidates now."""
        self.apart_K[slots] = -torch.inf

    def follow(self, steps: Steps, sure: int) -> int:
        """How many of these steps hold. The first `sure` hold in any case."""
        if self.apart_K.device.type == "cpu":
            return self.follow_in_turn(steps, sure)
        return self.follow_at_once(steps, sure)

    def carry_out(self, steps: Steps, held: int) -> None:
        """The first steps are done."""
        if held != self._followed:
            self._moved_K = self.apart_K.clone()
            for near_K, left_K in zip(steps.near_LK[:held], steps.left, strict=False):
                self._moved_K += near_K
                self._moved_K -= left_K
        self.apart_K = self._moved_K

    def follow_in_turn(self, steps: Steps, sure: int) -> int:
        """On the host: the one row that changes stays in the cache."""
        self._moved_K = self.apart_K.clone()
        moved_K = self._moved_K.numpy()
        for step, (near, left) in enumerate(zip(steps.near_LK, steps.left, strict=True)):
            if self._compete:
                moved_K += near.numpy()
            if step >= sure and not self._stands(steps, step):
                self._followed = -1 if self._compete else step
                return step
            if not self._compete:
                moved_K += near.numpy()
            moved_K -= left.numpy()
        self._followed = len(steps)
        return len(steps)

    def _stands(self, steps: Steps, step: int) -> bool:
        moved_K = self._moved_K.numpy()
        apart, margin = float(steps.apart_L[step]), float(steps.margin_L[step])
        outside = float(moved_K.max())
        if outside < apart - margin:
            return True
        if outside > apart + margin:
            return False
        rival = int((moved_K >= max(outside, apart) - margin).argmax())
        return rival > int(steps.slot_L[step])

    def follow_at_once(self, steps: Steps, sure: int) -> int:
        """In a few operations on whole blocks, for a device that is slow to start each."""
        change_LK = steps.near_LK - torch.stack(list(steps.left))
        moved_LK = torch.cumsum(change_LK, dim=0).add_(self.apart_K)
        seen_LK = moved_LK - change_LK
        if self._compete:
            seen_LK += steps.near_LK
        apart_L1, margin_L1, slot_L1 = (
            torch.from_numpy(value_L).to(seen_LK.device)[:, None]
            for value_L in (steps.apart_L, steps.margin_L, steps.slot_L)
        )
        outside_L1 = seen_LK.amax(dim=1, keepdim=True)
        tied_LK = seen_LK >= torch.maximum(outside_L1, apart_L1) - margin_L1
        rival_L1 = tied_LK.to(torch.int8).argmax(dim=1, keepdim=True)
        stands_L1 = (outside_L1 < apart_L1 - margin_L1) | (
            (outside_L1 <= apart_L1 + margin_L1) & (rival_L1 > slot_L1)
        )
        stands_L1[:sure] = True
        held = int(stands_L1.to(torch.int64).cumprod(dim=0).sum())
        self._followed = held
        self._moved_K = moved_LK[held - 1].clone() if held else self.apart_K
        return held
