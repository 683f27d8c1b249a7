"""Credit: how many bytes each producer may have under way.

What is under way must fit into the receiver's memory and into the journal, so the grants together
never pass either. A grant is 0 or at least one full packet. When there are more producers than
packets that fit, they take turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

TURN_SECONDS = 0.25  # of a producer that sends
QUIET_SECONDS = 0.05  # after which a turn passes on from a producer that does not
DRAIN_SECONDS = 0.1  # of silence, after which nothing of a turn that ended is under way any more


class Holder(Protocol):
    """What a grant is decided on: see Session."""

    credit: int
    since: float
    heard: float
    turns: int
    revoked: int


class CreditPolicy:
    """Shares a budget of bytes among producers.

    Args:
        each: most bytes for one producer.
        total: most bytes for all together.
        max_packet: bytes of the largest packet, the least that is granted.

    Raises:
        ValueError: not 0 < max_packet <= each <= total.
    """

    def __init__(self, each: int, total: int, max_packet: int) -> None:
        if not 0 < max_packet <= each <= total:
            raise ValueError(
                f"credit: must hold 0 < max_packet ({max_packet}) <= credit of one producer "
                f"({each}) <= credit of all ({total})"
            )
        self.each = each
        self.total = total
        self.max_packet = max_packet

    def share(self, count: int, room: int) -> int:
        """Bytes for each of `count` producers at once; 0: they must take turns, or wait."""
        if count < 1:
            return 0
        share = min(self.each, min(self.total, room) // count)
        return share if share >= self.max_packet else 0

    def plan(self, holders: Sequence[Holder], room: int, now: float) -> list[int]:
        """The grant of each holder.

        Args:
            room: bytes that journal and learner can take.
            now: of time.monotonic, as are `since` and `heard`.
        """
        share = self.share(len(holders), room)
        if share or not holders:
            return [share] * len(holders)
        under_way = sum(h.revoked for h in holders if _drains(h, now))
        seats = max(0, min(self.total, room) - under_way) // self.max_packet
        seated = self._seat(holders, seats, now)
        return [self.max_packet if i in seated else 0 for i in range(len(holders))]

    def _seat(self, holders: Sequence[Holder], seats: int, now: float) -> set[int]:
        """Who has a turn: those in the midst of theirs; of the rest, as many leave as wait.

        What leaves is given on when it has drained, so that grants and what is under way of
        earlier ones together stay within the budget.
        """
        # Many lose their turn at one moment; of these the least served comes first.
        order = sorted(range(len(holders)), key=lambda i: (holders[i].since, holders[i].turns))
        waiting = [i for i in order if not holders[i].credit]
        over = [i for i in order if holders[i].credit and _is_over(holders[i], now)]
        midst = [i for i in order if holders[i].credit and not _is_over(holders[i], now)][:seats]
        free = max(0, seats - len(midst) - len(over))
        unserved = max(0, len(waiting) - free)
        stay = max(0, min(len(over) - unserved, seats - len(midst)))
        return {*midst, *waiting[:free], *over[len(over) - stay :]}


def _is_over(holder: Holder, now: float) -> bool:
    held = now - holder.since
    quiet = holder.heard < holder.since and held >= QUIET_SECONDS
    return quiet or held >= TURN_SECONDS


def _drains(holder: Holder, now: float) -> bool:
    return not holder.credit and now - max(holder.heard, holder.since) < DRAIN_SECONDS
