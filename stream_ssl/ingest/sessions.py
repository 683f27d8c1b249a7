"""The producers that are connected: one session for each, found by routing id or by name."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(slots=True)
class Session:
    """A producer's connection, from its HELLO on.

    Attributes:
        route: the ROUTER's id for the connection; it proves nothing about who sends.
        user: the connection's User-Id, its public key; None in plain text.
        expected: the next sequence to take.
        through: the last that is on disk.
        credit: bytes granted, as last told.
        since: when credit was last given or taken, time.monotonic.
        turns: how often credit was given after there had been none.
        revoked: bytes of credit that were taken back and may be under way still.
        heard: when a message last came.
        probed: when a message was last sent.
        missing: packets before `expected` that are lost, until the first one behind them comes.
        gap_told: when the producer was last sent back to `expected`; 0: not since that changed.
        unsent: whether an ACK could not be sent and is still due.
    """

    route: bytes
    user: str | None
    producer: str
    epoch: int
    expected: int
    through: int
    since: float
    heard: float
    credit: int = 0
    turns: int = 0
    revoked: int = 0
    probed: float = 0.0
    missing: int = 0
    gap_told: float = 0.0
    unsent: bool = False


class Sessions:
    """A bounded table; the one unheard for longest makes way.

    Nothing is lost with a session: a producer without one is asked to say HELLO, and what it sent
    is in the journal.

    Args:
        limit: most sessions at once.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._by_route: OrderedDict[bytes, Session] = OrderedDict()  # unheard for longest first
        self._by_producer: dict[str, Session] = {}

    def __len__(self) -> int:
        return len(self._by_route)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._by_route.values()))

    def get(self, route: bytes) -> Session | None:
        """The session of a connection."""
        return self._by_route.get(route)

    def of(self, producer: str) -> Session | None:
        """The session of a producer."""
        return self._by_producer.get(producer)

    def touch(self, session: Session, now: float) -> None:
        """A message came."""
        session.heard = now
        self._by_route.move_to_end(session.route)

    def open(self, session: Session) -> None:
        """Enters a session in place of the same connection's and the same producer's."""
        for old in (self.get(session.route), self.of(session.producer)):
            if old is not None:
                self.drop(old)
        while len(self._by_route) >= self.limit:
            self.drop(next(iter(self._by_route.values())))
        self._by_route[session.route] = session
        self._by_producer[session.producer] = session

    def drop(self, session: Session) -> None:
        """Forgets a session."""
        if self._by_route.get(session.route) is session:
            del self._by_route[session.route]
        if self._by_producer.get(session.producer) is session:
            del self._by_producer[session.producer]
