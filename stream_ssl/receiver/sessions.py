"""The connected producers, the credit that each of them gets, and their statistics.

`ProtocolState` keeps one `Session` for each connected producer, and divides credit between them by
`CreditPolicy`. `ProducerTable` has the statistics that the page shows.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace


@dataclass(slots=True)
class Session:
    """The state of one connected producer since its HELLO. Times are of time.monotonic.

    Attributes:
        route: the routing id of the connection; it does not authenticate the sender.
        user: the connection's User-Id, which is its public key; None in plain text.
        producer: the name of the producer.
        epoch: the epoch of its HELLO.
        expected: the next sequence to accept.
        through: the last durable sequence.
        credit: the granted bytes, as last sent.
        credit_changed: when the credit last changed between 0 and more than 0.
        largest: bytes of the largest packet; 0: unknown, or the producer may wait to send a larger
            packet.
        charge: the cost per byte of the most expensive recent packet; more than 1 if packets are
            small but take long to decode. It decays with each cheaper packet.
        served: the cost accepted from the producer. The producer with the least gets the next turn.
            The value of an idle producer is raised to that of the least-served greedy producer, so
            that it saves no claim. After an unused turn it is raised by one turn more.
        greedy: whether the producer uses its turns, so that others must wait: it sends at least
            half of the least grant within the time of a turn.
        taken: the cost accepted in the present period of a turn's length.
        taken_since: when this period began.
        revoked: the cost of revoked credit that may still be in flight.
        last_received: when the last message was received.
        last_acked: when the last ACK was sent.
        missing: lost packets before `expected`; they are counted when the next packet is accepted.
        sent_back: whether packets were rejected because they take long to decode. The producer
            sends them again.
        gap_sent: when NACK "gap" was last sent for `expected`; 0: never.
        record: the statistics of the producer.
        verdicts: whether the producer has asked for verdicts.
    """

    route: bytes
    user: str | None
    producer: str
    epoch: int
    expected: int
    through: int
    credit_changed: float
    last_received: float
    record: ProducerRecord
    verdicts: bool = False
    credit: int = 0
    largest: int = 0
    charge: float = 1.0
    served: int = 0
    greedy: bool = False
    taken: int = 0
    taken_since: float = 0.0
    revoked: int = 0
    last_acked: float = 0.0
    missing: int = 0
    sent_back: bool = False
    gap_sent: float = 0.0

    def take(self, size: int, cost: int, least: int, now: float) -> None:
        """Update the session for an accepted packet.

        Args:
            size: the bytes of the packet.
            cost: the cost of the packet, at least its bytes; see `decode_cost`.
            least: the least grant of the producer, as cost.
            now: the time of time.monotonic.
        """
        if now - self.taken_since >= TURN_SECONDS:
            self.greedy = 2 * self.taken >= least
            self.taken, self.taken_since = 0, now
        self.largest = max(self.largest, size)
        fading = 1.0 + (self.charge - 1.0) * _CHARGE_KEPT if self.charge > _CHARGE_LEAST else 1.0
        self.charge = max(fading, cost / size) if cost > size else fading
        self.served += cost
        self.taken += cost
        self.greedy = self.greedy or 2 * self.taken >= least


class Sessions:
    """A bounded table of the connected producers; the longest silent one is dropped if it is full.

    Dropping a session loses no data. The receiver asks a producer without a session to send HELLO,
    and its accepted packets are kept.

    Args:
        limit: most sessions at once.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._by_route: OrderedDict[bytes, Session] = OrderedDict()  # longest silent first
        self._by_producer: dict[str, Session] = {}

    def __len__(self) -> int:
        return len(self._by_route)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._by_route.values()))

    def by_route(self, route: bytes) -> Session | None:
        """Return the session of a connection, or None."""
        return self._by_route.get(route)

    def by_producer(self, producer: str) -> Session | None:
        """Return the session of a producer, or None."""
        return self._by_producer.get(producer)

    def touch(self, session: Session, now: float) -> None:
        """Record that a message was received."""
        session.last_received = now
        self._by_route.move_to_end(session.route)

    def open(self, session: Session) -> None:
        """Add a session, replacing those of the same connection and of the same producer."""
        for old in (self.by_route(session.route), self.by_producer(session.producer)):
            if old is not None:
                self.drop(old)
        while len(self._by_route) >= self.limit:
            self.drop(next(iter(self._by_route.values())))
        self._by_route[session.route] = session
        self._by_producer[session.producer] = session

    def drop(self, session: Session) -> None:
        """Remove a session, if it is still in the table."""
        if self._by_route.get(session.route) is session:
            del self._by_route[session.route]
        if self._by_producer.get(session.producer) is session:
            del self._by_producer[session.producer]


# -- credit

TURN_SECONDS = 0.25  # length of a turn of a producer that sends
QUIET_SECONDS = 0.05  # length of a turn of a producer that does not send
DRAIN_SECONDS = 0.1  # seconds without a message after which a revoked turn has drained
IDLE_SECONDS = 0.5  # seconds without a message, despite credit, after which a producer is idle
_CHARGE_KEPT = 0.9  # part of a charge's excess over 1 that remains after a cheaper packet
_CHARGE_LEAST = 1.01  # a lower charge counts as 1
_TURN_PACKETS = 4  # least grant of a turn, in packets of the producer's largest size
TURN_BYTES = 256 << 10  # least grant of a turn, unless max_packet is smaller


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
        if not 0 < max_packet <= each <= total:
            raise ValueError(
                f"credit: must hold 0 < max_packet ({max_packet}) <= credit of one producer "
                f"({each}) <= credit of all ({total})"
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
        """Return the bytes for each of `count` producers at once; 0: they must take turns."""
        if count < 1:
            return 0
        share = self._share(count, room)
        return share if share >= self.max_packet else 0

    def plan(
        self, sessions: Sequence[Session], room: int, now: float, scarce: bool = False
    ) -> list[int]:
        """Return the bytes granted to each session: 0, or at least its largest packet.

        Args:
            sessions: the connected producers.
            room: the cost that the journal and the learner can accept.
            now: the time of time.monotonic.
            scarce: whether room grows more slowly than producers can use it.
        """
        if not sessions:
            return []
        least = [self.least(session) for session in sessions]
        share = self._share(len(sessions), room)
        if share >= max(least) and not scarce:
            return [_as_bytes(session, share) for session in sessions]
        in_flight = sum(one.revoked for one in sessions if _drains(one, now))
        free = min(self.total, room) - in_flight
        ahead = self._ahead(sessions, least) if scarce else set[int]()
        grants = _turns(sessions, least, free, now, ahead)
        return [_as_bytes(*pair) for pair in zip(sessions, grants, strict=True)]

    def _share(self, count: int, room: int) -> int:
        return min(self.each, min(self.total, room) // count)

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
        sessions: the connected producers.
        least: the least grant of each session.
        free: the cost that can be granted.
        now: the time of time.monotonic.
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


# -- what each producer did

MOST_REASONS = 32
"""Most reasons of rejection that are counted separately for one producer."""


@dataclass(slots=True)
class ProducerRecord:
    """The statistics of one producer over all its connections. Times are of time.monotonic.

    Attributes:
        name: the name in its HELLO.
        key: the name of its key on the allow-list; None in plain text.
        agent: the program and version in its HELLO.
        since: when its first HELLO was received.
        connected: when its present connection was opened; None if it is not connected.
        last_received: when the last message was received.
        hellos: the number of its connections.
        packets, samples, bytes: the accepted data, without duplicates.
        duplicates: samples that were received more than once.
        rejected: rejected samples, by reason.
        credit: the bytes that may be unacknowledged now.
    """

    name: str
    key: str | None
    agent: str
    since: float
    connected: float | None
    last_received: float
    hellos: int = 0
    packets: int = 0
    samples: int = 0
    bytes: int = 0
    duplicates: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    credit: int = 0

    def reject(self, reason: str, samples: int) -> None:
        """Count rejected samples; beyond MOST_REASONS reasons, count them as "other"."""
        known = reason in self.rejected or len(self.rejected) < MOST_REASONS
        self.rejected[reason if known else "other"] += samples


class ProducerTable:
    """A bounded table of producer records; beyond the limit, the longest silent one is removed.

    Args:
        limit: most records.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._records: OrderedDict[str, ProducerRecord] = OrderedDict()  # longest silent first

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[ProducerRecord]:
        return iter(self._records.values())

    def get(self, name: str) -> ProducerRecord | None:
        """Return the record of a producer, or None."""
        return self._records.get(name)

    def opened(
        self, name: str, key: str | None, agent: str, now: float, again: bool = False
    ) -> ProducerRecord:
        """Record a HELLO and return the producer's record.

        Args:
            name: the name of the producer.
            key: the name of its key on the allow-list; None in plain text.
            agent: the program and version in HELLO.
            now: the time of time.monotonic.
            again: whether the connection has sent HELLO before.
        """
        record = self._records.get(name)
        if record is None:
            record = ProducerRecord(name, key, agent, now, now, now)
            self._records[name] = record
            while len(self._records) > self._limit:
                self._records.popitem(last=False)
        record.key, record.agent = key, agent
        if not again:
            record.connected = now
            record.hellos += 1
        self.heard(record, now)
        return record

    def heard(self, record: ProducerRecord, now: float) -> None:
        """Record that a message of the producer was received."""
        record.last_received = now
        if record.name in self._records:
            self._records.move_to_end(record.name)

    def copy(self) -> list[ProducerRecord]:
        """Return copies of the records, the longest silent first."""
        return [replace(record, rejected=record.rejected.copy()) for record in self]
