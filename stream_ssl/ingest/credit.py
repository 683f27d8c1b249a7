"""Credit: how many bytes each producer may have in flight.

What is in flight must fit into the receiver's memory and into the journal, so the grants together
never exceed either. Where that is too little for all at once, producers take turns; and where room
comes only as fast as a slow learner makes it, those that always have more to send are served the
same number of bytes, as by start-time fair queueing (Goyal et al. 1996).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

TURN_SECONDS = 0.25  # a turn of a producer that sends
QUIET_SECONDS = 0.05  # a turn of a producer that does not
DRAIN_SECONDS = 0.1  # without a message, after which an expired turn has nothing left in flight
IDLE_SECONDS = 0.5  # with credit and without a message, after which a producer wants no more
_PACKETS = 4  # least grant of a turn, in packets of the producer's largest size
_LEAST = 256 << 10  # bytes of a turn's credit, where a packet may have so many


class CreditHolder(Protocol):
    """What a grant is decided on; `sessions.Session` documents the fields."""

    credit: int
    credit_changed: float
    last_received: float
    revoked: int
    largest: int
    served: int
    greedy: bool


class CreditPolicy:
    """Shares a budget of bytes between producers.

    Args:
        each: most bytes for one producer.
        total: most bytes for all together.
        max_packet: bytes of the largest packet.

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

    def least(self, holder: CreditHolder) -> int:
        """Bytes below which a grant is of no use: a few packets like the largest that came, or one
        of any size where none did."""
        if not holder.largest:
            return self.max_packet
        return min(self.max_packet, max(_PACKETS * holder.largest, _LEAST))

    def share(self, count: int, room: int) -> int:
        """Bytes for each of `count` producers at once; 0: they must take turns, or wait."""
        if count < 1:
            return 0
        share = self._share(count, room)
        return share if share >= self.max_packet else 0

    def plan(
        self, holders: Sequence[CreditHolder], room: int, now: float, scarce: bool = False
    ) -> list[int]:
        """The grant of each holder: 0, or at least `least`.

        Args:
            room: bytes that journal and learner can take.
            now: of time.monotonic, as are `credit_changed` and `last_received`.
            scarce: room comes slower than producers could use it.
        """
        if not holders:
            return []
        least = [self.least(holder) for holder in holders]
        share = self._share(len(holders), room)
        if share >= max(least) and not scarce:
            return [share] * len(holders)
        in_flight = sum(h.revoked for h in holders if _drains(h, now))
        free = min(self.total, room) - in_flight
        ahead = self._ahead(holders, least) if scarce else set[int]()
        return _turns(holders, least, free, now, ahead)

    def _share(self, count: int, room: int) -> int:
        return min(self.each, min(self.total, room) // count)

    def _ahead(self, holders: Sequence[CreditHolder], least: Sequence[int]) -> set[int]:
        """The greedy holders that have had more than another greedy one, who now comes first."""
        floor = least_served(holders)
        return {i for i, h in enumerate(holders) if h.greedy and h.served > floor + least[i]}


def least_served(holders: Sequence[CreditHolder]) -> int:
    """Bytes of the greedy holder that has had the fewest; of the one with the most, where none is
    greedy."""
    greedy = [holder.served for holder in holders if holder.greedy]
    return min(greedy) if greedy else max((holder.served for holder in holders), default=0)


def _turns(
    holders: Sequence[CreditHolder], least: Sequence[int], free: int, now: float, ahead: set[int]
) -> list[int]:
    """Active turns go on, and as many expired ones end as holders wait for whom there is no room;
    the least served come first.

    What an expired turn leaves is given to nobody before it has drained, so that the new grants
    and what is in flight from earlier ones stay within the budget together.
    """
    order = sorted(
        range(len(holders)), key=lambda i: (holders[i].served, holders[i].credit_changed)
    )
    order = [i for i in order if i not in ahead]
    grants = [0] * len(holders)
    for i in order:
        if holders[i].credit and not _expired(holders[i], now) and least[i] <= free:
            grants[i], free = least[i], free - least[i]
    expired = []
    for i in order:
        if holders[i].credit and _expired(holders[i], now) and least[i] <= free:
            expired.append(i)
            free -= least[i]
    unserved = 0
    for i in order:
        if holders[i].credit:
            continue
        if unserved or least[i] > free:  # nor does a smaller one overtake
            unserved += least[i]
        else:
            grants[i], free = least[i], free - least[i]
    for i in reversed(expired):
        if unserved > 0:
            unserved -= least[i]
        else:
            grants[i] = least[i]
    return grants


def _expired(holder: CreditHolder, now: float) -> bool:
    age = now - holder.credit_changed
    quiet = holder.last_received < holder.credit_changed and age >= QUIET_SECONDS
    return quiet or age >= TURN_SECONDS


def _drains(holder: CreditHolder, now: float) -> bool:
    last_activity = max(holder.last_received, holder.credit_changed)
    return not holder.credit and now - last_activity < DRAIN_SECONDS
