"""Eviction from the closest pair of the memory: MinRed.

Shapes: A descriptor, K slots, k occupied slots, L entries of a list, R slots whose rows are new, T
newcomers of a block, P = K + T points, n lists to extend, N cosines for each of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stream_ssl.memory.columns import Columns, Rows
from stream_ssl.memory.compute import to_host
from stream_ssl.memory.eviction.base import Policy
from stream_ssl.memory.shares import SlotWalk, Turns

LIST = 16
"""L, the entries of a list.

A longer list is rebuilt less often, but takes 8 L bytes a slot in float32.
"""

AHEAD = 32
"""The largest number of lists to rebuild at a time.

One list costs nearly as much as all of them, because the whole column is read.
"""

NEWCOMERS = 64
"""The largest number of rows whose cosines with all others are held at a time."""

BLOCK_ELEMENTS = 1 << 24
"""The largest number of cosines held at a time."""

Values = NDArray[Any]
Slots = NDArray[np.int64]


class MinimumRedundancy(Policy):
    """For each newcomer in turn, evict one of the two most similar samples of the memory.

    MinRed (Purushwalkam et al. 2022, The Challenges of Continuous Self-Supervised Learning, section
    4.2), applied to one newcomer at a time. The policy searches the memory without the newcomer for
    the closest pair. The sample of the pair whose next-nearest neighbour is closer leaves, and the
    newcomer takes its slot. A newcomer is never refused. Cosines that differ only by rounding tie.
    If several pairs are closest, the rule applies to all their slots.

    The choice is exact for any batch size. The cost is O(K A) a newcomer, in one matrix product a
    block, and O(K^2 A) once when the memory fills. The policy holds O(K) values.

    >>> from stream_ssl.memory import WorkingMemory
    >>> memory = WorkingMemory(capacity=3, dim=2, eviction=MinimumRedundancy())
    >>> z = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0], [-1.0, 0.0]])
    >>> memory.add(torch.arange(4), z).evicted.tolist()
    [1]
    """

    name = "minimum-redundancy"

    def bind(self, columns: Columns, seed: int) -> None:
        super().bind(columns, seed)
        self._count_again()

    def _count_again(self) -> None:
        self._lists = NeighbourLists(self.columns)
        self._lists.insert(torch.arange(self.columns.occupied))

    def on_insert(self, rows: Rows) -> None:
        occupied = self.columns.occupied
        self._lists.insert(torch.arange(occupied - len(rows), occupied))

    def on_update(self, slots: Tensor, before_RA: Tensor) -> None:
        del before_RA
        self._lists.insert(to_host(slots))

    def choose(self, rows: Rows) -> Tensor:
        return self._choose(rows, None)

    def choose_shared(self, rows: Rows, turns: Turns) -> Tensor:
        """Choose among the open slots only. Neighbours are still counted over all slots."""
        return self._choose(rows, SlotWalk(turns))

    def _choose(self, rows: Rows, walk: SlotWalk | None) -> Tensor:
        capacity = self.columns.capacity
        if capacity == 1:
            return torch.zeros(len(rows), dtype=torch.int64)
        x_TA = rows.descriptors[: rows_at_a_time(capacity)]
        block = NewcomerBlock(self._lists, self.columns.descriptors, x_TA)
        for _ in range(len(x_TA)):
            block.place(walk)
        self._lists.insert_block(*block.outcome())
        return torch.tensor(block.plan)

    def state(self) -> dict[str, Tensor]:
        lists, k = self._lists, self.columns.occupied
        arrays = {"cosines": lists.cosine_LK, "slots": lists.slot_LK, "floors": lists.floor_K}
        return {name: torch.from_numpy(each.T[:k].copy()) for name, each in arrays.items()}

    def load(self, state: dict[str, Tensor]) -> None:
        if state["cosines"].dtype != self.columns.descriptors.dtype:
            self._count_again()  # the lists were made from narrower rows
            return
        self._lists, k = NeighbourLists(self.columns), self.columns.occupied
        self._lists.cosine_LK[:, :k] = to_host(state["cosines"]).numpy().T
        self._lists.slot_LK[:, :k] = to_host(state["slots"]).numpy().T
        self._lists.floor_K[:k] = to_host(state["floors"]).numpy()

    def check(self) -> tuple[bool, str]:
        """Check every list and every floor. The cost is O(K^2 A)."""
        return self._lists.check()


class NeighbourLists:
    """The up to L nearest neighbours of every slot, with an upper bound for all others.

    The upper bound of a slot is its floor: no unlisted slot has a larger cosine. A row that leaves
    is removed from all lists, so lists become shorter. A list with fewer than two entries at or
    above its floor no longer determines the nearest neighbours. It is rebuilt when it is needed.
    """

    def __init__(self, columns: Columns) -> None:
        dtype = torch.empty(0, dtype=columns.descriptors.dtype).numpy().dtype
        self._columns = columns
        self.cosine_LK = np.full((LIST, columns.capacity), -np.inf, dtype)  # -inf: no entry
        self.slot_LK = np.zeros((LIST, columns.capacity), np.int32)
        self.floor_K = np.full(columns.capacity, -np.inf, dtype)

    def insert(self, slots: Tensor) -> None:
        """Update the lists after the rows of these distinct slots changed; int64 [R] on the CPU."""
        row_kA = self._columns.descriptor_kA
        new_K = self._invalidate(slots)
        step = rows_at_a_time(len(row_kA))
        for start in range(0, len(slots), step):
            slot_R = slots[start : start + step]
            cosine_Rk = row_kA[slot_R.to(row_kA.device)] @ row_kA.T
            exclude(cosine_Rk, slot_R)
            self._enter(slot_R, cosine_Rk, new_K)

    def insert_block(self, slots: Tensor, cosine_RK: Tensor) -> None:
        """Update the lists after a block, given the cosines of its rows with all rows.

        Args:
            slots: the changed slots, distinct, int64 [R].
            cosine_RK: their cosines with all rows; -inf for a row with itself.
        """
        self._enter(slots, cosine_RK, self._invalidate(slots))

    def _invalidate(self, slots: Tensor) -> NDArray[np.bool_]:
        """Remove the old rows of these slots from all lists.

        Return bool [K], True for these slots.
        """
        new_K = np.zeros(self._columns.capacity, bool)
        new_K[slots.numpy()] = True
        self.cosine_LK[new_K[self.slot_LK]] = -np.inf
        return new_K

    def _enter(self, slot_R: Tensor, cosine_Rk: Tensor, new_K: NDArray[np.bool_]) -> None:
        """Build the lists of these slots, and add the slots to the lists of unchanged slots."""
        most_k = to_host(cosine_Rk.amax(dim=0)).numpy()
        k = len(most_k)
        near_n = np.flatnonzero((most_k > self.floor_K[:k]) & ~new_K[:k])
        listed_nL = torch.from_numpy(self.cosine_LK[:, near_n].T).to(cosine_Rk.device)
        cosine_nN = torch.cat([listed_nL, cosine_Rk[:, torch.from_numpy(near_n)].T], dim=1)
        slot_nR = np.broadcast_to(slot_R.numpy(), (len(near_n), len(slot_R)))
        floor_n = self.floor_K[near_n]
        self.write(near_n, cosine_nN, np.hstack([self.slot_LK[:, near_n].T, slot_nR]))
        self.floor_K[near_n] = np.maximum(self.floor_K[near_n], floor_n)
        self.write(slot_R.numpy(), cosine_Rk)

    def write(self, slots: Slots, cosine_nN: Tensor, other_nN: Slots | None = None) -> None:
        """Build the lists of these slots. The floor becomes the largest cosine that is left out.

        Args:
            slots: the slots [n].
            cosine_nN: their cosines with the slots `other_nN`.
            other_nN: the other slots. None means the slots 0 to N - 1.
        """
        top = torch.topk(cosine_nN, min(LIST + 1, cosine_nN.shape[1]), dim=1)
        cosine_nM, other_nM = to_host(top.values).numpy(), to_host(top.indices).numpy()
        if other_nN is not None:
            other_nM = np.take_along_axis(other_nN, other_nM, axis=1)
        listed = min(LIST, cosine_nM.shape[1])
        self.cosine_LK[:, slots] = -np.inf
        self.cosine_LK[:listed, slots] = cosine_nM[:, :listed].T
        self.slot_LK[:listed, slots] = other_nM[:, :listed].T
        self.floor_K[slots] = cosine_nM[:, LIST] if cosine_nM.shape[1] > LIST else -np.inf

    def bounds(self) -> tuple[Values, Values, NDArray[np.bool_]]:
        """Return bounds of the nearest and next-nearest cosines [K], and whether both are exact.

        The bounds are upper bounds. The last result is bool [K].
        """
        first_K = np.full_like(self.floor_K, -np.inf)
        second_K = first_K.copy()
        for cosine_K in self.cosine_LK:
            second_K = np.maximum(second_K, np.minimum(first_K, cosine_K))
            first_K = np.maximum(first_K, cosine_K)
        exact_K = second_K >= self.floor_K
        return np.maximum(first_K, self.floor_K), np.maximum(second_K, self.floor_K), exact_K

    def check(self) -> tuple[bool, str]:
        """Check every list and every floor. The cost is O(K^2 A)."""
        row_kA, k = self._columns.descriptor_kA, self._columns.occupied
        unit = 1e-12 if row_kA.dtype == torch.float64 else 1e-5
        step = rows_at_a_time(k)
        for start in range(0, k, step):
            here = slice(start, min(start + step, k))
            cosine_Rk = row_kA[here] @ row_kA.T
            exclude(cosine_Rk, torch.arange(start, here.stop))
            cosine_kR = to_host(cosine_Rk).numpy().T
            entry, turn = np.nonzero(self.cosine_LK[:, here] > -np.inf)
            other = self.slot_LK[entry, start + turn]
            listed = self.cosine_LK[entry, start + turn]
            wrong = ~(np.abs(cosine_kR[other, turn] - listed) <= unit)
            if wrong.any():
                slot, its = start + turn[wrong.argmax()], other[wrong.argmax()]
                return False, f"slot {slot}: its cosine with slot {its} is not as listed"
            cosine_kR[other, turn] = -np.inf
            missing_R = cosine_kR.max(axis=0) > self.floor_K[here] + unit
            if missing_R.any():
                slot = start + int(missing_R.argmax())
                return False, f"slot {slot}: a neighbour is missing from its list"
        return True, ""


class NewcomerBlock:
    """A block of newcomers that take slots in turn, while columns and lists do not change.

    Points are rows: points 0 to K - 1 are the rows of the slots, and point K + t is newcomer t.

    Args:
        lists: the lists of the memory before the block. Lists that are too short are rebuilt here.
        row_KA: the rows of that memory, K >= 2.
        x_TA: the newcomers.
    """

    def __init__(self, lists: NeighbourLists, row_KA: Tensor, x_TA: Tensor) -> None:
        self._lists, self._row_KA, self._capacity = lists, row_KA, len(row_KA)
        among_TT = x_TA @ x_TA.T
        exclude(among_TT, torch.arange(len(x_TA)))
        self._cosine_TP = torch.cat([x_TA @ row_KA.T, among_TT], dim=1)
        self._host_TP = to_host(self._cosine_TP).numpy()
        points = self._host_TP.shape[1]
        self._present_P = np.arange(points) < self._capacity  # not evicted, and already arrived
        # Upper bounds of the cosines with the nearest and the next-nearest. A point that is not
        # present has -inf and inf, so that it is neither chosen nor updated.
        self._first_P = np.full(points, -np.inf, self._host_TP.dtype)
        self._second_P = np.full(points, np.inf, self._host_TP.dtype)
        self._exact_P = np.ones(points, bool)  # whether the list gave both exactly
        slots = slice(0, self._capacity)
        self._first_P[slots], self._second_P[slots], self._exact_P[slots] = lists.bounds()
        self._tie = 32 * float(np.finfo(self._first_P.dtype).eps)
        self._slot_P = np.arange(points)
        self.plan: list[int] = []

    def place(self, walk: SlotWalk | None = None) -> None:
        """Give the next newcomer a slot of the closest pair among the slots that it may take."""
        shut_P = None
        if walk is not None:
            shut_P = ~walk.open()[np.minimum(self._slot_P, self._capacity - 1)]
        gone, turn = self._closest(shut_P), len(self.plan)
        if walk is not None:
            walk.take(int(self._slot_P[gone]))
        self._present_P[gone], self._first_P[gone], self._second_P[gone] = False, -np.inf, np.inf
        cosine_P = self._host_TP[turn]
        near_n = np.flatnonzero(cosine_P > self._second_P)
        first_n, cosine_n = self._first_P[near_n], cosine_P[near_n]
        self._first_P[near_n] = np.maximum(first_n, cosine_n)
        self._second_P[near_n] = np.minimum(first_n, cosine_n)
        point = self._capacity + turn
        self._present_P[point], self._slot_P[point] = True, self._slot_P[gone]
        self._look(point)
        self.plan.append(int(self._slot_P[point]))

    def outcome(self) -> tuple[Tensor, Tensor]:
        """Return the overwritten slots [R], and the cosines of their rows with all rows [R, K]."""
        stay_R = np.flatnonzero(self._present_P[self._capacity :])
        slot_R = torch.from_numpy(self._slot_P[self._capacity + stay_R])
        row_RP = self._cosine_TP[torch.from_numpy(stay_R)]
        cosine_RK = row_RP[:, : self._capacity]
        cosine_RK[:, slot_R] = row_RP[:, torch.from_numpy(self._capacity + stay_R)]
        return slot_R, cosine_RK

    def _closest(self, shut_P: NDArray[np.bool_] | None) -> int:
        """Return the point of the closest pair whose second neighbour is nearer.

        The points in `shut_P` may not be chosen. None allows all points.
        """
        while True:
            first_P = self._first_P
            if shut_P is not None:
                first_P = np.where(shut_P, -np.inf, first_P)
            tied_n = np.flatnonzero(first_P >= first_P.max() - self._tie)
            second_n = self._second_P[tied_n]
            tied_n = tied_n[second_n >= second_n.max() - self._tie]
            point = int(tied_n[self._exact_P[tied_n].argmax()])  # prefers an exact one
            first, second = self._first_P[point], self._second_P[point]
            self._exact_P[point] = self._look(point)
            if self._first_P[point] < first or self._second_P[point] < second:
                continue  # a counted neighbour had left
            if self._exact_P[point]:
                return point
            self._list_again(point)

    def _look(self, point: int) -> bool:
        """Lower the bounds of a point as far as its list allows.

        Return whether they are exact now.
        """
        lists, slots, floor = self._lists, self._capacity, -np.inf
        if point < slots:
            listed_L = np.where(
                self._present_P[lists.slot_LK[:, point]], lists.cosine_LK[:, point], -np.inf
            )
            newer_T = np.where(self._present_P[slots:], self._host_TP[:, point], -np.inf)
            cosine_N, floor = np.concatenate([listed_L, newer_T]), lists.floor_K[point]
        else:
            cosine_N = np.where(self._present_P, self._host_TP[point - slots], -np.inf)
        nearest = int(cosine_N.argmax())
        first, cosine_N[nearest] = cosine_N[nearest], -np.inf
        second = cosine_N.max()
        self._first_P[point], self._second_P[point] = max(first, floor), max(second, floor)
        return bool(second >= floor)

    def _list_again(self, point: int) -> None:
        """Rebuild the list of a slot, and other short lists that have the largest bounds."""
        short_n = np.flatnonzero(
            ~self._exact_P[: self._capacity] & self._present_P[: self._capacity]
        )
        if len(short_n) > AHEAD:
            largest = np.argpartition(self._first_P[short_n], -AHEAD)[-AHEAD:]
            short_n = np.union1d(short_n[largest], point)
        slots = torch.from_numpy(short_n)
        cosine_nK = self._row_KA[slots.to(self._row_KA.device)] @ self._row_KA.T
        exclude(cosine_nK, slots)
        cosine_nK[:, torch.from_numpy(~self._present_P[: self._capacity])] = -torch.inf
        self._lists.write(short_n, cosine_nK)
        self._exact_P[short_n] = True


def rows_at_a_time(others: int) -> int:
    """Return how many rows' cosines with `others` other rows are held at a time."""
    return max(1, min(NEWCOMERS, BLOCK_ELEMENTS // max(1, others)))


def exclude(cosine_RK: Tensor, slot_R: Tensor) -> None:
    """Set the cosine of each row with itself to -inf, because a row is not its own neighbour."""
    device = cosine_RK.device
    cosine_RK.scatter_(1, slot_R.to(device)[:, None], -torch.inf)
