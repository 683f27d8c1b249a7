"""What the receiver answers: the protocol of docs/wire.md without a socket."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence

from stream_ssl.ingest.access import Access, belongs
from stream_ssl.ingest.credit import CreditPolicy
from stream_ssl.ingest.group import Group, Tally, captured_at, samples_of
from stream_ssl.ingest.journal import Journal, JournalError
from stream_ssl.ingest.journal_errors import JournalFull
from stream_ssl.ingest.seldom import SeldomLog, printable
from stream_ssl.ingest.sessions import Session, Sessions
from stream_ssl.wire import CODECS, Ack, Bye, Data, Hello, Message, Nack, Welcome, WireError, decode
from stream_ssl.wire.messages import DATA_HEAD

log = logging.getLogger(__name__)

MAX_FIRST = 1 << 62
_GAP_SECONDS = 1.0  # before the same gap is told again: what is under way arrives behind it
_RETRY_SECONDS = 0.25  # between attempts to write a journal that refuses
_PROBE_SECONDS = 10.0  # of silence, after which a session is asked whether it is still there

Send = Callable[[bytes, Message], bool | None]
"""Sends to a connection: True sent, False cannot be now, None the connection is gone."""


class Dialogue:
    """Sessions, group commit and credit of one receiver. Nothing that is sent to it raises.

    Args:
        journal: where packets go.
        policy: how credit is shared.
        access: who may send; None: everybody who can connect.
        sessions: the table to keep.
        max_samples: of one packet.
        max_names: of producers that one key may speak for; in plain text: of all.
        send: how to answer.
    """

    def __init__(
        self,
        journal: Journal,
        policy: CreditPolicy,
        access: Access | None,
        sessions: Sessions,
        max_samples: int,
        max_names: int,
        send: Send,
    ) -> None:
        self.journal = journal
        self.policy = policy
        self.sessions = sessions
        self.group = Group()
        self.tally = Tally()
        self.ready = True
        self.full = False  # the group waits for room in the journal
        self.closing = False
        self.room = 0  # bytes that journal and learner can take, as of the last tick
        self.captured: float | None = None
        self.received: float | None = None
        self._access = access
        self._max_samples, self._max_names = max_samples, max_names
        self._send = send
        self._epoch = time.time_ns()
        self._acks_due: dict[bytes, Session] = {}
        self._retry_at = 0.0
        self._seldom = SeldomLog(log)
        self._hellos = SeldomLog(log, lines=20)
        self._known: set[str] = set()  # producers of whom this receiver has taken a packet

    # -- what comes in

    def handle(
        self, route: bytes, user: str | None, frames: Sequence[memoryview], now: float
    ) -> None:
        """Answers one message."""
        try:
            self._handle(route, user, frames, now)
        except WireError as error:
            self._refuse(route, Nack(0, error.reason, str(error), permanent=True))
        except Exception:
            self.tally.refused["internal"] += 1
            text = "a message could not be handled and was left out"
            self._seldom.tell(logging.ERROR, "internal", text, trace=True)

    def _handle(
        self, route: bytes, user: str | None, frames: Sequence[memoryview], now: float
    ) -> None:
        session = self.sessions.get(route)
        if session is not None and session.user != user:
            session = None  # another key on a routing id that was someone else's
        if self._access is not None and not self._access.knows(user):
            if session is not None:
                self.sessions.drop(session)
            raise WireError("unauthorised", "this key is not, or no longer, on the allow-list")
        if session is not None:
            self.sessions.touch(session, now)
        try:
            message = decode(frames)
        except WireError as error:
            if error.reason != "checksum":
                raise
            self._damaged(route, session, error, now)
            return
        if isinstance(message, Data):
            self._data(route, session, message, DATA_HEAD.unpack(frames[1])[1], now)
        elif isinstance(message, Hello):
            self._hello(route, user, message, now)
        elif isinstance(message, Bye):
            if session is not None:
                self.sessions.drop(session)
        else:
            raise WireError("malformed", f"{type(message).__name__} is the receiver's to send")

    def _hello(self, route: bytes, user: str | None, hello: Hello, now: float) -> None:
        name = hello.producer
        if self._access is not None and not self._access.permits(user, name):
            raise WireError("unauthorised", f"this key may not speak for producer {name!r}")
        if hello.first > MAX_FIRST:
            raise WireError("malformed", f"HELLO: first {hello.first} is beyond {MAX_FIRST}")
        if self.closing:
            return
        other = self.sessions.of(name)
        if other is not None and other.route != route and self._yields(other, hello, now):
            raise WireError("superseded", f"a newer {name!r} is connected (epoch {other.epoch})")
        if not self.journal.state(name).sequence:
            self._check_names(user, name)
        if name in self.group.last:
            self.commit(now)  # so that resume is the truth
        durable = self.journal.state(name)
        expected = max(durable.sequence, self.group.last.get(name, 0)) + 1
        missing = max(0, hello.first - expected)
        if missing and durable.sequence and name in self._known:
            raise WireError(
                "malformed",
                f"HELLO: first {hello.first} of {name!r}, but {expected} is next: packets between "
                "were never acknowledged; send from there, or take another name",
            )
        session = Session(
            route,
            user,
            name,
            hello.epoch,
            expected + missing,
            durable.sequence,
            since=now,
            heard=now,
            probed=now,
            missing=missing,
        )
        self.sessions.open(session)
        self._acks_due.pop(route, None)
        if self.policy.share(len(self.sessions), self.room):
            self.grant(now, quiet=session)  # else its turn comes
        welcome = Welcome(
            durable.sequence,
            durable.position,
            session.credit,
            self.policy.max_packet,
            self._max_samples,
            CODECS,
            self._epoch,
        )
        self._hellos.tell(
            logging.INFO,
            "hello",
            f"producer {name} ({printable(hello.agent)}) goes on after {durable.sequence}",
        )
        self._send(route, welcome)

    def _check_names(self, user: str | None, name: str) -> None:
        """Refuse a new name of a key that has enough: the journal keeps where each one stands."""
        key = self._access.allow.name_of(user or "") if self._access is not None else None
        names = {*self.journal.producers(), *self.group.last, *(s.producer for s in self.sessions)}
        held = sum(key is None or belongs(other, key) for other in names - {name})
        if held >= self._max_names:
            raise WireError(
                "names",
                f"{name!r} would be one of more than {self._max_names} producers"
                f"{'' if key is None else f' of the key {key!r}'}: use a name again, or raise "
                "receiver.max_names; one that sends nothing for journal.forget_days is forgotten",
            )

    def _yields(self, other: Session, hello: Hello, now: float) -> bool:
        """Whether a HELLO must give way to the producer's other connection; else that one goes."""
        if other.epoch > hello.epoch:
            # A clock may have gone back: only a connection that is still there wins.
            self._ack(other, now)
            if self.sessions.of(hello.producer) is other:
                return True
        elif other.epoch < hello.epoch:
            detail = f"a newer {hello.producer!r} has connected (epoch {hello.epoch})"
            self._refuse(other.route, Nack(0, "superseded", detail, permanent=True))
        return False

    def _data(
        self, route: bytes, session: Session | None, data: Data, checksum: int, now: float
    ) -> None:
        if session is None:
            self.tally.refused["hello-required"] += 1
            detail = "this receiver does not know the connection: say HELLO"
            self._send(route, Nack(data.sequence, "hello-required", detail, permanent=False))
        elif data.sequence < session.expected:
            self.tally.duplicates += samples_of(data)
            self._acks_due[route] = session
        elif data.sequence > session.expected:
            self._gap(session, f"packet {session.expected} is next, not {data.sequence}", now)
        elif self._full(data.size) and not self.commit(now):
            self._gap(session, "more than the credit granted: wait for an ACK", now)
        else:
            self._take(session, data, checksum)

    def _full(self, size: int) -> bool:
        """Whether the group cannot take `size` more bytes within the memory budget."""
        return bool(self.group) and self.group.bytes + size > self.policy.total

    def _take(self, session: Session, data: Data, checksum: int) -> None:
        samples = 1  # where the header cannot say
        try:
            samples = len(data)
            if data.size > self.policy.max_packet:
                limit = self.policy.max_packet
                raise WireError("oversize", f"{data.size} bytes; WELCOME allows {limit}")
            if samples > self._max_samples:
                raise WireError(
                    "oversize", f"{samples} samples; WELCOME allows {self._max_samples}"
                )
            self.group.take(session, data, checksum)
        except WireError as error:
            self.tally.rejected[error.reason] += samples
            self._seldom.warn(error.reason, f"{session.producer}: refused a packet: {error}")
            self.group.refuse(session, data.sequence, error)
        else:
            self.tally.packets += 1
            self.tally.samples += samples
            self.tally.bytes += data.size
            self.received = self.group.entries[-1].received
            captured = captured_at(data)
            if math.isfinite(captured):
                self.captured = captured
        self._count_missing(session)
        self._known.add(session.producer)
        session.expected += 1
        session.gap_told = 0.0

    def _count_missing(self, session: Session) -> None:
        if session.missing:
            self.tally.missing += session.missing
            self._seldom.tell(
                logging.ERROR,
                "missing",
                f"{session.producer}: packets {session.expected - session.missing} to "
                f"{session.expected - 1} were acknowledged once and are not in this journal",
            )
            session.missing = 0

    def _gap(self, session: Session, detail: str, now: float) -> None:
        """Sends the producer back to the sequence expected, once: more of the same follow."""
        if now - session.gap_told >= _GAP_SECONDS:
            session.gap_told = now
            self._send(session.route, Nack(session.expected, "gap", detail, permanent=False))

    def _damaged(self, route: bytes, session: Session | None, error: WireError, now: float) -> None:
        """Asks for the packet again: the one expected, since the damage may be in the number."""
        self.tally.refused["checksum"] += 1
        self._seldom.warn("checksum", f"a packet came damaged: {error}")
        sequence = 0
        if session is not None:
            session.gap_told = now  # those that follow it need not be told
            sequence = session.expected
        self._send(route, Nack(sequence, "checksum", str(error), permanent=False))

    def _refuse(self, route: bytes, nack: Nack) -> None:
        self.tally.refused[nack.reason] += 1
        self._seldom.warn(nack.reason, f"refused a message ({nack.reason}): {nack.detail}")
        self._send(route, nack)

    # -- what goes to disk

    def commit(self, now: float) -> bool:
        """Writes the group and acknowledges it; False if the journal does not take it now."""
        if not self.group or now < self._retry_at:
            return not self.group
        try:
            self._write(self.group, now)
        except JournalFull as error:
            self._write_what_fits(error, now)
            return False
        except JournalError as error:
            self._fail(error, now)
            return False
        except ValueError:
            log.exception("a group was out of order; its producers are asked to say HELLO")
            self._forget(self.group)
            return True
        self.group, self.ready, self.full = Group(), True, False
        return True

    def _write_what_fits(self, error: JournalFull, now: float) -> None:
        """A group may need more than the learner, which has read all before it, can let go."""
        count = self.journal.fitting(self.group.entries)
        if 0 < count < len(self.group):
            first, rest = self.group.split(count)
            try:
                self._write(first, now)
            except JournalError as another:
                log.debug("nor does a part of the group fit: %s", another)
            else:
                self.group = rest
        self._fail(error, now)

    def _write(self, group: Group, now: float) -> None:
        """Put a group on disk, then say so to its producers.

        Raises:
            ValueError, JournalError: see `Journal.append`.
        """
        done = self.journal.append(group.entries)
        self.room -= group.bytes
        self.tally.acked_samples += group.samples
        self.tally.fsync_seconds = done.seconds
        for route, nack in group.nacks:  # before the ACK, which would let the packet go as taken
            self._send(route, nack)
        for producer, sequence in group.last.items():
            session = self.sessions.of(producer)
            if session is not None:
                session.through = max(session.through, sequence)
                self._ack(session, now)

    def _fail(self, error: JournalError, now: float) -> None:
        self.tally.journal_failures += 1
        self._retry_at = now + _RETRY_SECONDS
        self._seldom.warn("journal", f"{error}; no credit until it can be written")
        self.ready, self.room, self.full = False, 0, isinstance(error, JournalFull)
        self.grant(now)

    def _forget(self, group: Group) -> None:
        self.group = Group()
        for producer in group.last:
            session = self.sessions.of(producer)
            if session is not None:
                self.sessions.drop(session)

    # -- credit

    def grant(self, now: float, quiet: Session | None = None) -> None:
        """Shares credit out anew; tells those whose share changed, but for `quiet`."""
        holders = list(self.sessions)
        room = 0 if self.closing or not self.ready else max(0, self.room - self.group.bytes)
        for session, credit in zip(holders, self.policy.plan(holders, room, now), strict=True):
            before = session.credit
            if before <= credit and (credit - before) * 4 <= before:
                continue  # not worth a message; but less is always told
            if (credit == 0) != (before == 0):
                session.revoked = before if session.heard >= session.since else 0
                session.since = now
                session.turns += credit > 0
            session.credit = credit
            if session is not quiet:
                self._ack(session, now)

    def flush(self, now: float) -> None:
        """Sends the ACKs that are due: to duplicates, and where one could not be sent before."""
        due, self._acks_due = self._acks_due, {}
        for route, session in due.items():
            if self.sessions.get(route) is session:
                self._ack(session, now)

    def probe(self, now: float) -> None:
        """Finds connections that are gone: libzmq tells only when something is sent to them."""
        for session in self.sessions:
            if now - max(session.heard, session.probed) >= _PROBE_SECONDS:
                self._ack(session, now)

    def farewell(self, reason: str) -> None:
        """BYE to all."""
        for session in self.sessions:
            self._send(session.route, Bye(reason))

    def _ack(self, session: Session, now: float) -> None:
        session.probed = now
        sent = self._send(session.route, Ack(session.through, session.credit))
        if sent is None:
            self.sessions.drop(session)
        elif not sent:
            self._acks_due[session.route] = session
