"""Whether slots outside the candidates would have overruled a proposal, step by step.

Their counts are followed exactly: each step adds the row of who came and subtracts the row of who
left. Nothing is bounded, so no step is lost to a loose bound, whatever h is.

Shapes: K slots, L steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from memory.eviction.bounds import Indices, Vector


@dataclass(frozen=True, slots=True)
class Steps:
    """Steps to be judged. Counts are less the same constant as those outside."""

    near_LK: Tensor  # h of each newcomer with all slots
    left_LK: Tensor  # h of who left with all slots; of the newcomer itself where it was refused
    slot_L: Indices  # of who left; K where the newcomer was refused, so that ties go against it
    most_L: Vector  # count of who left
    margin_L: Vector  # counts that lie no farther apart tie, and go to the lowest slot

    def __len__(self) -> int:
        return len(self.slot_L)


class Outside:
    """The counts of the slots outside, followed through a proposal.

    Args:
        apart_K: counts before the first step, -inf for candidates, less a constant: so float32
            holds the differences near the largest. Written over.
        compete: newcomers are counted before the largest is sought.
    """

    def __init__(self, apart_K: Tensor, compete: bool) -> None:
        self._apart_K, self._compete = apart_K, compete

    def follow(self, steps: Steps, sure: int) -> int:
        """How many of these steps hold, which are then done. The first `sure` hold in any case."""
        if self._apart_K.device.type == "cpu":
            return self.follow_in_turn(steps, sure)
        return self.follow_at_once(steps, sure)

    def follow_in_turn(self, steps: Steps, sure: int) -> int:
        """On the host: the one row that changes stays in the cache."""
        apart_K = self._apart_K.numpy()
        rows = zip(steps.near_LK.numpy(), steps.left_LK.numpy(), strict=True)
        for step, (near_K, left_K) in enumerate(rows):
            if self._compete:
                apart_K += near_K
            if step >= sure and not self._stands(steps, step):
                return step
            if not self._compete:
                apart_K += near_K
            apart_K -= left_K
        return len(steps)

    def _stands(self, steps: Steps, step: int) -> bool:
        apart_K = self._apart_K.numpy()
        most, margin = float(steps.most_L[step]), float(steps.margin_L[step])
        outside = float(apart_K.max())
        if outside < most - margin:
            return True
        if outside > most + margin:
            return False
        rival = int((apart_K >= max(outside, most) - margin).argmax())
        return rival > int(steps.slot_L[step])

    def follow_at_once(self, steps: Steps, sure: int) -> int:
        """In a few operations on whole blocks, for a device that is slow to start each."""
        change_LK = steps.near_LK - steps.left_LK
        moved_LK = torch.cumsum(change_LK, dim=0).add_(self._apart_K)
        seen_LK = moved_LK - change_LK
        if self._compete:
            seen_LK += steps.near_LK
        most_L1, margin_L1, slot_L1 = (
            torch.from_numpy(value_L).to(seen_LK.device)[:, None]
            for value_L in (steps.most_L, steps.margin_L, steps.slot_L)
        )
        outside_L1 = seen_LK.amax(dim=1, keepdim=True)
        tied_LK = seen_LK >= torch.maximum(outside_L1, most_L1) - margin_L1
        rival_L1 = tied_LK.to(torch.int8).argmax(dim=1, keepdim=True)
        stands_L1 = (outside_L1 < most_L1 - margin_L1) | (
            (outside_L1 <= most_L1 + margin_L1) & (rival_L1 > slot_L1)
        )
        stands_L1[:sure] = True
        held = int(stands_L1.to(torch.int64).cumprod(dim=0).sum())
        if held:
            self._apart_K = moved_LK[held - 1]
        return held
