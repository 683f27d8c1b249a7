"""The nearest neighbours of every slot, kept up while rows come and go.

A slot keeps a short list of neighbours and a floor: whoever is not in its list is no nearer than
that. A row that leaves is struck from no list: each entry carries the version of the slot it names,
and counts no more once that version has passed. So what a list says of its nearest is a bound from
above, and it is looked at only where the bound is the largest of all.

Shapes: D embedding, K slots, L entries of a list, N candidates, n slots written to.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

LIST = 16
"""L. A longer list is counted anew less often and costs more to keep: 12 L bytes a slot."""

AHEAD = 32
"""Lists counted anew at a time, where one must be: to read the column for one costs as much."""

Values = NDArray[Any]
Slots = NDArray[np.int64]


class Neighbours:
    """Lists of the nearest, and by them the slot that is nearest to another.

    Args:
        capacity: K.
        dtype: of the cosines. Those within 32 roundings of each other tie.
    """

    def __init__(self, capacity: int, dtype: np.dtype[Any]) -> None:
        self.cosine_KL = np.full((capacity, LIST), -np.inf, dtype)
        self.slot_KL = np.zeros((capacity, LIST), np.int32)
        self._written_KL = np.zeros((capacity, LIST), np.uint32)  # version of the slot named there
        self._version_K = np.zeros(capacity, np.uint32)
        self.floor_K = np.full(capacity, -np.inf, dtype)
        self.first_K = np.full(capacity, -np.inf, dtype)  # no less than the nearest cosine
        self.second_K = np.full(capacity, -np.inf, dtype)  # and the next-nearest
        self.tie = 32 * float(np.finfo(dtype).eps)

    def leave(self, slot_R: Slots) -> None:
        """The rows of these slots are gone; their lists are void until `begin`."""
        self._version_K[slot_R] += np.uint32(1)

    def evict(self, slot: int) -> None:
        """`leave` for one; and those it was near to, whose bounds it held up, are told."""
        listed_l = self.slot_KL[slot][self.cosine_KL[slot] > -np.inf]
        self._version_K[slot] += np.uint32(1)
        self.bound(listed_l)

    def begin(self, slot: int, other_N: Slots, cosine_N: Values, floor: float) -> None:
        """Make the list of a slot.

        Args:
            slot: whose row is new, or whose list is short.
            other_N: distinct slots, none of them `slot`.
            cosine_N: of its row with theirs.
            floor: no slot but these has a larger cosine with it.
        """
        above = cosine_N >= floor
        if not above.all():
            other_N, cosine_N = other_N[above], cosine_N[above]
        if len(cosine_N) > LIST:
            order = np.argsort(cosine_N)[::-1]
            floor = float(cosine_N[order[LIST]])
            other_N, cosine_N = other_N[order[:LIST]], cosine_N[order[:LIST]]
        count = len(cosine_N)
        self.cosine_KL[slot, :count] = cosine_N
        self.cosine_KL[slot, count:] = -np.inf
        self.slot_KL[slot, :count] = other_N
        self._written_KL[slot, :count] = self._version_K[other_N]
        self.floor_K[slot] = floor
        self.bound(np.array([slot]))

    def enter(self, slot: int, other_n: Slots, cosine_n: Values) -> None:
        """Put the new row of a slot into the lists of these others, distinct and none of them it.

        Args:
            slot: whose row is new, `leave` or `evict` having been called for the old one.
            other_n: slots; those whose floor is not below the cosine stay as they are.
            cosine_n: of the new row with theirs.
        """
        above = cosine_n > self.floor_K[other_n]
        other_n, cosine_n = other_n[above], cosine_n[above]
        if not len(other_n):
            return
        live_nL = self.live(other_n)
        place_n = live_nL.argmin(axis=1)
        least_n = live_nL[np.arange(len(other_n)), place_n]
        self.floor_K[other_n] = np.maximum(self.floor_K[other_n], np.minimum(least_n, cosine_n))
        joins = cosine_n > least_n
        other_j, place_j = other_n[joins], place_n[joins]
        self.cosine_KL[other_j, place_j] = cosine_n[joins]
        self.slot_KL[other_j, place_j] = slot
        self._written_KL[other_j, place_j] = self._version_K[slot]
        first_n = self.first_K[other_n]
        self.second_K[other_n] = np.maximum(self.second_K[other_n], np.minimum(first_n, cosine_n))
        self.first_K[other_n] = np.maximum(first_n, cosine_n)

    def live(self, slot_n: Slots) -> Values:
        """Cosines of these lists, -inf where an entry is void, in a new array [n, L]."""
        live_nL = self.cosine_KL[slot_n]
        live_nL[self._version_K[self.slot_KL[slot_n]] != self._written_KL[slot_n]] = -np.inf
        return live_nL

    def bound(self, slot_n: Slots) -> tuple[Values, Values]:
        """Take the bounds of these slots from their lists.

        Returns:
            bool [n] each: whether the nearest, and the next-nearest, are known and not only
            bounded. Where the floor is -inf there are none beside those listed.
        """
        live_nL = self.live(slot_n)
        live_nL.sort(axis=1)
        first_n, second_n, floor_n = live_nL[:, -1], live_nL[:, -2], self.floor_K[slot_n]
        self.first_K[slot_n] = np.maximum(first_n, floor_n)
        self.second_K[slot_n] = np.maximum(second_n, floor_n)
        return first_n >= floor_n, second_n >= floor_n

    def closest(self) -> tuple[int, list[int]]:
        """The slot nearest to another; of those that tie, the one with the nearest next-nearest;
        then the lowest.

        Returns:
            The slot and no others; or -1 and the slots whose lists are too short to tell.
        """
        while True:
            first_K = self.first_K
            most = int(first_K.argmax())
            tied_N = np.flatnonzero(first_K >= first_K[most] - self.tie)
            second_N = self.second_K[tied_N]
            best = int(second_N.argmax())
            chosen = int(tied_N[(second_N >= second_N[best] - self.tie).argmax()])
            ask = np.array([most, int(tied_N[best]), chosen])
            before = first_K[ask], self.second_K[ask]
            known_3, second_3 = self.bound(ask)
            if (self.first_K[ask] < before[0]).any() or (self.second_K[ask] < before[1]).any():
                continue  # a row had left that was counted; look again
            known_3[1:] &= second_3[1:]  # of the first, the nearest alone is what counts
            if known_3.all():
                return chosen, []
            return -1, self._and_those_next(ask[~known_3])

    def _and_those_next(self, short: Slots) -> list[int]:
        """These slots, and others of large bounds whose lists are too short as well."""
        count = min(2 * AHEAD, len(self.first_K))
        next_N = np.argpartition(self.first_K, len(self.first_K) - count)[-count:]
        first_N, second_N = self.bound(next_N)
        also = next_N[~(first_N & second_N)][:AHEAD]
        return sorted({*short.tolist(), *also.tolist()})

    def strike(self) -> None:
        """Empty the void entries, so that the lists mean the same without their versions."""
        step = 1 << 16
        for start in range(0, len(self.cosine_KL), step):
            slot_n = np.arange(start, min(start + step, len(self.cosine_KL)))
            self.cosine_KL[slot_n] = self.live(slot_n)
