"""The messages that a receiver sends to producers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from stream_ssl.rate_limited_logger import RateLimitedLogger
from stream_ssl.receiver.records import Counters
from stream_ssl.receiver.sessions import Session, Sessions
from stream_ssl.wire import Ack, Bye, Message, Nack
from stream_ssl.wire.messages import Verdict, Verdicts

log = logging.getLogger(__name__)

_GAP_SECONDS = 1.0  # seconds before the same gap is reported again, for packets in flight
_PROBE_SECONDS = 10.0  # seconds without a message after which a session is probed with an ACK

Send = Callable[[bytes, Message], bool | None]
"""Send a message to a connection. True: sent; False: would block; None: connection lost."""


class Answers:
    """Sends acknowledgements and refusals. A session whose connection is lost is dropped."""

    def __init__(self, sessions: Sessions, counters: Counters, send: Send) -> None:
        self.send = send
        self._sessions, self._counters = sessions, counters
        self._due: dict[bytes, Session] = {}
        self._limited_log = RateLimitedLogger(log)

    def ack(self, session: Session, now: float) -> None:
        """Send an ACK with the last durable sequence and the credit."""
        session.last_acked = now
        sent = self.send(session.route, Ack(session.through, session.credit))
        if sent is None:
            self._sessions.drop(session)
        elif not sent:
            self.ack_later(session)

    def ack_later(self, session: Session) -> None:
        """Let the next `flush` send an ACK."""
        self._due[session.route] = session

    def flush(self, now: float) -> None:
        """Send the ACKs that are due: for duplicates, and those that would have blocked before."""
        due, self._due = self._due, {}
        for route, session in due.items():
            if self._sessions.by_route(route) is session:
                self.ack(session, now)

    def probe(self, now: float) -> None:
        """Send an ACK to silent sessions, because libzmq reports lost connections only on sends."""
        for session in self._sessions:
            if now - max(session.last_received, session.last_acked) >= _PROBE_SECONDS:
                self.ack(session, now)

    def gap(self, session: Session, detail: str, now: float) -> None:
        """Send NACK "gap" for the expected sequence, once, because more packets are in flight."""
        if now - session.gap_sent >= _GAP_SECONDS:
            session.gap_sent = now
            self.send(session.route, Nack(session.expected, "gap", detail, permanent=False))

    def refuse(self, route: bytes, nack: Nack, whom: str = "") -> None:
        """Count, log and send a NACK.

        Args:
            whom: the sender of the refused message, for the log, with a preposition.
        """
        self._counters.refused[nack.reason] += 1
        text = f"refused a message{whom} ({nack.reason}): {nack.detail}"
        self._limited_log.warning(nack.reason, text)
        self.send(route, nack)

    @property
    def wants_verdicts(self) -> bool:
        """Whether any connected producer has asked for verdicts."""
        return any(session.verdicts for session in self._sessions)

    def tell(self, producer: str, rows: Sequence[Verdict]) -> None:
        """Send verdicts to a producer that asked for them; drop verdicts that would block."""
        session = self._sessions.by_producer(producer)
        if session is not None and session.verdicts:
            self.send(session.route, Verdicts(tuple(rows)))

    def farewell(self, reason: str) -> None:
        """Send BYE to all sessions."""
        for session in self._sessions:
            self.send(session.route, Bye(reason))
