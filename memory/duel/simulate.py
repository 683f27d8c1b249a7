"""DUEL's sequential rule among a few candidates: Algorithm 2, and Algorithm 1 with `compete`.

Shapes: c candidates, T newcomers, W = c + T columns: candidates, then newcomers in turn.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memory.columns import REFUSED


def simulate(count_c: Tensor, count_T: Tensor, h_WW: Any, compete: bool) -> tuple[Tensor, Tensor]:
    """Let newcomers in one by one, each evicting the largest count of its moment.

    Every step adds the row of who comes and subtracts the row of who leaves, so no row ever
    changes. On a GPU nothing is read by the host.

    Args:
        count_c: N(j) of the candidates (eq. 5), less any level that both counts share.
        count_T: sum of h of each newcomer with all slots, less the same level.
        h_WW: similarities of all columns, indexed by row: a tensor, or what makes rows when they
            are asked for. Its diagonal is 0: no sample is a duplicate of itself.
        compete: the newcomer joins first and may be the one that leaves, refused.

    Returns:
        int64 [T], the column that leaves at each step: a candidate, c + t of an earlier newcomer,
        or the newcomer's own. And its count at that moment [T].

    >>> h_WW = torch.tensor([[0.0, 1.0, 0.5], [1.0, 0.0, 0.2], [0.5, 0.2, 0.0]])
    >>> column, count = simulate(torch.tensor([1.0, 1.5]), torch.tensor([0.7]), h_WW, False)
    >>> column.tolist(), count.tolist()
    ([1], [1.5])
    """
    first, turns = len(count_c), len(count_T)
    count_W: Any = torch.cat([count_c, count_T])
    column_T: Any = torch.empty(turns, dtype=torch.int64, device=count_W.device)
    left_T: Any = torch.empty_like(count_T)
    on_host = count_W.device.type == "cpu"
    if on_host:  # numpy dispatches in a fifth of the time, on the same memory
        count_W, column_T, left_T = count_W.numpy(), column_T.numpy(), left_T.numpy()
        h_WW = h_WW.numpy() if isinstance(h_WW, Tensor) else h_WW
    for turn in range(turns):
        joins_W = h_WW[first + turn]
        if compete:
            count_W += joins_W
        leaves = count_W[: first + turn + compete].argmax()
        column_T[turn] = leaves
        if not on_host:
            leaves = leaves[None]  # the host would wait for a bare number
        left_T[turn : turn + 1] = count_W[leaves]
        count_W -= h_WW[leaves] if on_host else h_WW[leaves][0]
        if not compete:
            count_W += joins_W
        count_W[leaves] = -torch.inf
    return torch.as_tensor(column_T), torch.as_tensor(left_T)


def slots_taken(column: list[int], slot_c: list[int]) -> tuple[list[int], dict[int, int]]:
    """Where each newcomer goes, and who stands there in the end.

    Args:
        column: who leaves at each step, as `simulate` says.
        slot_c: the slots of the candidates.

    Returns:
        For each newcomer the slot that it takes, -1 where it is refused; and for each slot that
        changed hands the newcomer that has it, by its turn.

    >>> slots_taken([1, 2, 4], slot_c=[7, 9])
    ([9, 9, -1], {9: 1})
    """
    slots: list[int] = []
    for own, leaves in enumerate(column, len(slot_c)):
        if leaves == own:
            slots.append(REFUSED)
        else:
            slots.append(slot_c[leaves] if leaves < len(slot_c) else slots[leaves - len(slot_c)])
    return slots, {slot: turn for turn, slot in enumerate(slots) if slot != REFUSED}
