"""DUEL's sequential rule among a few candidates: Algorithm 2, or Algorithm 1 with `compete`.

Shapes: c candidates, T newcomers, W = c + T columns: the candidates, then the newcomers in turn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from stream_ssl.memory.columns import REFUSED
from stream_ssl.memory.compute import to_host

if TYPE_CHECKING:
    from stream_ssl.memory.shares import Gate


def simulate(
    count_c: Tensor,
    count_T: Tensor,
    h_WW: Tensor,
    compete: bool,
    gate: Gate | None = None,
    leaves_T: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Admit newcomers one by one. Each evicts the column with the largest current count.

    Every step adds the similarities of the newcomer and subtracts those of the column that leaves,
    so `h_WW` never changes. All steps run on the host, which waits for a GPU once: a step takes
    some microseconds there, and on a GPU as long as the launch of ten kernels.

    Args:
        count_c: N(j) of the candidates (DUEL, eq. 5), minus any level.
        count_T: the sum of h of each newcomer with all slots, minus the same level.
        h_WW: similarities of all columns. Its diagonal is 0, because no sample is a duplicate of
            itself.
        compete: the newcomer joins first and may itself be the one that leaves, which refuses it.
        gate: the columns that shares allow at each step. None allows all.
        leaves_T: int64 on the CPU, the columns that leave regardless of their counts. None evicts
            the largest counts.

    Returns:
        On the CPU, the column that leaves at each step, int64 [T]: a candidate, c + t for an
        earlier newcomer t, or the newcomer itself. And the largest count at each step, [T]. With a
        gate, both end before the first step that may evict none of the columns.

    >>> h_WW = torch.tensor([[0.0, 1.0, 0.5], [1.0, 0.0, 0.2], [0.5, 0.2, 0.0]])
    >>> column, count = simulate(torch.tensor([1.0, 1.5]), torch.tensor([0.7]), h_WW, False)
    >>> column.tolist(), count.tolist()
    ([1], [1.5])
    """
    first, turns = len(count_c), len(count_T)
    known_XW = torch.cat([count_c, count_T])[None]
    if h_WW.device.type != "cpu":
        known_XW = to_host(torch.cat([known_XW, h_WW]))  # one wait for both
        h_WW = known_XW[1:]
    count_W, row_WW = known_XW[0].numpy(), h_WW.numpy()
    column_T, left_T = np.empty(turns, np.int64), np.empty(turns, count_W.dtype)
    taken_T = None if leaves_T is None else leaves_T.numpy()
    for turn in range(turns):
        joins_W = row_WW[first + turn]
        if compete:
            count_W += joins_W
        leaves = count_W[: first + turn + compete].argmax()
        left_T[turn] = count_W[leaves]
        if gate is not None:
            shut_W = gate.shut(first + turn + compete)
            if shut_W[leaves]:
                leaves = np.where(shut_W, -np.inf, count_W[: len(shut_W)]).argmax()
                left_T[turn] = -np.inf if shut_W[leaves] else count_W[leaves]
            if shut_W[leaves] and taken_T is None:
                column_T, left_T = column_T[:turn], left_T[:turn]
                break
        if taken_T is not None:
            leaves = taken_T[turn]
        if gate is not None:
            gate.leaves(int(leaves))
        column_T[turn] = leaves
        count_W -= row_WW[leaves]
        if not compete:
            count_W += joins_W
        count_W[leaves] = -np.inf
    return torch.from_numpy(column_T), torch.from_numpy(left_T)


def occupants(slot_T: Tensor, slot_c: Tensor) -> Tensor:
    """Return the column that occupies each of these slots when its newcomer arrives, on the CPU.

    Args:
        slot_T: the slots that newcomers take in turn.
        slot_c: the slots of the candidates, which include all slots of `slot_T`.

    >>> occupants(torch.tensor([7, 9, 7]), torch.tensor([9, 7])).tolist()
    [1, 0, 2]
    """
    slots = to_host(slot_c).tolist()
    stands = {slot: column for column, slot in enumerate(slots)}
    columns = []
    for newcomer, slot in enumerate(slot_T.tolist(), len(slots)):
        columns.append(stands[slot])
        stands[slot] = newcomer
    return torch.tensor(columns)


class Kept(NamedTuple):
    """The accepted steps of a proposal, on the CPU."""

    held: int  # number of accepted steps
    plan: Tensor  # int64 [held], the slot that each newcomer takes; -1: refused
    stands_2R: Tensor  # int64, candidates whose slot was taken, and the last newcomer to take it
    also: list[int]  # the other values passed to kept_steps


def kept_steps(column_T: Tensor, doubt_T: Tensor, slot_c: Tensor, *also: Tensor) -> Kept:
    """Return the steps before the first step in doubt. The host waits for the device once here.

    Args:
        column_T: the column that leaves at each step, on the CPU, from `simulate`.
        doubt_T: bool, whether a different slot may have left.
        slot_c: the slots of the candidates.
        also: other int64 values to copy to the host in the same transfer.

    >>> kept = kept_steps(torch.tensor([1, 2, 4]), torch.zeros(3).bool(), torch.tensor([7, 9]))
    >>> kept.plan.tolist(), kept.stands_2R.T.tolist()
    ([9, 9, -1], [[1, 1]])
    """
    turns, first = len(column_T), len(slot_c)
    held_1 = torch.where(doubt_T.any(), doubt_T.long().argmax(), turns)[None]
    known = to_host(torch.cat([held_1, slot_c, *also])).tolist()
    held, slots, told = known[0], known[1:][:first], known[1 + first :]
    place: list[int] = []  # candidate whose slot each newcomer takes
    for own, leaves in enumerate(column_T[:held].tolist(), first):
        refused = leaves == own
        place.append(REFUSED if refused else leaves if leaves < first else place[leaves - first])
    plan = torch.tensor([c if c == REFUSED else slots[c] for c in place], dtype=torch.int64)
    stands = {c: turn for turn, c in enumerate(place) if c != REFUSED}
    stands_R2 = torch.tensor(list(stands.items()), dtype=torch.int64).view(-1, 2)
    return Kept(held, plan, stands_R2.T, told)
