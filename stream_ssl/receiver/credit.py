"""The credit of the producers: how many bytes each may send before the next ACK."""

from __future__ import annotations

from collections.abc import Sequence

from stream_ssl.receiver.answers import Answers
from stream_ssl.receiver.group_commit import CommitBatch, GroupCommit
from stream_ssl.receiver.sessions import TURN_SECONDS, Session, Sessions
from stream_ssl.receiver.unread_cost import UnreadCost

QUIET_SECONDS = 0.05  # length of a turn of a producer that does not send
DRAIN_SECONDS = 0.1  # seconds without a message after which a revoked turn has drained
IDLE_SECONDS = 0.5  # seconds without a message, despite credit, after which a producer is idle
TURN_BYTES = 256 << 10  # least grant of a turn, unless max_packet is smaller
TAKES_LONG = "takes long to decode: send it again when there is credit"
_TURN_PACKETS = 4  # least grant of a turn, in packets of the producer's largest size


class Credit:
    """The credit that the connected producers have now. Each ACK carries it.

    Attributes:
        policy: the rule for sharing credit.
        room: the cost that the journal and the learner can accept, as last measured.
        unread: the extra cost of the records that the learner has not read.
        scarce: whether the room is small, so that it grows only as fast as the learner reads.
        closing: whether the receiver stops, so that nobody gets credit.
    """

    def __init__(
        self, group: GroupCommit, policy: CreditPolicy, sessions: Sessions, answers: Answers
    ) -> None:
        self.policy = policy
        self.room = 0
        self.unread = UnreadCost()
        self.scarce = False
        self.closing = False
        self._group, self._sessions, self._answers = group, sessions, answers

    def use(self, durable: CommitBatch, last: int, now: float) -> None:
        """Subtract a batch, which is now in the journal up to position `last`, from the room."""
        self.room -= durable.cost
        self.unread.add(last, durable.extra)
        if durable.extra:  # expensive packets use up the room quickly, so do not wait for the tick
            self.grant(now)

    def has_time(self, session: Session, now: float) -> bool:
        """Return whether a packet that takes long to decode may be accepted now.

        Credit counts bytes. A producer may have sent packets with hours of decoding before its
        credit was reduced.
        """
        on_credit = session.credit > 0 or now - session.credit_changed < TURN_SECONDS
        return on_credit and self.unread.waiting + self._group.batch.extra < self.unread.most

    def grant(self, now: float, quiet: Session | None = None) -> None:
        """Divide the credit, and send an ACK to each session whose credit changed, except `quiet`.

        Only a rise of more than a quarter changes the credit; every fall does.
        """
        sessions = list(self._sessions)
        floor = self._note_idle(sessions, now)
        blocked = self.closing or not self._group.ready
        room = 0 if blocked else max(0, self.room - self._group.batch.cost)
        waited_for = floor + TURN_BYTES if any(session.greedy for session in sessions) else floor
        for session, credit in zip(
            sessions, self.policy.plan(sessions, room, now, self.scarce), strict=True
        ):
            before = session.credit
            if before <= credit and (credit - before) * 4 <= before:
                continue  # a small rise is not worth a message
            if (credit == 0) != (before == 0):
                used = session.last_received >= session.credit_changed
                session.revoked = int(before * session.charge) if used else 0
                session.credit_changed = now
                if before and not used:  # sessions that send get the next turns
                    session.served = max(session.served, waited_for)
            session.credit = credit
            if session is not quiet:
                self._answers.ack(session, now)
        for session in sessions:
            if session.sent_back and session.credit and self.has_time(session, now):
                # packets received meanwhile were dropped
                self._answers.gap(session, TAKES_LONG, now)

    def _note_idle(self, sessions: list[Session], now: float) -> int:
        """Update the sessions that do not use their credit; return the least served cost.

        A session with credit that sends little saves no claim for later turns. A session that sends
        nothing may wait to send a large packet, so its largest packet becomes unknown.

        Returns:
            The cost accepted from the least-served greedy session; see `least_served`.
        """
        idle = [
            session
            for session in sessions
            if session.credit
            and now - max(session.last_received, session.credit_changed) >= IDLE_SECONDS
        ]
        for session in idle:
            session.greedy = False
            if not session.sent_back:  # a producer sends rejected packets again, of known size
                session.largest = 0
        floor = least_served(sessions)
        for session in sessions:
            if session.credit and not session.greedy:
                session.served = max(session.served, floor)
        return floor


class CreditPolicy:
    """A policy that divides a budget of bytes between producers.

    All packets in flight must fit into the receiver's memory and into the journal, so the sum of
    the grants never exceeds either. If there is too little for all producers at once, they take
    turns. If room grows only as fast as a slow learner reads, all greedy producers are served the
    same cost, as in start-time fair queueing (Goyal et al. 1996). The cost of a sample is its
    bytes, or more if it takes long to decode; see `decode_cost`.

    Args:
        each: most bytes for one producer.
        total: most bytes for all producers together.
        max_packet: most bytes of a packet.

    Raises:
        ValueError: `0 < max_packet <= each <= total` does not hold.
    """

    def __init__(self, each: int, total: int, max_packet: int) -> None:
        if not 0 < max_packet <= total:
            raise ValueError(
                f"max_packet {max_packet}: must be above 0 and at most total_credit ({total}), or "
                "no producer could send such a packet; lower max_packet, or raise total_credit"
            )
        if not max_packet <= each <= total:
            raise ValueError(
                f"credit {each}: must be from max_packet ({max_packet}) to total_credit ({total})"
            )
        self.each = each
        self.total = total
        self.max_packet = max_packet

    def least(self, session: Session) -> int:
        """Return the least useful grant, as cost.

        It allows a few packets of the largest size so far, or one packet of any size if the largest
        size is unknown.
        """
        if not session.largest:
            return self.max_packet
        largest = int(session.largest * session.charge)
        return min(self.max_packet, max(_TURN_PACKETS * largest, TURN_BYTES))

    def share(self, count: int, room: int) -> int:
        """Return the bytes for each of `count` producers, if they are served at once."""
        return min(self.each, min(self.total, room) // count)

    def plan(
        self, sessions: Sequence[Session], room: int, now: float, scarce: bool = False
    ) -> list[int]:
        """Return the bytes granted to each session: 0, or at least its largest packet.

        Args:
            room: the cost that the journal and the learner can accept.
            scarce: whether room grows more slowly than producers can use it.
        """
        if not sessions:
            return []
        least = [self.least(session) for session in sessions]
        share = self.share(len(sessions), room)
        if share >= max(least) and not scarce:
            return [_as_bytes(session, share) for session in sessions]
        in_flight = sum(one.revoked for one in sessions if _drains(one, now))
        free = min(self.total, room) - in_flight
        ahead = self._ahead(sessions, least) if scarce else set[int]()
        grants = _turns(sessions, least, free, now, ahead)
        return [_as_bytes(*pair) for pair in zip(sessions, grants, strict=True)]

    def _ahead(self, sessions: Sequence[Session], least: Sequence[int]) -> set[int]:
        """Return the greedy sessions that are more than a grant ahead of the least-served one."""
        floor = least_served(sessions)
        return {
            i
            for i, session in enumerate(sessions)
            if session.greedy and session.served > floor + least[i]
        }


def _as_bytes(session: Session, grant: int) -> int:
    """Return a grant in bytes instead of cost; at least two of the session's largest packets.

    The result never exceeds `grant`.
    """
    if not grant or not session.largest or session.charge == 1.0:
        return grant
    return max(min(grant, 2 * session.largest), int(grant / session.charge))


def least_served(sessions: Sequence[Session]) -> int:
    """Return the least cost served to a greedy session.

    If no session is greedy, return the most cost served to any session, or 0 without sessions.
    """
    greedy = [session.served for session in sessions if session.greedy]
    return min(greedy) if greedy else max((session.served for session in sessions), default=0)


def _turns(
    sessions: Sequence[Session], least: Sequence[int], free: int, now: float, ahead: set[int]
) -> list[int]:
    """Return the grant of each session as cost, in turns; the least-served sessions come first.

    Active turns continue. Expired turns end only if other sessions wait without room for them. The
    room of an ended turn is granted again only after the turn has drained. New grants and packets
    in flight together therefore stay within the budget.

    Args:
        least: the least grant of each session.
        free: the cost that can be granted.
        ahead: the indices of sessions that get nothing.
    """
    order = sorted(
        range(len(sessions)), key=lambda i: (sessions[i].served, sessions[i].credit_changed)
    )
    order = [i for i in order if i not in ahead]
    grants = [0] * len(sessions)
    for i in order:
        if sessions[i].credit and not _expired(sessions[i], now) and least[i] <= free:
            grants[i], free = least[i], free - least[i]
    expired = []
    for i in order:
        if sessions[i].credit and _expired(sessions[i], now) and least[i] <= free:
            expired.append(i)
            free -= least[i]
    unserved = 0
    for i in order:
        if sessions[i].credit:
            continue
        if unserved or least[i] > free:  # a smaller grant must not overtake a waiting session
            unserved += least[i]
        else:
            grants[i], free = least[i], free - least[i]
    for i in reversed(expired):
        if unserved > 0:
            unserved -= least[i]
        else:
            grants[i] = least[i]
    return grants


def _expired(session: Session, now: float) -> bool:
    age = now - session.credit_changed
    quiet = session.last_received < session.credit_changed and age >= QUIET_SECONDS
    return quiet or age >= TURN_SECONDS


def _drains(session: Session, now: float) -> bool:
    last_activity = max(session.last_received, session.credit_changed)
    return not session.credit and now - last_activity < DRAIN_SECONDS
