"""Credit: how many bytes each producer may have in flight.

What is in flight must fit into the receiver's memory and into the journal, so the grants together
never exceed either. A grant is 0 or at least one full packet. When there are more producers than
packets that fit, producers take turns of one packet's credit each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

TURN_SECONDS = 0.25  # a turn of a producer that sends
QUIET_SECONDS = 0.05  # a turn of a producer that does not
DRAIN_SECONDS = 0.1  # without a message, after which an expired turn has nothing left in flight


class CreditHolder(Protocol):
    """What a grant is decided on; `protocol_state.Session` documents the fields."""

    credit: int
    credit_changed: float
    last_received: float
    turns: int
    revoked: int


class CreditPolicy:
    """Shares a budget of bytes between producers.

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

    def plan(self, holders: Sequence[CreditHolder], room: int, now: float) -> list[int]:
        """The grant of each holder.

        Args:
            room: bytes that journal and learner can take.
            now: of time.monotonic, as are `credit_changed` and `last_received`.
        """
        share = self.share(len(holders), room)
        if share or not holders:
            return [share] * len(holders)
        in_flight = sum(h.revoked for h in holders if _drains(h, now))
        slots = max(0, min(self.total, room) - in_flight) // self.max_packet
        chosen = self._choose(holders, slots, now)
        return [self.max_packet if i in chosen else 0 for i in range(len(holders))]

    def _choose(self, holders: Sequence[CreditHolder], slots: int, now: float) -> set[int]:
        """The holders that have a turn now: active turns go on, and as many expired ones end as
        holders wait for whom no slot is free.

        A slot that an expired turn leaves is given to nobody before it has drained, so that the new
        grants and what is in flight from earlier ones stay within the budget together.
        """
        # Many turns may end at one moment; of these holders the least served comes first.
        order = sorted(
            range(len(holders)), key=lambda i: (holders[i].credit_changed, holders[i].turns)
        )
        waiting = [i for i in order if not holders[i].credit]
        expired = [i for i in order if holders[i].credit and _expired(holders[i], now)]
        active = [i for i in order if holders[i].credit and not _expired(holders[i], now)][:slots]
        free = max(0, slots - len(active) - len(expired))
        unserved = max(0, len(waiting) - free)
        extended = max(0, min(len(expired) - unserved, slots - len(active)))
        return {*active, *waiting[:free], *expired[len(expired) - extended :]}


def _expired(holder: CreditHolder, now: float) -> bool:
    age = now - holder.credit_changed
    quiet = holder.last_received < holder.credit_changed and age >= QUIET_SECONDS
    return quiet or age >= TURN_SECONDS


def _drains(holder: CreditHolder, now: float) -> bool:
    last_activity = max(holder.last_received, holder.credit_changed)
    return not holder.credit and now - last_activity < DRAIN_SECONDS
