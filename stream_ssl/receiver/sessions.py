"""Who is connected, how many bytes each may have in flight, and what each did since the start.

`ProtocolState` keeps one `Session` for each connected producer, and shares credit between them by
`CreditPolicy`. `ProducerTable` is for people and the page they look at.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace


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
        charge: how many bytes each of its bytes counts for, at the dearest of its latest packets;
            more than 1 where few bytes take long to decode.
        served: cost accepted from it. The producer with the least has the next turn; an idle one is
            raised to
            the least-served busy one, so that it saves up no claim, and by a turn beyond that one
            when a turn of its own went by unused.
        greedy: whether it sends as much as it may, and others must wait for its turns: at least
            half of a least grant in the time of a turn.
        taken, taken_since: cost accepted from it in such a time, and when that began.
        revoked: credit that was taken back and may still be in flight, as cost.
        last_received: when a message last came.
        last_acked: when an ACK was last sent.
        missing: packets before `expected` that are lost; counted when the first one after them
            comes.
        sent_back: whether packets were left out because they take long to decode. They come again.
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
        """Count an accepted packet of `size` bytes.

        Args:
            cost: at least its bytes; see `decode_cost`.
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


# -- credit

TURN_SECONDS = 0.25  # a turn of a producer that sends
QUIET_SECONDS = 0.05  # a turn of a producer that does not
DRAIN_SECONDS = 0.1  # without a message, after which an expired turn has nothing left in flight
IDLE_SECONDS = 0.5  # with credit and without a message, after which a producer wants no more
_CHARGE_KEPT = 0.9  # of a charge above 1, with each packet that costs less
_CHARGE_LEAST = 1.01  # a charge below it counts as 1
_TURN_PACKETS = 4  # least grant of a turn, in packets of the producer's largest size
TURN_BYTES = 256 << 10  # least grant of a turn, where a packet may have so many


class CreditPolicy:
    """Shares a budget of bytes between producers.

    What is in flight must fit into the receiver's memory and into the journal, so the grants
    together never exceed either. Where that is too little for all at once, producers take turns;
    and where room comes only as fast as a slow learner makes it, those that always have more to
    send are served the same cost, as by start-time fair queueing (Goyal et al. 1996). The cost of
    a sample is its bytes, or more where few bytes take long to decode: see `decode_cost`.

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

    def least(self, session: Session) -> int:
        """Return the cost below which a grant is of no use: a few packets like the largest that
        came, or one of any size where none did."""
        if not session.largest:
            return self.max_packet
        largest = int(session.largest * session.charge)
        return min(self.max_packet, max(_TURN_PACKETS * largest, TURN_BYTES))

    def share(self, count: int, room: int) -> int:
        """Bytes for each of `count` producers at once; 0: they must take turns, or wait."""
        if count < 1:
            return 0
        share = self._share(count, room)
        return share if share >= self.max_packet else 0

    def plan(
        self, sessions: Sequence[Session], room: int, now: float, scarce: bool = False
    ) -> list[int]:
        """Return the bytes granted to each session: 0, or at least its largest packet.

        Args:
            room: cost that journal and learner can take.
            now: of time.monotonic, as are `credit_changed` and `last_received`.
            scarce: room comes slower than producers could use it.
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
        """The greedy sessions that have had more than another greedy one, who now comes first."""
        floor = least_served(sessions)
        return {
            i
            for i, session in enumerate(sessions)
            if session.greedy and session.served > floor + least[i]
        }


def _as_bytes(session: Session, grant: int) -> int:
    """Return the bytes that cost as much as `grant`, and at least two of its largest packet."""
    if not grant or not session.largest or session.charge == 1.0:
        return grant
    return max(min(grant, 2 * session.largest), int(grant / session.charge))


def least_served(sessions: Sequence[Session]) -> int:
    """Cost of the greedy session that has had the fewest; of the one with the most, where none is
    greedy."""
    greedy = [session.served for session in sessions if session.greedy]
    return min(greedy) if greedy else max((session.served for session in sessions), default=0)


def _turns(
    sessions: Sequence[Session], least: Sequence[int], free: int, now: float, ahead: set[int]
) -> list[int]:
    """Active turns go on, and as many expired ones end as sessions wait for whom there is no room;
    the least served come first.

    What an expired turn leaves is given to nobody before it has drained, so that the new grants
    and what is in flight from earlier ones stay within the budget together.
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


def _expired(session: Session, now: float) -> bool:
    age = now - session.credit_changed
    quiet = session.last_received < session.credit_changed and age >= QUIET_SECONDS
    return quiet or age >= TURN_SECONDS


def _drains(session: Session, now: float) -> bool:
    last_activity = max(session.last_received, session.credit_changed)
    return not session.credit and now - last_activity < DRAIN_SECONDS


# -- what each producer did

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
