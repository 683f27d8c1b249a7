"""A batch on its way in: the test for near-duplicates, then the policy, then the columns.

Shapes: B newcomers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from memory.admission import REFUSED, Admission, carry_out
from memory.columns import Columns, Rows
from memory.duplicates import Duplicates
from memory.eviction.base import Policy


def offer(rows: Rows, columns: Columns, policy: Policy, duplicates: Duplicates | None) -> Admission:
    """Let a batch join, in order.

    Args:
        rows: the newcomers [B].
        columns: of the memory; what joins is written to them.
        policy: who makes room once every slot is occupied.
        duplicates: the test before that; None for none.
    """
    if duplicates is None:
        return _place(rows, columns, policy)[0]
    found = duplicates.find(rows.embeddings, columns.z_kD)
    admission, joined = _place(found.enter(rows, columns), columns, policy)
    return found.report(rows.ids, admission, joined)


def check_plan(plan: Tensor, policy: Policy, newcomers: int, capacity: int) -> None:
    """What a policy chose, before anything is written.

    Raises:
        ValueError: it is not what Policy.choose is to give; the error names the policy.
    """
    if not isinstance(plan, Tensor) or plan.dtype != torch.int64 or plan.ndim != 1:
        found = f"{plan.dtype} {tuple(plan.shape)}" if isinstance(plan, Tensor) else repr(plan)
        raise ValueError(f"{policy.name} chose {found}: choose must give an int64 tensor [b]")
    if not 1 <= len(plan) <= newcomers:
        raise ValueError(
            f"{policy.name} chose {len(plan)} slots for {newcomers} newcomers: choose must answer "
            "for at least the first, and for no more than there are"
        )
    least, most = int(plan.min()), int(plan.max())
    if least < REFUSED or most >= capacity:
        raise ValueError(
            f"{policy.name} chose slots from {least} to {most}: must lie in [0, {capacity}), or be "
            f"{REFUSED} to refuse"
        )


def _place(rows: Rows, columns: Columns, policy: Policy) -> tuple[Admission, Tensor]:
    """Fill empty slots, then ask the policy. Also bool [B]: who was not refused."""
    free = min(len(rows), columns.capacity - columns.occupied)
    plan = torch.arange(columns.occupied, columns.occupied + free)
    admission, plans = Admission.of_nobody(), [plan]
    if free:
        admission = carry_out(plan, rows[:free], columns)
        columns.occupied += free
        policy.joined(rows[:free])
    rows = rows[free:]
    while len(rows):
        plan = policy.choose(rows)
        check_plan(plan, policy, len(rows), columns.capacity)
        admission = admission.then(carry_out(plan, rows[: len(plan)], columns))
        plans.append(plan)
        rows = rows[len(plan) :]
    return admission, torch.cat(plans) != REFUSED
