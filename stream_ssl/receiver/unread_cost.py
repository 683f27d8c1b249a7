"""The decode cost of the records that wait in the journal for the learner."""

from __future__ import annotations

from collections import deque

MARKS = 1000
"""About the number of marks when the extra cost has reached its limit."""


class UnreadCost:
    """The extra decode cost of the journal records that the learner has not read yet.

    Neighbouring records share a mark. Their cost counts until the last of them is read. After the
    receiver restarts, the records already in the journal have no extra cost.

    Attributes:
        waiting: the extra cost of all unread records.
        most: the extra cost above which the receiver accepts no expensive packet. A mark covers at
            most a thousandth of `most`, so that there are about a thousand marks.
    """

    def __init__(self) -> None:
        self.waiting = self.most = 0
        self._marks: deque[tuple[int, int]] = deque()  # (last record of the mark, cost)

    def add(self, last: int, cost: int) -> None:
        """Add the extra cost of new records; `last` is the position of the last of them."""
        if not cost:
            return
        self.waiting += cost
        if self._marks and self._marks[-1][1] + cost <= self.most // MARKS:
            cost += self._marks.pop()[1]
        self._marks.append((last, cost))

    def read(self, position: int) -> None:
        """Remove the cost of the records before `position`, which the learner has read."""
        while self._marks and self._marks[0][0] < position:
            self.waiting -= self._marks.popleft()[1]
