"""The admission of a batch: the near-duplicate test, then the policy, then the columns.

Shapes: B newcomers, b newcomers that the test admitted, E evictions, K slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stream_ssl.memory.columns import REFUSED, Columns, Rows
from stream_ssl.memory.compute import to_device, to_host
from stream_ssl.memory.duplicates import NOBODY, Found
from stream_ssl.memory.shares import Turns

if TYPE_CHECKING:
    from stream_ssl.memory.eviction.base import Policy
    from stream_ssl.memory.shares import Holdings

Numbers = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Admission:
    """The outcome of one `add`, on the CPU.

    On several ranks it covers one rank: slots, refused, inserted and duplicates describe the rank's
    own newcomers, and evicted, ages and left describe its shard. The numbers of all ranks therefore
    add up. Slots are numbered within the shard, and -1 also means a slot of another shard.

    Attributes:
        slots: int64 [B], the slot of each newcomer after the batch; -1 if the newcomer was refused
            or evicted again by a later newcomer of the batch.
        evicted: int64, the evicted ids in order of eviction.
        ages: int64, for each evicted id, the number of samples offered between its arrival and its
            eviction.
        refused: int64, the ids of newcomers that never joined, in order of arrival.
        inserted: the number of newcomers that joined, including those evicted again.
        duplicates: int64, the ids of near-duplicates among the newcomers, whether admitted or not.
        merged: int64, for each merged newcomer, the slot into which it was merged; -1 if that
            sample left during the batch.
        left: int64, for each evicted id, the slot that it left.
        collisions: float64 [B] on the memory's device, `WorkingMemory.collisions` of the rank's own
            newcomers before any of them joined; None if `add` was not asked to measure them.
    """

    slots: Tensor
    evicted: Tensor
    ages: Tensor
    refused: Tensor
    inserted: int
    duplicates: Tensor
    merged: Tensor
    left: Tensor
    collisions: Tensor | None = None


@dataclass(slots=True)
class Totals:
    """The counts of all samples offered so far, by outcome."""

    added: int = 0  # offered
    evicted: int = 0
    refused: int = 0
    duplicates: int = 0  # near-duplicates found, admitted or not
    merged: int = 0

    @property
    def inserted(self) -> int:
        return self.added - self.refused

    def count(self, admission: Admission) -> None:
        """Add the outcome of one batch."""
        self.added += len(admission.slots)
        self.evicted += len(admission.evicted)
        self.refused += len(admission.refused)
        self.duplicates += len(admission.duplicates)
        self.merged += len(admission.merged)


def check_plan(plan: Tensor, policy: Policy, newcomers: int, capacity: int) -> None:
    """Check the slots that a policy chose, before anything is written.

    Raises:
        ValueError: the slots break the rules of Policy.choose. The error names the policy.
    """
    if not isinstance(plan, Tensor) or plan.dtype != torch.int64 or plan.ndim != 1:
        found = f"{plan.dtype} {tuple(plan.shape)}" if isinstance(plan, Tensor) else repr(plan)
        raise ValueError(f"{policy.name} chose {found}: choose must give an int64 tensor [b]")
    if plan.device.type != "cpu":
        raise ValueError(f"{policy.name} chose slots on {plan.device}: give them on the CPU")
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


class Taken(NamedTuple):
    """The slots of one plan that were taken, in turn, over all ranks."""

    held_2b: Tensor  # ids and births of the samples that the slots held, on the device
    slot: Numbers
    turn: Numbers  # position of the newcomer in the batch
    previous: Numbers  # step at which the same slot was taken before; -1 if at none
    evicts: NDArray[np.bool_]  # whether a sample left


class Entry:
    """One batch on its way into the memory, and the outcome for each newcomer.

    Evictions follow the order of the policy's plan. A plan depends only on the rows, the batches
    and the policy's `state`. All of these are saved, so a restarted memory repeats the order.

    Args:
        rows: the newcomers [B].
        columns: the memory's columns, to which the newcomers are written.
        policy: the policy that chooses slots once every slot is occupied.
        found: the near-duplicates among the newcomers. None means that no test was made.
        holdings: the holdings of producers with shares, which are kept up to date. None means no
            shares.
        added: the number of samples offered to the memory before this batch.
    """

    def __init__(
        self,
        rows: Rows,
        columns: Columns,
        policy: Policy,
        found: Found | None,
        holdings: Holdings | None,
        added: int,
    ) -> None:
        self._rows, self._admitted, self._columns, self._policy = rows, rows, columns, policy
        self._holdings = holdings
        self._born_B = added + np.arange(len(rows))
        self._found = Found(0, np.zeros(len(rows), dtype=bool))
        if found is not None:
            self._found, self._admitted = found, found.enter(rows, columns)
        self._turn_b = np.flatnonzero(self._found.admitted_B)
        if holdings is not None:
            key_b = self._admitted.producers
            none_b = np.zeros(len(self._turn_b), dtype=np.int64)
            self._owner_b = holdings.owners(none_b if key_b is None else key_b.numpy())
        self._placed = 0  # newcomers written so far
        self._slot_B = np.full(len(rows), NOBODY)  # current slot of each newcomer, over all ranks
        self._joined_B = np.zeros(len(rows), dtype=bool)
        self._taken: list[Taken] = []
        self._outcome: tuple[Numbers, Numbers] | None = None  # see _known

    def run(self) -> None:
        """Fill the empty slots, then give the other newcomers the slots that the policy chooses.

        Raises:
            ValueError: the policy chose invalid slots.
        """
        columns, policy, rows = self._columns, self._policy, self._admitted
        held = columns.occupied_of_all
        free = min(len(rows), columns.capacity_of_all - held)
        if free:
            plan = torch.arange(held, held + free)
            if self._holdings is not None:
                self._holdings.fill(plan.numpy(), self._owner_b[:free])
            self._write(plan)
            columns.occupied_of_all = held + free
            came = rows[:free]
            if columns.group.size > 1:
                came = came[columns.group.mine(plan).nonzero()[:, 0]]
            policy.on_insert(came)
        while self._placed < len(self._turn_b):
            rows = self._admitted[self._placed :]
            plan = self._plan(rows)
            check_plan(plan, policy, len(rows), columns.capacity_of_all)
            if self._holdings is not None:
                owner_b = self._owner_b[self._placed :][: len(plan)]
                self._holdings.take(plan.numpy(), owner_b)
            self._write(plan)

    def _plan(self, rows: Rows) -> Tensor:
        """Ask the policy for slots, among the slots that shares allow."""
        if self._holdings is None:
            return self._policy.choose(rows)
        turns = Turns(self._holdings, self._owner_b[self._placed :])
        if turns.are_free():
            return self._policy.choose(rows)
        return self._policy.choose_shared(rows, turns)

    def _write(self, plan: Tensor) -> None:
        """Write the next newcomers, in turn, to the slots of the plan.

        Args:
            plan: int64 [b] on the CPU, numbered over all ranks; -1 for no slot. A slot may occur
                several times: then each newcomer evicts the one before it. An empty slot is filled
                without an eviction.
        """
        # numpy, because torch spends most of its time in dispatch at these sizes.
        columns, group = self._columns, self._columns.group
        first, self._placed = self._placed, self._placed + len(plan)
        joins = np.flatnonzero(plan.numpy() != REFUSED)
        slot, turn = plan.numpy()[joins], self._turn_b[first : self._placed][joins]
        # Sorted by slot and then by turn, each newcomer directly follows the one it evicts.
        order = np.argsort(slot, kind="stable")
        again = slot[order][1:] == slot[order][:-1]
        previous = np.full(len(turn), -1)
        previous[order[1:][again]] = order[:-1][again]
        last = np.ones(len(turn), dtype=bool)
        last[order[:-1][again]] = False

        held_2b = torch.stack(columns.standing(to_device(torch.from_numpy(slot), columns.device)))
        evicts = (previous >= 0) | (slot < columns.occupied_of_all)
        self._taken.append(Taken(held_2b, slot, turn, previous, evicts))

        mine = last & group.mine(slot)
        written = to_device(torch.from_numpy(group.own(slot[mine])), columns.device)
        columns.write(written, self._admitted[torch.from_numpy(first + joins[mine])])
        if first:  # newcomers of this batch have slots already
            self._slot_B[np.isin(self._slot_B, slot)] = NOBODY
        self._slot_B[turn[last]] = slot[last]
        self._joined_B[turn] = True

    def _known(self) -> tuple[Numbers, Numbers]:
        """Return the ids of the batch [B], and the id, age and slot of each eviction [3, E].

        The host waits for the device once, when this is first called after the last write.
        """
        if self._outcome is not None:
            return self._outcome
        held_R = [taken.held_2b.flatten() for taken in self._taken]
        read_R = to_host(torch.cat([self._rows.ids, *held_R])).numpy()
        ids_B, read_R = read_R[: len(self._rows)], read_R[len(self._rows) :]
        gone = [np.zeros((3, 0), dtype=np.int64)]
        for taken in self._taken:
            turn, previous = taken.turn, taken.previous
            held_2b, read_R = read_R[: 2 * len(turn)].reshape(2, -1), read_R[2 * len(turn) :]
            old_ids, old_born = held_2b
            if (again := previous >= 0).any():  # these evict a newcomer of this batch
                old_ids = np.where(again, ids_B[turn[previous]], old_ids)
                old_born = np.where(again, self._born_B[turn[previous]], old_born)
            gone_3b = np.stack([old_ids, self._born_B[turn] - old_born, taken.slot])
            gone.append(gone_3b[:, taken.evicts])
        self._outcome = ids_B, np.concatenate(gone, axis=1)
        return self._outcome

    def admission(self, batch: slice | None = None) -> Admission:
        """Return the outcome of the batch. If the policy failed midway, the rest counts as refused.

        Args:
            batch: the positions of this rank's newcomers; the outcome then covers this rank only.
                None returns the outcome for all ranks, with slots numbered over all ranks.
        """
        part, group, found = batch or slice(None), self._columns.group, self._found
        ids_B, gone_3E = self._known()
        ids_B, joined_B, slot_B = ids_B[part], self._joined_B[part], self._slot_B[part]
        if batch is not None:
            slot_B = np.where((slot_B >= 0) & group.mine(slot_B), group.own(slot_B), NOBODY)
            gone_3E = gone_3E[:, group.mine(gone_3E[2])]
            gone_3E[2] = group.own(gone_3E[2])
        evicted, ages, left = torch.from_numpy(gone_3E)
        return Admission(
            slots=torch.from_numpy(slot_B.copy()),
            evicted=evicted,
            ages=ages,
            refused=torch.from_numpy(ids_B[~joined_B]),
            inserted=int(joined_B.sum()),
            duplicates=torch.from_numpy(ids_B[found.duplicate_B[part]]),
            merged=torch.from_numpy(found.merged(self._slot_B)),
            left=left,
        )
