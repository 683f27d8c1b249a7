"""What the receiver answers to each producer: the protocol of docs/wire.md without a socket."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from stream_ssl.decode_cost import UnreadCost, extra_cost
from stream_ssl.journal.journal import JournalError
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
"""Packets that may wait for a journal that takes none: each needs a KiB beside its bytes."""
_AGENT_LENGTH = 80  # characters of a client's own name that a log line shows
_GAP_SECONDS = 1.0  # before the same gap is reported again: packets in flight arrive behind it
_TAKES_LONG = "takes long to decode: send it again when there is credit"
_PROBE_SECONDS = 10.0  # without a message, after which a session is probed with an ACK

Send = Callable[[bytes, Message], bool | None]
"""Sends to a connection. True: sent; False: it would block; None: the connection is gone."""


@dataclass(slots=True)
class Counters:
    """Increments since the last ReceiverRecord, which has the same names."""

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
    """Sessions and credit of one receiver. Nothing that a producer sends makes it raise.

    Args:
        group: the packets that wait for the journal.
        policy: how credit is shared.
        access: who may send; None: everybody who can connect.
        sessions: the table to keep.
        max_samples: of one packet.
        max_names: producers that one key may speak for; in plain text: all together.
        send: how to answer.

    Attributes:
        room: cost that journal and learner can take, as last measured.
        unread: the extra cost of what the learner has not read.
        scarce: that is little, and comes as fast as the learner makes it.
        closing: no more credit, no new sessions.
        captured, received: times of the latest sample and packet, seconds since the Unix epoch.
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
        # Those that wait for a commit, by producer.
        self._hellos: dict[str, tuple[bytes, str | None, Hello]] = {}
        self._known: set[str] = set()  # producers of whom this receiver has accepted a packet

    def table(self) -> list[ProducerRecord]:
        """What each producer did, with its connection and credit of now."""
        records = self.producers.copy()
        for record in records:
            session = self.sessions.by_producer(record.name)
            record.credit = 0 if session is None else session.credit
            record.connected = None if session is None else record.connected
        return records

    @property
    def wants_verdicts(self) -> bool:
        """Whether any producer has asked how its samples fare."""
        return any(session.verdicts for session in self.sessions)

    def tell(self, producer: str, rows: Sequence[Verdict]) -> None:
        """Tell a producer how samples fared, if it has asked; what cannot be sent now never is."""
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
        """Answer one message; `peer` is the sender's address for the log."""
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
        """Count and log the exception being handled, which is an error of this program."""
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
        """The session of a connection, if this key has said HELLO there and may still do so."""
        session = self.sessions.by_route(route)
        if session is None or session.user != user:
            return None  # another key on a routing id that was someone else's
        if self._access is not None and not self._access.permits(user, session.producer):
            self.sessions.drop(session)  # revoked, or listed under another name by now
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
            # WELCOME's `resume` must be up to date, but a HELLO is not worth an fsync of its own.
            # While the disk takes nothing, only who sent what waits is answered: another would give
            # its packets the same sequences, and take the ACK of these for its own.
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
        # A producer asks by epoch 0 whether its name is free, then says HELLO with its own.
        again = other is not None and other.route == route and other.epoch in (0, hello.epoch)
        session = self._open_session(route, user, hello, now, again)
        if self.policy.share(len(self.sessions), self.room):
            self.grant(now, quiet=session)  # else it waits for a turn
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
        """Refuses a new name if its key has enough: the journal keeps a state for each."""
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
        """Whether a HELLO must give way to the producer's other connection; else that one ends."""
        if other.epoch > hello.epoch or not hello.epoch:
            # A clock may have gone back, so the other one wins only if it is still connected. It
            # also wins over a question (epoch 0) while it is about to claim the name itself.
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
            if self.commit(now):  # and has answered the HELLOs that waited: it may be superseded
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
        """Whether a packet that takes long to decode may come in now.

        Credit counts bytes, and a producer may have sent hours of decoding before its credit fell.
        """
        on_credit = session.credit > 0 or now - session.credit_changed < TURN_SECONDS
        return on_credit and self.unread.waiting + self.group.batch.extra < self.unread.most

    def _exceeds_memory(self, size: int) -> bool:
        """Whether the batch cannot hold `size` more bytes within the budget of memory."""
        batch = self.group.batch
        return bool(batch) and (batch.bytes + size > self.policy.total or len(batch) >= MAX_WAITING)

    def _accept(self, session: Session, data: Data, checksum: int, extra: int) -> None:
        """Adds a packet to the batch that waits for the journal, or refuses it for good."""
        counters = self.counters
        samples = 1  # where the header cannot tell
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
        """The name of its key on the allow-list; in plain text, or for "*", the producer's own."""
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
        """Sends the producer back to the expected sequence, once: more packets are in flight."""
        if now - session.gap_sent >= _GAP_SECONDS:
            session.gap_sent = now
            self._send(session.route, Nack(session.expected, "gap", detail, permanent=False))

    def _damaged(self, route: bytes, session: Session | None, error: WireError, now: float) -> None:
        """Asks for the expected packet again, since the damage may be in the sequence."""
        self.counters.refused["checksum"] += 1
        self._limited_log.warning("checksum", f"a packet came damaged: {error}")
        sequence = 0
        if session is not None:
            session.gap_sent = now  # this NACK answers the packets behind it too
            sequence = session.expected
        self._send(route, Nack(sequence, "checksum", str(error), permanent=False))

    def _refuse(self, route: bytes, nack: Nack, whom: str = "") -> None:
        self.counters.refused[nack.reason] += 1
        text = f"refused a message{whom} ({nack.reason}): {nack.detail}"
        self._limited_log.warning(nack.reason, text)
        self._send(route, nack)

    # -- commit, then acknowledge

    def commit(self, now: float) -> bool:
        """Writes the batch and acknowledges what is durable; whether nothing waits any more."""
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
        """Answers the HELLOs that waited, as far as the commit allows."""
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
        if durable.extra:  # few bytes of credit take much of the room: do not wait for the tick
            self.grant(now)
        self.counters.acked_samples += durable.samples
        for route, nack in durable.nacks:  # before the ACK, which covers the refused packet too
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
        """Shares credit out, and sends an ACK where a share changed, except to `quiet`."""
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
                continue  # a small rise is not worth a message; any fall is
            if (credit == 0) != (before == 0):
                used = session.last_received >= session.credit_changed
                session.revoked = int(before * session.charge) if used else 0
                session.credit_changed = now
                if before and not used:  # those who send come first now
                    session.served = max(session.served, waited_for)
            session.credit = credit
            if session is not quiet:
                self._ack(session, now)
        for session in sessions:
            if session.sent_back and session.credit and self._has_time(session, now):
                self._gap(session, _TAKES_LONG, now)  # what came meanwhile was passed over

    def _note_idle(self, sessions: list[Session], now: float) -> int:
        """Who has credit and sends little is owed nothing; who sends nothing may wait to send a
        large packet. Returns what the least-served of the greedy has had."""
        idle = [
            session
            for session in sessions
            if session.credit
            and now - max(session.last_received, session.credit_changed) >= IDLE_SECONDS
        ]
        for session in idle:
            session.greedy = False
            if not session.sent_back:  # else what waits is known, and comes again
                session.largest = 0
        floor = least_served(sessions)
        for session in sessions:
            if session.credit and not session.greedy:
                session.served = max(session.served, floor)
        return floor

    def flush(self, now: float) -> None:
        """Sends the ACKs that are due: to duplicates, and where one could not be sent before."""
        due, self._acks_due = self._acks_due, {}
        for route, session in due.items():
            if self.sessions.by_route(route) is session:
                self._ack(session, now)

    def probe(self, now: float) -> None:
        """Sends an ACK to silent sessions: libzmq reports a lost connection only on sending."""
        for session in self.sessions:
            if now - max(session.last_received, session.last_acked) >= _PROBE_SECONDS:
                self._ack(session, now)

    def farewell(self, reason: str) -> None:
        """Sends BYE to all."""
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
    """Return the cost of decoding a packet beyond its bytes; 0 where the header cannot tell."""
    try:
        return extra_cost(data.fields["samples"], data.payload)
    except WireError:
        return 0


def _count_samples(data: Data) -> int:
    """The number of samples; 1 where the header cannot tell."""
    try:
        return len(data)
    except WireError:
        return 1
