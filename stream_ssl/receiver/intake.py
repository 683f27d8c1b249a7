"""DATA from producers: which packets are accepted into the batch for the journal."""

from __future__ import annotations

import logging

from stream_ssl.decode_cost import extra_cost
from stream_ssl.rate_limited_logger import RateLimitedLogger
from stream_ssl.receiver.answers import Answers
from stream_ssl.receiver.credit import TAKES_LONG, Credit
from stream_ssl.receiver.group_commit import GroupCommit
from stream_ssl.receiver.records import Counters
from stream_ssl.receiver.sessions import ProducerTable, Session
from stream_ssl.wire import Data, Nack, WireError
from stream_ssl.wire.sample import is_capture_time

log = logging.getLogger(__name__)

MAX_WAITING = 65_536
"""Most packets that may wait for the journal; each needs about 1 KiB beside its bytes."""


class Intake:
    """Accepts each packet once, in sequence, within the limits and the memory of the receiver.

    The arguments are parts of a `ReceiverProtocol`.

    Attributes:
        captured: capture time of the latest sample, seconds since the Unix epoch.
        received: receipt time of the latest packet, seconds since the Unix epoch.
    """

    def __init__(
        self,
        group: GroupCommit,
        producers: ProducerTable,
        credit: Credit,
        answers: Answers,
        counters: Counters,
        max_samples: int,
    ) -> None:
        self.captured: float | None = None
        self.received: float | None = None
        self._group, self._producers = group, producers
        self._credit, self._answers, self._counters = credit, answers, counters
        self._max_samples = max_samples
        self._max_packet, self._memory = credit.policy.max_packet, credit.policy.total
        self._limited_log = RateLimitedLogger(log)

    def exceeds_memory(self, session: Session, data: Data) -> bool:
        """Return whether the packet is next, but the batch must be written before it."""
        batch = self._group.batch
        full = batch.bytes + data.size > self._memory or len(batch) >= MAX_WAITING
        return bool(batch) and full and data.sequence == session.expected

    def data(
        self, route: bytes, session: Session | None, data: Data, checksum: int, now: float
    ) -> None:
        """Accept a packet, or ask for the packet that is next.

        Args:
            session: the session of the connection; None: it has none.
            checksum: the verified checksum of the packet.
        """
        if session is None:
            self._counters.refused["hello-required"] += 1
            detail = "this receiver does not know the connection: say HELLO"
            self._answers.send(
                route, Nack(data.sequence, "hello-required", detail, permanent=False)
            )
        elif data.sequence < session.expected:
            self._counters.duplicates += _count_samples(data)
            session.record.duplicates += _count_samples(data)
            self._answers.ack_later(session)
        elif data.sequence > session.expected:
            self._answers.gap(
                session, f"packet {session.expected} is next, not {data.sequence}", now
            )
        elif self.exceeds_memory(session, data):
            self._answers.gap(session, "more than the credit granted: wait for an ACK", now)
        elif (extra := _extra(data)) and not self._credit.has_time(session, now):
            session.sent_back = True
            session.largest = max(session.largest, data.size)
            self._answers.gap(session, TAKES_LONG, now)
        else:
            self._accept(session, data, checksum, extra)

    def _accept(self, session: Session, data: Data, checksum: int, extra: int) -> None:
        """Add a packet to the batch that waits for the journal, or reject it permanently."""
        counters = self._counters
        samples = 1  # used if the header cannot be read
        try:
            samples = len(data)
            if data.size > self._max_packet:
                limit = self._max_packet
                raise WireError("oversize", f"{data.size} bytes; WELCOME allows {limit}")
            if samples > self._max_samples:
                raise WireError(
                    "oversize", f"{samples} samples; WELCOME allows {self._max_samples}"
                )
            self._group.batch.add(session.producer, session.epoch, data, checksum, extra)
        except WireError as error:
            counters.rejected[error.reason] += samples
            session.record.reject(error.reason, samples)
            counters.producer_rejected[session.counted_as] += samples
            text = f"{session.producer}: refused a packet: {error}"
            self._limited_log.warning(error.reason, text)
            nack = Nack(data.sequence, error.reason, str(error), permanent=True)
            self._group.batch.add_refused(session.producer, session.epoch, session.route, nack)
        else:
            counters.packets += 1
            counters.samples += samples
            counters.bytes += data.size
            session.record.packets += 1
            session.record.samples += samples
            session.record.bytes += data.size
            self.received = self._group.batch.entries[-1].received
            name = session.counted_as
            counters.producer_samples[name] += samples
            counters.producer_bytes[name] += data.size
            counters.producer_received[name] = self.received
            captured = float(data.fields["samples"][-1]["time"])
            if is_capture_time(captured):
                self.captured = counters.producer_captured[name] = captured
        self._count_missing(session)
        self._producers.senders.add(session.producer)
        least = self._credit.policy.least(session)
        session.take(data.size, data.size + extra, least, session.last_received)
        session.expected += 1
        session.gap_sent = 0.0
        session.sent_back = False

    def _count_missing(self, session: Session) -> None:
        if session.missing:
            self._counters.missing += session.missing
            self._limited_log.log(
                logging.ERROR,
                "missing",
                f"{session.producer}: packets {session.expected - session.missing} to "
                f"{session.expected - 1} were acknowledged once and are not in this journal",
            )
            session.missing = 0

    def damaged(self, route: bytes, session: Session | None, error: WireError, now: float) -> None:
        """Ask for the expected packet, because the sequence itself may be damaged."""
        self._counters.refused["checksum"] += 1
        self._limited_log.warning("checksum", f"a packet came damaged: {error}")
        sequence = 0
        if session is not None:
            session.gap_sent = now  # this NACK also answers the packets that follow
            sequence = session.expected
        self._answers.send(route, Nack(sequence, "checksum", str(error), permanent=False))


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
