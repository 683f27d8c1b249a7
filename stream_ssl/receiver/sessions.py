"""The connected producers, and their statistics.

`ReceiverProtocol` keeps one `Session` for each connected producer. `ProducerTable` has the
statistics that the page shows.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

TURN_SECONDS = 0.25  # length of a turn of a producer that sends
_CHARGE_KEPT = 0.9  # part of a charge's excess over 1 that remains after a cheaper packet
_CHARGE_LEAST = 1.01  # a lower charge counts as 1


@dataclass(slots=True)
class Session:
    """The state of one connected producer since its HELLO. Times are of time.monotonic.

    Attributes:
        route: the routing id of the connection; it does not authenticate the sender.
        user: the connection's User-Id, which is its public key; None in plain text.
        producer: the name of the producer.
        counted_as: the name under which metrics count the producer: the name of its key on the
            allow-list, or its own name in plain text or for "*".
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
    counted_as: str
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
        """Update the session for an accepted packet of `size` bytes.

        Args:
            cost: the cost of the packet, at least its bytes; see `decode_cost`.
            least: the least grant of the producer, as cost.
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

    Attributes:
        senders: the names of all producers that have sent a packet since the start.
    """

    def __init__(self, limit: int) -> None:
        self.senders: set[str] = set()
        self._limit = limit
        self._records: OrderedDict[str, ProducerRecord] = OrderedDict()  # longest silent first

    def opened(
        self, name: str, key: str | None, agent: str, now: float, again: bool = False
    ) -> ProducerRecord:
        """Record a HELLO and return the producer's record.

        `again` says whether the connection has sent HELLO before.
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
        records = self._records.values()
        return [replace(record, rejected=record.rejected.copy()) for record in records]
