"""The receiver's side of the protocol in docs/wire.md, without a socket."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from stream_ssl.decode_cost import UnreadCost, extra_cost
from stream_ssl.journal.errors import JournalError
from stream_ssl.rate_limited_logger import RateLimitedLogger, printable
from stream_ssl.receiver.access import Access, belongs
from stream_ssl.receiver.group_commit import CommitBatch, GroupCommit
from stream_ssl.receiver.sessions import (
    IDLE_SECONDS,
    TURN_BYTES,
    TURN_SECONDS,
    CreditPolicy,
    ProducerRecord,
    ProducerTable,
    Session,
    Sessions,
    least_served,
)
from stream_ssl.wire import CODECS, Ack, Bye, Data, Hello, Message, Nack, Welcome, WireError, decode
from stream_ssl.wire.messages import DATA_HEAD, Verdict, Verdicts
from stream_ssl.wire.run_folder import ANY_NAME

log = logging.getLogger(__name__)

MAX_FIRST = 1 << 62
MAX_WAITING = 65_536
"""Most packets that may wait for the journal; each needs about 1 KiB beside its bytes."""
_AGENT_LENGTH = 80  # most characters of a producer's `agent` in a log line
_GAP_SECONDS = 1.0  # seconds before the same gap is reported again, for packets in flight
_TAKES_LONG = "takes long to decode: send it again when there is credit"
_PROBE_SECONDS = 10.0  # seconds without a message after which a session is probed with an ACK

Send = Callable[[bytes, Message], bool | None]
"""Send a message to a connection. True: sent; False: would block; None: connection lost."""


@dataclass(slots=True)
class Counters:
    """The increments since the last ReceiverRecord, under the same names."""

    packets: int = 0
    samples: int = 0
    bytes: int = 0
    duplicates: int = 0
    missing: int = 0
    acked_samples: int = 0
    journal_failures: int = 0
    allow_list_errors: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    refused_last: dict[str, str] = field(default_factory=dict)
    fsync_seconds: float | None = None
    producer_samples: Counter[str] = field(default_factory=Counter)
    producer_bytes: Counter[str] = field(default_factory=Counter)
    producer_received: dict[str, float] = field(default_factory=dict)
    producer_captured: dict[str, float] = field(default_factory=dict)
    producer_rejected: Counter[str] = field(default_factory=Counter)
    producer_finished: dict[str, float] = field(default_factory=dict)
    producer_clock: dict[str, float] = field(default_factory=dict)


class ProtocolState:
    """The state of the protocol in one receiver: sessions, credit, and packets to commit.

    No message of a producer makes a method raise an exception.

    Args:
        group: the packets that wait for the journal.
        policy: the rule for sharing credit.
        access: the keys that may send; None: every peer that can connect.
        sessions: the table of the connected producers.
        max_samples: most samples in one packet.
        max_names: most producer names per key; in plain text, most names in total.
        send: the function that sends a message to a connection.

    Attributes:
        room: the cost that the journal and the learner can accept, as last measured.
        unread: the extra cost of the records that the learner has not read.
        scarce: whether the room is small, so that it grows only as fast as the learner reads.
        closing: whether the receiver stops: it grants no credit and opens no sessions.
        captured: capture time of the latest sample, seconds since the Unix epoch.
        received: receipt time of the latest packet, seconds since the Unix epoch.
    """

    def __init__(
        self,
        group: GroupCommit,
        policy: CreditPolicy,
        access: Access | None,
        sessions: Sessions,
        max_samples: int,
        max_names: int,
        send: Send,
    ) -> None:
        self.group = group
        self.journal = group.journal
        self.policy = policy
        self.sessions = sessions
        self.counters = Counters()
        self.producers = ProducerTable(sessions.limit)
        self.closing = False
        self.room = 0
        self.unread = UnreadCost()
        self.scarce = False
        self.captured: float | None = None
        self.received: float | None = None
        self._access = access
        self._max_samples, self._max_names = max_samples, max_names
        self._send = send
        self._epoch = time.time_ns()
        self._acks_due: dict[bytes, Session] = {}
        self._limited_log = RateLimitedLogger(log)
        self._hello_log = RateLimitedLogger(log, lines=20)
        # HELLOs that wait for a commit, by producer.
        self._hellos: dict[str, tuple[bytes, str | None, Hello]] = {}
        self._known: set[str] = set()  # producers that have sent a packet since the start

    def table(self) -> list[ProducerRecord]:
        """Return a record of each producer, with its present connection and credit."""
        records = self.producers.copy()
        for record in records:
            session = self.sessions.by_producer(record.name)
            record.credit = 0 if session is None else session.credit
            record.connected = None if session is None else record.connected
        return records

    @property
    def wants_verdicts(self) -> bool:
        """Whether any connected producer has asked for verdicts."""
        return any(session.verdicts for session in self.sessions)

    def tell(self, producer: str, rows: Sequence[Verdict]) -> None:
        """Send verdicts to a producer that asked for them; drop verdicts that would block."""
        session = self.sessions.by_producer(producer)
        if session is not None and session.verdicts:
            self._send(session.route, Verdicts(tuple(rows)))

    # -- messages from producers

    def handle(
        self,
        route: bytes,
        user: str | None,
        frames: Sequence[memoryview],
        now: float,
        peer: str = "an unknown address",
    ) -> None:
        """Handle one message and send the answers.

        Args:
            route: the routing id of the connection.
            user: the public key of the connection; None in plain text.
            frames: the frames of the message.
            now: the time of time.monotonic.
            peer: the address of the sender, for the log.
        """
        try:
            self._handle(route, user, frames, now)
        except WireError as error:
            whom = peer + (f" with the public key {user}" if user else "")
            session = self.sessions.by_route(route)
            named = f"{session.producer} at {whom}" if session is not None else whom
            self.counters.refused_last[error.reason] = named
            self._refuse(route, Nack(0, error.reason, str(error), permanent=True), f" from {whom}")
        except Exception:
            self.note_internal()

    def note_internal(self) -> None:
        """Count and log the exception being handled as an internal error."""
        self.counters.refused["internal"] += 1
        text = "a message could not be handled and was left out"
        self._limited_log.log(logging.ERROR, "internal", text, exc_info=True)

    def _handle(
        self, route: bytes, user: str | None, frames: Sequence[memoryview], now: float
    ) -> None:
        session = self._session(route, user)
        if self._access is not None and not self._access.knows(user):
            raise WireError("unauthorised", "this key is not, or no longer, on the allow-list")
        if session is not None:
            self.sessions.touch(session, now)
            self.producers.heard(session.record, now)
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
                self.counters.producer_finished[self._listed_name(session)] = 1.0
        else:
            raise WireError("malformed", f"{type(message).__name__} is the receiver's to send")

    def _session(self, route: bytes, user: str | None) -> Session | None:
        """Return the session of a connection, if its key sent HELLO there and is still allowed."""
        session = self.sessions.by_route(route)
        if session is None or session.user != user:
            return None  # another key now uses a routing id of an earlier connection
        if self._access is not None and not self._access.permits(user, session.producer):
            self.sessions.drop(session)  # the key was revoked or is now listed under another name
            return None
        return session

    def _hello(
        self, route: bytes, user: str | None, hello: Hello, now: float, wait: bool = True
    ) -> None:
        name = hello.producer
        if self._access is not None and not self._access.permits(user, name):
            raise WireError("unauthorised", f"this key may not speak for producer {name!r}")
        if hello.first > MAX_FIRST:
            raise WireError("malformed", f"HELLO: first {hello.first} is beyond {MAX_FIRST}")
        if self.closing:
            return
        waiting = self.group.batch.epochs.get(name)
        if waiting is not None and (wait or waiting != hello.epoch):
            # WELCOME must have the newest `resume`, so HELLO waits for the next commit. If the
            # commit fails, only the epoch that sent the waiting packets gets an answer: another
            # epoch would reuse their sequences and take their ACK for its own.
            self._hellos[name] = (route, user, hello)
            if not wait:
                text = f"producer {name} waits until the disk has what its run before has sent"
                self._limited_log.warning("waits", text)
            return
        other = self.sessions.by_producer(name)
        if other is not None and other.route != route and self._yields(other, hello, now):
            raise WireError("superseded", f"a newer {name!r} is connected (epoch {other.epoch})")
        if not self.journal.state(name).sequence:
            self._check_names(user, name)
        # Epoch 0 asks whether the name is free; HELLO with the real epoch follows.
        again = other is not None and other.route == route and other.epoch in (0, hello.epoch)
        session = self._open_session(route, user, hello, now, again)
        if self.policy.share(len(self.sessions), self.room):
            self.grant(now, quiet=session)  # otherwise the session waits for a turn
        durable = self.journal.state(name)
        welcome = Welcome(
            durable.sequence,
            durable.resume_token,
            session.credit,
            self.policy.max_packet,
            self._max_samples,
            CODECS,
            self._epoch,
            durable.written,
        )
        if not again:
            after = f"goes on after packet {durable.sequence}" if durable.sequence else "is new"
            text = f"producer {name} ({printable(hello.agent, _AGENT_LENGTH)}) {after}"
            self._hello_log.log(logging.INFO, "hello", text)
        self._send(route, welcome)

    def _open_session(
        self, route: bytes, user: str | None, hello: Hello, now: float, again: bool
    ) -> Session:
        name = hello.producer
        durable = self.journal.state(name).sequence
        expected = max(durable, self.group.batch.last_sequences.get(name, 0)) + 1
        missing = max(0, hello.first - expected)
        if missing and durable and name in self._known:
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
            durable,
            credit_changed=now,
            last_received=now,
            last_acked=now,
            missing=missing,
            served=least_served(list(self.sessions)),
            record=self.producers.opened(
                name, self._key_name(user), printable(hello.agent, _AGENT_LENGTH), now, again
            ),
            verdicts=hello.verdicts,
        )
        self.sessions.open(session)
        self.counters.producer_finished[self._listed_name(session)] = 0.0
        if hello.clock and math.isfinite(hello.clock):
            self.counters.producer_clock[self._listed_name(session)] = hello.clock - time.time()
        self._acks_due.pop(route, None)
        return session

    def _check_names(self, user: str | None, name: str) -> None:
        """Reject a new name if its key has the most names, because the journal stores each name.

        Raises:
            WireError: with reason "names".
        """
        batch = self.group.batch
        key = self._key_name(user)
        names = {
            *self.journal.producers(),
            *batch.last_sequences,
            *(session.producer for session in self.sessions),
        }
        used = sum(key is None or belongs(other, key) for other in names - {name})
        if used >= self._max_names:
            raise WireError(
                "names",
                f"{name!r} would be one of more than {self._max_names} producers"
                f"{'' if key is None else f' of the key {key!r}'}: use a name again, or raise "
                "receiver.max_names; one that sends nothing for 30 days is forgotten",
            )

    def _key_name(self, user: str | None) -> str | None:
        return self._access.allow.name_of(user or "") if self._access is not None else None

    def _yields(self, other: Session, hello: Hello, now: float) -> bool:
        """Return whether a HELLO loses against the producer's other connection.

        Otherwise the other connection is superseded, if its epoch is older.
        """
        if other.epoch > hello.epoch or not hello.epoch:
            # A clock may have gone back, so the other session wins only if it is still connected.
            # It also wins against epoch 0, which only asks whether the name is free.
            self._ack(other, now)
            if self.sessions.by_producer(hello.producer) is other:
                return True
        elif other.epoch < hello.epoch:
            detail = f"a newer {hello.producer!r} has connected (epoch {hello.epoch})"
            self._refuse(other.route, Nack(0, "superseded", detail, permanent=True))
        return False

    def _data(
        self, route: bytes, session: Session | None, data: Data, checksum: int, now: float
    ) -> None:
        if session is None:
            self.counters.refused["hello-required"] += 1
            detail = "this receiver does not know the connection: say HELLO"
            self._send(route, Nack(data.sequence, "hello-required", detail, permanent=False))
        elif data.sequence < session.expected:
            self.counters.duplicates += _count_samples(data)
            session.record.duplicates += _count_samples(data)
            self._acks_due[route] = session
        elif data.sequence > session.expected:
            self._gap(session, f"packet {session.expected} is next, not {data.sequence}", now)
        elif self._exceeds_memory(data.size):
            if self.commit(now):  # this answers waiting HELLOs, which may supersede the session
                self._data(route, self._session(route, session.user), data, checksum, now)
            else:
                self._gap(session, "more than the credit granted: wait for an ACK", now)
        elif (extra := _extra(data)) and not self._has_time(session, now):
            session.sent_back = True
            session.largest = max(session.largest, data.size)
            self._gap(session, _TAKES_LONG, now)
        else:
            self._accept(session, data, checksum, extra)

    def _has_time(self, session: Session, now: float) -> bool:
        """Return whether a packet that takes long to decode may be accepted now.

        Credit counts bytes. A producer may have sent packets with hours of decoding before its
        credit was reduced.
        """
        on_credit = session.credit > 0 or now - session.credit_changed < TURN_SECONDS
        return on_credit and self.unread.waiting + self.group.batch.extra < self.unread.most

    def _exceeds_memory(self, size: int) -> bool:
        """Return whether `size` more bytes would exceed the memory for the batch."""
        batch = self.group.batch
        return bool(batch) and (batch.bytes + size > self.policy.total or len(batch) >= MAX_WAITING)

    def _accept(self, session: Session, data: Data, checksum: int, extra: int) -> None:
        """Add a packet to the batch that waits for the journal, or reject it permanently."""
        counters = self.counters
        samples = 1  # used if the header cannot be read
        try:
            samples = len(data)
            if data.size > self.policy.max_packet:
                limit = self.policy.max_packet
                raise WireError("oversize", f"{data.size} bytes; WELCOME allows {limit}")
            if samples > self._max_samples:
                raise WireError(
                    "oversize", f"{samples} samples; WELCOME allows {self._max_samples}"
                )
            self.group.batch.add(session.producer, session.epoch, data, checksum, extra)
        except WireError as error:
            counters.rejected[error.reason] += samples
            session.record.reject(error.reason, samples)
            counters.producer_rejected[self._listed_name(session)] += samples
            text = f"{session.producer}: refused a packet: {error}"
            self._limited_log.warning(error.reason, text)
            nack = Nack(data.sequence, error.reason, str(error), permanent=True)
            self.group.batch.add_refused(session.producer, session.epoch, session.route, nack)
        else:
            counters.packets += 1
            counters.samples += samples
            counters.bytes += data.size
            session.record.packets += 1
            session.record.samples += samples
            session.record.bytes += data.size
            self.received = self.group.batch.entries[-1].received
            name = self._listed_name(session)
            counters.producer_samples[name] += samples
            counters.producer_bytes[name] += data.size
            counters.producer_received[name] = self.received
            captured = float(data.fields["samples"][-1]["time"])
            if math.isfinite(captured):
                self.captured = counters.producer_captured[name] = captured
        self._count_missing(session)
        self._known.add(session.producer)
        least = self.policy.least(session)
        session.take(data.size, data.size + extra, least, session.last_received)
        session.expected += 1
        session.gap_sent = 0.0
        session.sent_back = False

    def _listed_name(self, session: Session) -> str:
        """Return the name under which a producer is counted.

        This is the name of its key on the allow-list, or its own name in plain text or for "*".
        """
        name = self._key_name(session.user)
        return session.producer if name is None or name == ANY_NAME else name

    def _count_missing(self, session: Session) -> None:
        if session.missing:
            self.counters.missing += session.missing
            self._limited_log.log(
                logging.ERROR,
                "missing",
                f"{session.producer}: packets {session.expected - session.missing} to "
                f"{session.expected - 1} were acknowledged once and are not in this journal",
            )
            session.missing = 0

    def _gap(self, session: Session, detail: str, now: float) -> None:
        """Send NACK "gap" for the expected sequence, once, because more packets are in flight."""
        if now - session.gap_sent >= _GAP_SECONDS:
            session.gap_sent = now
            self._send(session.route, Nack(session.expected, "gap", detail, permanent=False))

    def _damaged(self, route: bytes, session: Session | None, error: WireError, now: float) -> None:
        """Ask for the expected packet, because the sequence itself may be damaged."""
        self.counters.refused["checksum"] += 1
        self._limited_log.warning("checksum", f"a packet came damaged: {error}")
        sequence = 0
        if session is not None:
            session.gap_sent = now  # this NACK also answers the packets that follow
            sequence = session.expected
        self._send(route, Nack(sequence, "checksum", str(error), permanent=False))

    def _refuse(self, route: bytes, nack: Nack, whom: str = "") -> None:
        self.counters.refused[nack.reason] += 1
        text = f"refused a message{whom} ({nack.reason}): {nack.detail}"
        self._limited_log.warning(nack.reason, text)
        self._send(route, nack)

    # -- commit, then acknowledge

    def commit(self, now: float) -> bool:
        """Write the batch, acknowledge the durable packets, and return whether none waits."""
        try:
            result = self.group.commit(now)
        except ValueError:
            log.exception("a batch was out of order; its producers are asked to say HELLO")
            self._drop_sessions(self.group.discard())
            self._resume_hellos(now)
            return True
        if result.durable is None and result.error is None:
            return not self.group.batch  # nothing to write, or too early to try again
        if result.durable is not None:
            self.counters.fsync_seconds = result.fsync_seconds
            self._acknowledge(result.durable, now)
        if result.error is not None:
            self._stop_credit(result.error, now)
        self._resume_hellos(now)
        return not self.group.batch

    def _resume_hellos(self, now: float) -> None:
        """Answer the HELLOs that waited, as far as the commit allows."""
        waiting, self._hellos = self._hellos, {}
        for route, user, hello in waiting.values():
            try:
                self._hello(route, user, hello, now, wait=False)
            except WireError as error:
                self._refuse(route, Nack(0, error.reason, str(error), permanent=True))
            except Exception:
                self.note_internal()

    def _acknowledge(self, durable: CommitBatch, now: float) -> None:
        self.room -= durable.cost
        self.unread.add(self.journal.last, durable.extra)
        if durable.extra:  # expensive packets use up the room quickly, so do not wait for the tick
            self.grant(now)
        self.counters.acked_samples += durable.samples
        for route, nack in durable.nacks:  # before the ACK, which covers the rejected packet too
            self._send(route, nack)
        for producer, sequence in durable.last_sequences.items():
            session = self.sessions.by_producer(producer)
            if session is not None:
                session.through = max(session.through, sequence)
                self._ack(session, now)

    def _stop_credit(self, error: JournalError, now: float) -> None:
        self.counters.journal_failures += 1
        self._limited_log.warning("journal", f"{error}; no credit until it can be written")
        self.room = 0
        self.grant(now)

    def _drop_sessions(self, batch: CommitBatch) -> None:
        for producer in batch.last_sequences:
            session = self.sessions.by_producer(producer)
            if session is not None:
                self.sessions.drop(session)

    # -- credit

    def grant(self, now: float, quiet: Session | None = None) -> None:
        """Divide the credit, and send an ACK to each session whose credit changed, except `quiet`.

        Only a rise of more than a quarter changes the credit; every fall does.
        """
        sessions = list(self.sessions)
        floor = self._note_idle(sessions, now)
        blocked = self.closing or not self.group.ready
        room = 0 if blocked else max(0, self.room - self.group.batch.cost)
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
                self._ack(session, now)
        for session in sessions:
            if session.sent_back and session.credit and self._has_time(session, now):
                self._gap(session, _TAKES_LONG, now)  # packets received meanwhile were dropped

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

    def flush(self, now: float) -> None:
        """Send the ACKs that are due: for duplicates, and those that would have blocked before."""
        due, self._acks_due = self._acks_due, {}
        for route, session in due.items():
            if self.sessions.by_route(route) is session:
                self._ack(session, now)

    def probe(self, now: float) -> None:
        """Send an ACK to silent sessions, because libzmq reports lost connections only on sends."""
        for session in self.sessions:
            if now - max(session.last_received, session.last_acked) >= _PROBE_SECONDS:
                self._ack(session, now)

    def farewell(self, reason: str) -> None:
        """Send BYE to all sessions."""
        for session in self.sessions:
            self._send(session.route, Bye(reason))

    def _ack(self, session: Session, now: float) -> None:
        session.last_acked = now
        sent = self._send(session.route, Ack(session.through, session.credit))
        if sent is None:
            self.sessions.drop(session)
        elif not sent:
            self._acks_due[session.route] = session


def _extra(data: Data) -> int:
    """Return the extra cost of decoding a packet, or 0 if its header cannot be read."""
    try:
        return extra_cost(data.fields["samples"], data.payload)
    except WireError:
        return 0


def _count_samples(data: Data) -> int:
    """Return the number of samples in a packet, or 1 if its header cannot be read."""
    try:
        return len(data)
    except WireError:
        return 1
