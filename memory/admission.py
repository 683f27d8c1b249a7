"""What became of a batch of newcomers, worked out from the slots that a policy chose.

Shapes: B newcomers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from memory.columns import Columns, Rows

REFUSED = -1
"""In a policy's plan: this newcomer does not join."""


@dataclass(frozen=True, slots=True)
class Admission:
    """The outcome of one `add`, on the CPU.

    Attributes:
        slots: int64 [B], where each newcomer stands now; -1 where it was refused, or evicted again
            by a later newcomer of the same batch.
        evicted: int64, ids in the order in which they were evicted.
        ages: int64, for each evicted id the samples offered between its arrival and its eviction.
        refused: int64, ids of the newcomers that never joined.
        inserted: how many newcomers joined, those evicted again included.
    """

    slots: Tensor
    evicted: Tensor
    ages: Tensor
    refused: Tensor
    inserted: int

    @classmethod
    def of_nobody(cls) -> Admission:
        """Of a batch without newcomers."""
        nothing = torch.empty(0, dtype=torch.int64)
        return cls(nothing, nothing, nothing, nothing, 0)

    def then(self, later: Admission) -> Admission:
        """One admission of this one and the next, which may evict newcomers of this one."""
        if len(self.slots) == 0:
            return later
        stay = ~torch.isin(self.slots, later.slots)
        return Admission(
            slots=torch.cat([torch.where(stay, self.slots, -1), later.slots]),
            evicted=torch.cat([self.evicted, later.evicted]),
            ages=torch.cat([self.ages, later.ages]),
            refused=torch.cat([self.refused, later.refused]),
            inserted=self.inserted + later.inserted,
        )


def carry_out(plan: Tensor, rows: Rows, columns: Columns) -> Admission:
    """Write each newcomer to the slot that the plan gives it, in turn.

    Args:
        plan: int64 [B] on the CPU; newcomer b goes to slot plan[b], or nowhere where it is -1.
            A slot may occur often: each newcomer evicts the one before it. A slot not yet occupied
            is filled and nobody is evicted.
        rows: the newcomers.
        columns: where to write; all but `occupied` is updated.
    """
    # Numpy for the bookkeeping: at these sizes torch would spend its time in dispatch.
    plan_B, ids_B, born_B = plan.numpy(), rows.ids.cpu().numpy(), rows.born.cpu().numpy()
    turn = np.flatnonzero(plan_B != REFUSED)
    slot = plan_B[turn]
    # Sorted by slot and then by turn, each newcomer stands right behind the one it evicts.
    order = np.argsort(slot, kind="stable")
    again = slot[order][1:] == slot[order][:-1]
    previous = np.full(len(turn), -1)
    previous[order[1:][again]] = order[:-1][again]
    last = np.ones(len(turn), dtype=bool)
    last[order[:-1][again]] = False

    where = torch.from_numpy(slot).to(columns.device)
    was_held = previous < 0
    old_ids = np.where(was_held, columns.ids[where].cpu().numpy(), ids_B[turn[previous]])
    old_born = np.where(was_held, columns.born[where].cpu().numpy(), born_B[turn[previous]])
    evicts = ~was_held | (slot < columns.occupied)

    survivor = turn[last]
    columns.write(where[torch.from_numpy(last)], rows[torch.from_numpy(survivor)])
    slots = np.full(len(plan_B), -1)
    slots[survivor] = slot[last]
    return Admission(
        slots=torch.from_numpy(slots),
        evicted=torch.from_numpy(old_ids[evicts]),
        ages=torch.from_numpy((born_B[turn] - old_born)[evicts]),
        refused=torch.from_numpy(ids_B[plan_B == REFUSED]),
        inserted=len(turn),
    )
