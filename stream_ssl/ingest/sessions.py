"""Who is connected, and what each producer did since this receiver started: the former for the
protocol, the latter for people and the page they look at."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

MOST_REASONS = 32
"""Reasons of refusal told apart for one producer."""


@dataclass(slots=True)
class ProducerRecord:
    """One producer, over all its connections. Times are of time.monotonic.

    Attributes:
        name: as it calls itself.
        key: the name on the allow-list that it proved to be; None in plain text.
        agent: what it says that it runs.
        since: when it first said HELLO.
        connected: when its present connection did; None while there is none.
        last_received: when a message last came.
        hellos: how often it has connected.
        packets, samples, bytes: taken for the first time.
        duplicates: samples that came again.
        rejected: samples, by reason of refusal.
        credit: bytes that it may have unacknowledged now.
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
        """Count samples that were refused."""
        known = reason in self.rejected or len(self.rejected) < MOST_REASONS
        self.rejected[reason if known else "other"] += samples


class ProducerTable:
    """A record for each producer that has said HELLO, of the `limit` last heard of.

    Args:
        limit: most records.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._records: OrderedDict[str, ProducerRecord] = OrderedDict()  # silent for longest first

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[ProducerRecord]:
        return iter(self._records.values())

    def get(self, name: str) -> ProducerRecord | None:
        """The producer's record."""
        return self._records.get(name)

    def opened(
        self, name: str, key: str | None, agent: str, now: float, again: bool = False
    ) -> ProducerRecord:
        """A producer has said HELLO; `again`, on a connection on which it had done so."""
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
        """A message has come."""
        record.last_received = now
        if record.name in self._records:
            self._records.move_to_end(record.name)

    def copy(self) -> list[ProducerRecord]:
        """Records that nobody changes any more, silent for longest first."""
        return [replace(record, rejected=record.rejected.copy()) for record in self]


@dataclass(slots=True)
class Session:
    """The state of one connected producer, from its HELLO on. Times are of time.monotonic.

    Attributes:
        route: the ROUTER's id for the connection; it proves nothing about who sends.
        user: the connection's User-Id, its public key; None in plain text.
        expected: the next sequence to accept.
        through: the last sequence that is durable.
        credit: bytes granted, as last sent.
        credit_changed: when credit last began or ended.
        largest: bytes of its largest packet; 0: not known, or it may wait to send a larger one.
        served: bytes accepted from it, by which turns are shared out; an idle producer is raised to
            the least-served busy one, so that it saves up no claim.
        greedy: whether it has been sending whenever it had credit.
        revoked: bytes of credit that were taken back and may still be in flight.
        last_received: when a message last came.
        last_acked: when an ACK was last sent.
        missing: packets before `expected` that are lost; counted when the first one after them
            comes.
        gap_sent: when NACK "gap" was last sent for `expected`; 0: not yet.
        record: what is told of the producer.
        verdicts: it has asked how its samples fare.
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
    served: int = 0
    greedy: bool = False
    revoked: int = 0
    last_acked: float = 0.0
    missing: int = 0
    gap_sent: float = 0.0


class Sessions:
    """The connected producers, a bounded number: beyond it the one silent for longest is dropped.

    Nothing is lost with a session: a producer without one is asked to say HELLO, and what it sent
    is in the journal.

    Args:
        limit: most sessions at once.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._by_route: OrderedDict[bytes, Session] = OrderedDict()  # silent for longest first
        self._by_producer: dict[str, Session] = {}

    def __len__(self) -> int:
        return len(self._by_route)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._by_route.values()))

    def by_route(self, route: bytes) -> Session | None:
        """The session of a connection."""
        return self._by_route.get(route)

    def by_producer(self, producer: str) -> Session | None:
        """The session of a producer."""
        return self._by_producer.get(producer)

    def touch(self, session: Session, now: float) -> None:
        """Notes that a message came."""
        session.last_received = now
        self._by_route.move_to_end(session.route)

    def open(self, session: Session) -> None:
        """Adds a session in place of the same connection's and the same producer's."""
        for old in (self.by_route(session.route), self.by_producer(session.producer)):
            if old is not None:
                self.drop(old)
        while len(self._by_route) >= self.limit:
            self.drop(next(iter(self._by_route.values())))
        self._by_route[session.route] = session
        self._by_producer[session.producer] = session

    def drop(self, session: Session) -> None:
        """Removes a session; one that is not here any more is no error."""
        if self._by_route.get(session.route) is session:
            del self._by_route[session.route]
        if self._by_producer.get(session.producer) is session:
            del self._by_producer[session.producer]
