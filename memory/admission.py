"""What became of a batch of newcomers, worked out from the slots that a policy chose.

Shapes: B newcomers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from memory.columns import Columns, Rows

REFUSED = -1
"""In a policy's plan: this newcomer does not join."""


def _nobody() -> Tensor:
    return torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True, slots=True)
class Admission:
    """The outcome of one `add`, on the CPU.

    Attributes:
        slots: int64 [B], where each newcomer stands now; -1 where it was refused, or evicted again
            by a later newcomer of the same batch.
        evicted: int64, ids in the order in which they were evicted.
        ages: int64, for each evicted id the samples offered between its arrival and its eviction.
        refused: int64, ids of the newcomers that never joined, in order of arrival.
        inserted: how many newcomers joined, those evicted again included.
        duplicates: int64, ids of the newcomers found to be near-duplicates, let in or not.
        merged: int64, for each newcomer merged the slot of what it was merged into; -1 where that
            left in the course of the batch.
    """

    slots: Tensor
    evicted: Tensor
    ages: Tensor
    refused: Tensor
    inserted: int
    duplicates: Tensor = field(default_factory=_nobody)
    merged: Tensor = field(default_factory=_nobody)

    @classmethod
    def of_nobody(cls) -> Admission:
        """Of a batch without newcomers."""
        return cls(_nobody(), _nobody(), _nobody(), _nobody(), 0)

    def then(self, later: Admission) -> Admission:
        """One admission of this one and the next, which may evict newcomers of this one. Both are
        as `carry_out` makes them: without duplicates.
        """
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


@dataclass(slots=True)
class Totals:
    """What became of all samples offered so far."""

    added: int = 0  # offered
    evicted: int = 0
    refused: int = 0
    duplicates: int = 0  # near-duplicates found, let in or not
    merged: int = 0

    @property
    def inserted(self) -> int:
        return self.added - self.refused

    def count(self, offered: int, admission: Admission) -> None:
        """Add one batch of `offered` samples."""
        self.added += offered
        self.evicted += len(admission.evicted)
        self.refused += len(admission.refused)
        self.duplicates += len(admission.duplicates)
        self.merged += len(admission.merged)


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
