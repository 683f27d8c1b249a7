"""When each slot of a full memory was born, and which is the oldest.

Shapes: B newcomers, K slots of all ranks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from memory.columns import REFUSED, Columns
from memory.compute import to_host

Slots = NDArray[np.int64]


class Ages:
    """When each slot of a full memory was born, and which is the oldest; alike on all ranks.

    Slots sorted by birth stay so while newcomers, always younger than all, take slots out of the
    order: so one sort serves until all that it sorted have left.
    """

    def __init__(self, columns: Columns) -> None:
        (born_K,) = columns.group.all_gather(columns.born)
        of_rank_WK = to_host(born_K).view(columns.group.size, -1)  # slot j of all lies on j mod W
        self.born_K: Slots = of_rank_WK.T.flatten().numpy().copy()
        self._order: list[tuple[int, int]] = []  # slot and birth, the oldest last

    def take(self, slots: Slots, born_B: Slots) -> None:
        """Record that newcomers took these slots in turn; -1 stands for a refusal."""
        joins = slots != REFUSED
        self.born_K[slots[joins]] = born_B[joins]

    def oldest(self, open_K: NDArray[np.bool_] | None = None) -> int:
        """Return the oldest of the open slots. None opens all of them."""
        if open_K is not None and not open_K.all():
            open_n = np.flatnonzero(open_K)
            return int(open_n[self.born_K[open_n].argmin()])
        while True:
            while self._order:
                slot, born = self._order[-1]
                if self.born_K[slot] == born:
                    return slot
                self._order.pop()
            slots = np.argsort(-self.born_K)
            self._order = list(zip(slots.tolist(), self.born_K[slots].tolist(), strict=True))
