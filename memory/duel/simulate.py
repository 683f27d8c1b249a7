"""DUEL's sequential rule among a few candidates: Algorithm 2, or Algorithm 1 with `compete`.

Shapes: c candidates, T newcomers, W = c + T columns: the candidates, then the newcomers in turn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from stream_ssl.memory.columns import REFUSED
from stream_ssl.memory.compute import all_to_host, to_host

if TYPE_CHECKING:
    from stream_ssl.memory.shares import Gate


class Draws:
    """The slots that newcomers take in turn while no count is large.

    Args:
        at_least: the least count that is large, minus the same level as the counts.
        slot_T: the slot that each newcomer draws. Under shares this holds only while every earlier
            newcomer of the proposal drew too; after that `tries_TR` decides.
        slot_c: the slots of the candidates, which include all of `slot_T`.
        tries_TR: the slots that each newcomer tries under shares; it takes the first open one.

    >>> draws = Draws(1.0, [7, 9, 7], [9, 7])
    >>> draws.column(None)  # slot 7 is that of candidate 1
    1
    >>> draws.leaves(1, False), draws.leaves(2, True)  # a count evicts the newcomer from slot 7
    (None, None)
    >>> draws.column(None)  # slot 7 now holds the second newcomer
    3
    """

    def __init__(
        self,
        at_least: float,
        slot_T: list[int],
        slot_c: list[int],
        tries_TR: list[list[int]] | None = None,
    ) -> None:
        self.at_least, self._slot_T, self._tries_TR = at_least, slot_T, tries_TR
        self._turn, self._counted = 0, False  # whether a count decided an earlier step
        self._slot_W = [*slot_c]  # the slot of each column
        self._stands = {slot: column for column, slot in enumerate(slot_c)}

    def column(self, gate: Gate | None) -> int | None:
        """Return the column in the slot that the next newcomer draws; None if it is unknown."""
        stands = self._stands
        if gate is None or self._tries_TR is None or not self._counted:
            return stands[self._slot_T[self._turn]]
        tried_R = self._tries_TR[self._turn]
        found = (slot for slot in tried_R if gate.may_take(slot, stands.get(slot)))
        return stands.get(next(found, REFUSED))

    def leaves(self, column: int, counted: bool) -> None:
        """Record that this column leaves at the next step, and whether its count decided."""
        slot = self._slot_W[column]
        self._stands[slot] = len(self._slot_W)
        self._slot_W.append(slot)
        self._turn, self._counted = self._turn + 1, self._counted or counted


def simulate(
    count_c: Tensor,
    count_T: Tensor,
    h_WW: Tensor,
    compete: bool,
    gate: Gate | None = None,
    draws: Draws | None = None,
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
        draws: the slots that newcomers take while no count is large. None always evicts the
            largest count.

    Returns:
        On the CPU, the column that leaves at each step, int64 [T]: a candidate, c + t for an
        earlier newcomer t, or the newcomer itself. And the largest count at each step, [T]. With a
        gate, both end before the first step that may evict none of the columns, or whose drawn slot
        is no candidate's.

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
    for turn in range(turns):
        joins_W = row_WW[first + turn]
        if compete:
            count_W += joins_W
        leaves: int | None = int(count_W[: first + turn + compete].argmax())
        most = float(count_W[leaves])
        if gate is not None:
            shut_W = gate.shut(first + turn + compete)
            if shut_W[leaves]:
                open_W = np.where(shut_W, -np.inf, count_W[: len(shut_W)])
                leaves, most = int(open_W.argmax()), float(open_W.max())
                leaves = leaves if most > -np.inf else None  # no open sample is left
        if draws is not None and most < draws.at_least:
            leaves = draws.column(gate)
        if leaves is None:
            column_T, left_T = column_T[:turn], left_T[:turn]
            break
        column_T[turn], left_T[turn] = leaves, most
        if draws is not None:
            draws.leaves(leaves, counted=most >= draws.at_least)
        if gate is not None:
            gate.leaves(leaves)
        count_W -= row_WW[leaves]
        if not compete:
            count_W += joins_W
        count_W[leaves] = -np.inf
    return torch.from_numpy(column_T), torch.from_numpy(left_T)


class AcceptedSteps(NamedTuple):
    """The accepted steps of a proposal, on the CPU."""

    held: int  # number of accepted steps
    plan: Tensor  # int64 [held], the slot that each newcomer takes; -1: refused
    stands_2R: Tensor  # int64, candidates whose slot was taken, and the last newcomer to take it
    also: list[int]  # the other values passed to kept_steps


def kept_steps(column_T: Tensor, doubt_T: Tensor, slot_c: Tensor, *also: Tensor) -> AcceptedSteps:
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
    (held,), slots, *others = (one.tolist() for one in all_to_host(held_1, slot_c, *also))
    values = [value for other in others for value in other]
    place: list[int] = []  # candidate whose slot each newcomer takes
    for own, leaves in enumerate(column_T[:held].tolist(), first):
        refused = leaves == own
        place.append(REFUSED if refused else leaves if leaves < first else place[leaves - first])
    plan = torch.tensor([c if c == REFUSED else slots[c] for c in place], dtype=torch.int64)
    stands = {c: turn for turn, c in enumerate(place) if c != REFUSED}
    stands_R2 = torch.tensor(list(stands.items()), dtype=torch.int64).view(-1, 2)
    return AcceptedSteps(held, plan, stands_R2.T, values)
