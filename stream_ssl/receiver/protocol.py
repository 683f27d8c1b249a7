"""The receiver's side of the protocol in docs/wire.md, without a socket."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from stream_ssl.decode_cost import extra_cost
from stream_ssl.journal.errors import BudgetUsed, JournalError
from stream_ssl.rate_limited_logger import RateLimitedLogger
from stream_ssl.receiver.access import Access
from stream_ssl.receiver.answers import Answers, Send
from stream_ssl.receiver.credit import TAKES_LONG, Credit, CreditPolicy
from stream_ssl.receiver.greeter import Greeter
from stream_ssl.receiver.group_commit import CommitBatch, GroupCommit
from stream_ssl.receiver.records import SOURCE_ENDED, STOPPED, Counters
from stream_ssl.receiver.sessions import ProducerRecord, ProducerTable, Session, Sessions
from stream_ssl.wire import Bye, Data, Hello, Nack, WireError, decode
from stream_ssl.wire.messages import DATA_HEAD
from stream_ssl.wire.sample import is_capture_time

log = logging.getLogger(__name__)

MAX_WAITING = 65_536
"""Most packets that may wait for the journal; each needs about 1 KiB beside its bytes."""


class ReceiverProtocol:
    """Handles the messages of producers, commits their packets, and then acknowledges them.

    Each packet is accepted once, in sequence, within the limits and the memory of the receiver. No
    message of a producer makes a method raise an exception.

    Args:
        group: the packets that wait for the journal.
        policy: the rule for sharing credit.
        access: the keys that may send; None: every peer that can connect.
        sessions: the table of the connected producers.
        max_samples: most samples in one packet.
        max_names: most producer names per key; in plain text, most names in total.
        send: the function that sends a message to a connection.

    Attributes:
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
        self.sessions = sessions
        self.counters = Counters()
        self.producers = ProducerTable(sessions.limit)
        self.answers = Answers(sessions, self.counters, send)
        self.credit = Credit(group, policy, sessions, self.answers)
        self.captured: float | None = None
        self.received: float | None = None
        self._greeter = Greeter(
            access,
            group,
            sessions,
            self.producers,
            self.credit,
            self.answers,
            self.counters,
            max_samples,
            max_names,
        )
        self._access = access
        self._max_samples = max_samples
        self._limited_log = RateLimitedLogger(log)

    def table(self) -> list[ProducerRecord]:
        """Return a record of each producer, with its present connection and credit."""
        records = self.producers.copy()
        for record in records:
            session = self.sessions.by_producer(record.name)
            record.credit = 0 if session is None else session.credit
            record.connected = None if session is None else record.connected
        return records

    def note_internal(self) -> None:
        """Count and log the exception being handled as an internal error."""
        self.counters.refused["internal"] += 1
        text = "a message could not be handled and was left out"
        self._limited_log.log(logging.ERROR, "internal", text, exc_info=True)

    # -- messages from producers

    def handle(
        self,
        route: bytes,
        user: str | None,
        frames: Sequence[memoryview],
        now: float,
        peer: str = "an unknown address",
    ) -> None:
        """Handle one message and send the answers; the log names the sender's address, `peer`."""
        try:
            self._handle(route, user, frames, now)
        except WireError as error:
            whom = peer + (f" with the public key {user}" if user else "")
            session = self.sessions.by_route(route)
            named = f"{session.producer} at {whom}" if session is not None else whom
            self.counters.refused_last[error.reason] = named
            nack = Nack(0, error.reason, str(error), permanent=True)
            self.answers.refuse(route, nack, f" from {whom}")

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
            if session is not None and self.exceeds_memory(session, message):
                self.commit(now)  # this answers waiting HELLOs, which may supersede the session
                session = self._session(route, user)
            self._data(route, session, message, DATA_HEAD.unpack(frames[1])[1], now)
        elif isinstance(message, Hello):
            self._greeter.hello(route, user, message, now)
        elif isinstance(message, Bye):
            if session is not None:
                self.sessions.drop(session)
                ended = message.reason == Bye.ENDED
                how = SOURCE_ENDED if ended else STOPPED
                self.counters.producer_finished[session.counted_as] = how
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

    # -- packets into the batch

    def exceeds_memory(self, session: Session, data: Data) -> bool:
        """Return whether the packet is next, but the batch must be written before it."""
        batch = self.group.batch
        full = batch.bytes + data.size > self.credit.policy.total or len(batch) >= MAX_WAITING
        return bool(batch) and full and data.sequence == session.expected

    def _data(
        self, route: bytes, session: Session | None, data: Data, checksum: int, now: float
    ) -> None:
        """Accept a packet, or ask for the packet that is next.

        Args:
            session: the session of the connection; None: it has none.
            checksum: the verified checksum of the packet.
        """
        if session is None:
            self.counters.refused["hello-required"] += 1
            detail = "this receiver does not know the connection: say HELLO"
            self.answers.send(route, Nack(data.sequence, "hello-required", detail, permanent=False))
        elif data.sequence < session.expected:
            samples = _count_samples(data)
            self.counters.duplicates += samples
            session.record.duplicates += samples
            self.answers.ack_later(session)
        elif data.sequence > session.expected:
            self.answers.gap(
                session, f"packet {session.expected} is next, not {data.sequence}", now
            )
        elif self.exceeds_memory(session, data):
            self.answers.gap(session, "more than the credit granted: wait for an ACK", now)
        elif (extra := _extra(data)) and not self.credit.has_time(session, now):
            session.sent_back = True
            session.largest = max(session.largest, data.size)
            self.answers.gap(session, TAKES_LONG, now)
        else:
            self._accept(session, data, checksum, extra)

    def _accept(self, session: Session, data: Data, checksum: int, extra: int) -> None:
        """Add a packet to the batch that waits for the journal, or reject it permanently."""
        counters = self.counters
        samples = 1  # used if the header cannot be read
        try:
            samples = len(data)
            if data.size > (most := self.credit.policy.max_packet):
                raise WireError("oversize", f"{data.size} bytes; WELCOME allows {most}")
            if samples > (most := self._max_samples):
                raise WireError("oversize", f"{samples} samples; WELCOME allows {most}")
            self.group.batch.add(session.producer, session.epoch, data, checksum, extra)
        except WireError as error:
            counters.rejected[error.reason] += samples
            session.record.reject(error.reason, samples)
            counters.producer_rejected[session.counted_as] += samples
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
            name = session.counted_as
            counters.producer_samples[name] += samples
            counters.producer_bytes[name] += data.size
            counters.producer_received[name] = self.received
            captured = float(data.fields["samples"][-1]["time"])
            if is_capture_time(captured):
                self.captured = counters.producer_captured[name] = captured
        self._count_missing(session)
        self.producers.senders.add(session.producer)
        least = self.credit.policy.least(session)
        session.take(data.size, data.size + extra, least, session.last_received)
        session.expected += 1
        session.gap_sent = 0.0
        session.sent_back = False

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

    def _damaged(self, route: bytes, session: Session | None, error: WireError, now: float) -> None:
        """Ask for the expected packet, because the sequence itself may be damaged."""
        self.counters.refused["checksum"] += 1
        self._limited_log.warning("checksum", f"a packet came damaged: {error}")
        sequence = 0
        if session is not None:
            session.gap_sent = now  # this NACK also answers the packets that follow
            sequence = session.expected
        self.answers.send(route, Nack(sequence, "checksum", str(error), permanent=False))

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
        for route, user, hello in self._greeter.take_waiting():
            try:
                self._greeter.hello(route, user, hello, now, wait=False)
            except WireError as error:
                nack = Nack(0, error.reason, str(error), permanent=True)
                self.answers.refuse(route, nack)
            except Exception:
                self.note_internal()

    def _acknowledge(self, durable: CommitBatch, now: float) -> None:
        self.credit.use(durable, self.journal.last, now)
        self.counters.acked_samples += durable.samples
        for route, nack in durable.nacks:  # before the ACK, which covers the rejected packet too
            self.answers.send(route, nack)
        for producer, sequence in durable.last_sequences.items():
            session = self.sessions.by_producer(producer)
            if session is not None:
                session.through = max(session.through, sequence)
                self.answers.ack(session, now)

    def _stop_credit(self, error: JournalError, now: float) -> None:
        self.counters.journal_failures += not isinstance(error, BudgetUsed)
        self._limited_log.warning("journal", f"{error}; no credit until it can be written")
        self.credit.room = 0
        self.credit.grant(now)

    def _drop_sessions(self, batch: CommitBatch) -> None:
        for producer in batch.last_sequences:
            session = self.sessions.by_producer(producer)
            if session is not None:
                self.sessions.drop(session)


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
