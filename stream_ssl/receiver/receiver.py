"""The receiver, which accepts packets from producers and writes them to the journal."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import zmq

from stream_ssl.journal.consumer_offsets import ConsumerOffsets
from stream_ssl.journal.journal import Journal
from stream_ssl.receiver.access import Access
from stream_ssl.receiver.credit import CreditPolicy
from stream_ssl.receiver.group_commit import GroupCommit
from stream_ssl.receiver.journal_room import JournalRoom
from stream_ssl.receiver.listener import Listener
from stream_ssl.receiver.protocol import ReceiverProtocol
from stream_ssl.receiver.records import ReceiverRecord
from stream_ssl.receiver.sessions import ProducerRecord, Sessions
from stream_ssl.receiver.verdicts import VerdictInbox

MOST_SAMPLES = 1024  # in one packet; by default a producer sends a packet with 64 samples
MOST_SESSIONS = 4096  # connected producers; beyond, the longest silent one must send HELLO again
GROUP_PACKETS = 64  # number of packets after which a group is committed
GROUP_SECONDS = 0.005  # age at which a group is committed; an fsync of a common disk takes as long
DRAIN_SECONDS = 2.0  # for packets in flight when the receiver stops; service managers wait longer
_TICK_SECONDS = 0.05
_IDLE_SECONDS = 1.0
_BURST = 256  # most messages read in one step of the loop
_LINGER_MS = 1000  # for answers that have not left when the receiver stops
_QUIET_SECONDS = 0.1  # seconds without a packet after which a drain ends


class Receiver:
    """The server that producers connect to, with the protocol of docs/wire.md.

    One thread runs the loop `run`. While it waits for an fsync, libzmq's own threads continue to
    receive.

    Args:
        journal: the journal to write; the receiver does not close it.
        offsets: the positions that the learner publishes.
        bind: the ZeroMQ address to listen on; port 0 selects a free port.
        access: the keys and the allow-list. None: plain text, which is possible only on loopback.
        max_packet: most bytes of a packet.
        credit: most unacknowledged bytes of one producer, at least `max_packet`. None: 16 MiB, or
            `max_packet` if that is more, within `total_credit`.
        total_credit: most unacknowledged bytes of all producers together, at least `credit`. It
            bounds the memory of the receiver.
        max_lag_bytes: most bytes that the learner may be behind before producers get no more
            credit. Images that take long to decode count for more bytes. None: only the budget of
            the journal limits the lag.
        max_names: most producer names per key, or in total for plain text, at least 1. Further new
            names are rejected, because each name takes up to 13 KB of each journal segment.
        verdicts: the inbox for the verdicts of the learner; None: producers get no verdicts.

    Raises:
        ValueError: a limit is outside its range, or the address needs keys and `access` is None.
        OSError: the address cannot be bound.
    """

    def __init__(
        self,
        journal: Journal,
        offsets: ConsumerOffsets,
        bind: str = "tcp://127.0.0.1:0",
        access: Access | None = None,
        max_packet: int = 8 << 20,
        credit: int | None = None,
        total_credit: int = 96 << 20,
        max_lag_bytes: int | None = None,
        max_names: int = 256,
        verdicts: VerdictInbox | None = None,
    ) -> None:
        if max_names < 1:
            raise ValueError(f"max_names {max_names}: must be at least 1")
        if credit is None:
            credit = min(max(16 << 20, max_packet), total_credit)
        self.journal = journal
        self.offsets = offsets
        self._policy = CreditPolicy(credit, total_credit, max_packet)
        self._access = access
        self._verdicts = verdicts
        self._denied = 0
        self._record_at = self._tick_at = self._probe_at = 0.0
        self._group = GroupCommit(
            journal, GROUP_PACKETS, min(total_credit, 16 << 20), GROUP_SECONDS
        )
        self._room = JournalRoom(journal, offsets, max_packet, max_lag_bytes)
        self._listener = Listener(bind, access, self._policy)
        self._protocol = ReceiverProtocol(
            self._group,
            self._policy,
            access,
            Sessions(MOST_SESSIONS),
            MOST_SAMPLES,
            max_names,
            self._listener.send,
        )

    @property
    def endpoint(self) -> str:
        """The address that the receiver listens on, with the actual port, or the absolute path."""
        return self._listener.endpoint

    @property
    def unwritten(self) -> int:
        """The samples that were received and are not in the journal. Their producers hold them."""
        return self._group.batch.samples

    def producers(self) -> list[ProducerRecord]:
        """Return a record of each producer, the longest silent first.

        Only the thread of `run` may call this.
        """
        return self._protocol.table()

    def run(self, stop: threading.Event) -> Iterator[ReceiverRecord]:
        """Receive until `stop` is set; yield a record for each group commit or idle second.

        Then drain: grant no more credit, commit and acknowledge the packets in flight, send BYE and
        close the sockets.
        """
        try:
            self._tick(time.monotonic())
            while not stop.is_set():
                if self._step():
                    yield self._record()
            yield from self._drain()
        finally:
            self.close()

    def close(self) -> None:
        """Close the sockets; the journal stays open."""
        self._listener.close()
        if self._verdicts is not None:
            self._verdicts.close()

    # -- the loop

    def _step(self) -> bool:
        """Poll once and do the work that is due; return whether a record is due."""
        wait = min(self._tick_at, self._group.due_at()) - time.monotonic()
        if self._listener.wait(wait):
            self._receive()
        now = time.monotonic()
        protocol = self._protocol
        protocol.answers.flush(now)
        if self._group.is_due(now, wait=not protocol.credit.closing):
            protocol.commit(now)
            if self._room.bytes < 4 * self._policy.total:
                self._tick_at = 0.0  # little room is left, so measure it after every commit
        if now >= self._tick_at:
            self._tick(now)
        committed = protocol.counters.fsync_seconds is not None
        return committed or now - self._record_at >= _IDLE_SECONDS

    def _receive(self) -> None:
        """Read the messages that have arrived, until the group is full.

        libzmq returns the messages of the connections in turn. After the time of a group, reading
        continues only while each message adds to the group, so that a flood of useless messages
        cannot delay the commit.
        """
        end = time.monotonic() + self._group.seconds
        for _ in range(_BURST):
            frames = self._listener.receive()
            if frames is None:
                return
            now, waiting = time.monotonic(), len(self._group.batch)
            self._handle(frames, now)
            useless = len(self._group.batch) == waiting
            if self._group.is_full() or (useless and now >= end):
                return

    def _handle(self, frames: list[zmq.Frame], now: float) -> None:
        """Handle one message. An exception drops only this message; the loop continues."""
        protocol = self._protocol
        try:
            message = self._listener.open(frames)
            if message is None:
                protocol.counters.refused["zmtp"] += 1
            else:
                protocol.handle(message.route, message.user, message.frames, now, message.peer)
        except Exception:
            protocol.note_internal()

    def _tick(self, now: float) -> None:
        """Do the periodic work: trim the journal, measure the room, and grant credit."""
        protocol = self._protocol
        self._tick_at = now + _TICK_SECONDS
        refused = protocol.counters.refused
        if self._access is not None:
            allow = self._access.allow
            allow.reload()
            protocol.counters.allow_list_errors += allow.take_errors()
            denied, self._denied = self._access.denied - self._denied, self._access.denied
            refused["denied"] += denied
        refused.update(self._listener.backlogs.take_refused(now))
        self._room.measure(protocol.credit, self._group.journal_full)
        protocol.credit.grant(now)
        if self._verdicts is not None:
            self._verdicts.listen(protocol.answers.wants_verdicts)
            for producer, rows in self._verdicts.read():
                protocol.answers.tell(producer, rows)
        if now >= self._probe_at:
            self._probe_at = now + _IDLE_SECONDS
            protocol.answers.probe(now)
            known = (session for session in protocol.sessions if session.through)
            self.journal.connected.update({session.producer: now for session in known})
            self.journal.clear_readers()
            self.journal.take_checked()

    def _drain(self) -> Iterator[ReceiverRecord]:
        protocol = self._protocol
        protocol.credit.closing = True
        now = time.monotonic()
        end, quiet = now + DRAIN_SECONDS, now + _QUIET_SECONDS
        protocol.credit.grant(now)
        while now < min(end, quiet) or (self._group.batch and now < end):
            before = protocol.counters.packets
            if self._step():
                yield self._record()
                before = -1
            now = time.monotonic()
            if protocol.counters.packets != before:
                quiet = now + _QUIET_SECONDS
        protocol.answers.farewell("the receiver stops")
        self._listener.close(_LINGER_MS)
        yield self._record()

    def _record(self) -> ReceiverRecord:
        protocol, journal = self._protocol, self.journal
        counters = protocol.counters.take()
        counters["refused"] = +counters["refused"]  # without zeros
        self._record_at = time.monotonic()
        return ReceiverRecord(
            **counters,
            journal_damaged=journal.damaged,
            producers=len(protocol.sessions),
            journal_bytes=journal.bytes,
            journal_first=journal.first,
            journal_last=journal.last,
            credit=sum(session.credit for session in protocol.sessions),
            full=self._room.full,
            disk_full=self._room.disk_full,
            room=self._room.bytes,
            allow_list_broken=self._access is not None and self._access.allow.broken,
            lag_bytes=self._room.lag,
            captured=protocol.captured,
            received=protocol.received,
            # A journal at its budget is well; the check "credit" reports it.
            ready=self._group.ready or (self._group.journal_full and not self._room.disk_full),
            journal_away=self._room.journal_away,
        )
