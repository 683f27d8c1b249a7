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


class Holder(Protocol):
    """What a grant is decided on: see Session."""

    credit: int
    since: float
    heard: float
    turns: int


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
        seats = min(self.total, room) // self.max_packet
        ranked = sorted(range(len(holders)), key=lambda i: self._rank(holders[i], now))
        seated = set(ranked[:seats])
        return [self.max_packet if i in seated else 0 for i in range(len(holders))]

    def _rank(self, holder: Holder, now: float) -> tuple[int, float, int]:
        """First those in the midst of their turn, then those who wait, then the rest."""
        if not holder.credit:
            # Many lose their turn at one moment; of these the least served comes first.
            return 1, holder.since, holder.turns
        held = now - holder.since
        quiet = holder.heard < holder.since and held >= QUIET_SECONDS
        return (2 if quiet or held >= TURN_SECONDS else 0), holder.since, holder.turns
