"""The receiver, which accepts packets from producers and writes them to the journal."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import zmq

from stream_ssl.journal.consumer_offsets import ConsumerOffsets
from stream_ssl.journal.journal import Journal
from stream_ssl.rate_limited_logger import RateLimitedLogger
from stream_ssl.receiver.access import Access
from stream_ssl.receiver.backlogs import WIRE_PER_CREDIT, Backlogs
from stream_ssl.receiver.credit import CreditPolicy
from stream_ssl.receiver.group_commit import GroupCommit
from stream_ssl.receiver.journal_room import JournalRoom
from stream_ssl.receiver.protocol import ReceiverProtocol
from stream_ssl.receiver.records import ReceiverRecord
from stream_ssl.receiver.sessions import ProducerRecord, Sessions
from stream_ssl.receiver.verdicts import VerdictInbox
from stream_ssl.wire import Message, encode, require_loopback
from stream_ssl.wire.address import check_bind

log = logging.getLogger(__name__)

MOST_SAMPLES = 1024  # in one packet; by default a producer sends a packet with 64 samples
MOST_SESSIONS = 4096  # connected producers; beyond, the longest silent one must send HELLO again
GROUP_PACKETS = 64  # number of packets after which a group is committed
GROUP_SECONDS = 0.005  # age at which a group is committed; an fsync of a common disk takes as long
DRAIN_SECONDS = 2.0  # for packets in flight when the receiver stops; service managers wait longer
HEARTBEAT_MS = 1000
HEARTBEAT_TIMEOUT_MS = 3000
_HANDSHAKE_MS = 5000
_FRAME_SLACK = 64 << 10
_LEAST_MEMORY = 64 << 20  # bytes that the receiver may allocate beyond its memory at the start
_TICK_SECONDS = 0.05
_IDLE_SECONDS = 1.0
_MOST_FRAMES = 5  # of a valid message, including the connection's routing id
_BURST = 256  # most messages read in one step of the loop
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
        credit: most unacknowledged bytes of one producer, at least `max_packet`.
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
        credit: int = 16 << 20,
        total_credit: int = 96 << 20,
        max_lag_bytes: int | None = None,
        max_names: int = 256,
        verdicts: VerdictInbox | None = None,
    ) -> None:
        _check_address(bind, access)
        if max_names < 1:
            raise ValueError(f"max_names {max_names}: must be at least 1")
        self.journal = journal
        self.offsets = offsets
        self._policy = CreditPolicy(credit, total_credit, max_packet)
        self._access = access
        self._verdicts = verdicts
        self._denied = 0
        self._limited_log = RateLimitedLogger(log)
        self._record_at = self._tick_at = self._probe_at = 0.0
        self._group = GroupCommit(
            journal, GROUP_PACKETS, min(total_credit, 16 << 20), GROUP_SECONDS
        )
        self._room = JournalRoom(journal, offsets, max_packet, max_lag_bytes)
        self._protocol = ReceiverProtocol(
            self._group,
            self._policy,
            access,
            Sessions(MOST_SESSIONS),
            MOST_SAMPLES,
            max_names,
            self._send,
        )
        self._context: zmq.Context[Any] = zmq.Context()
        self._poller = zmq.Poller()
        self._zap: zmq.Socket[Any] | None = None
        try:
            self._socket = self._listen(bind)
        except zmq.ZMQError as error:
            self.close()
            raise OSError(
                error.errno,
                f"cannot listen at {bind}: {error.strerror}; choose another port, or 0 for a free "
                "one (receiver.bind)",
            ) from error

    def _listen(self, bind: str) -> zmq.Socket[Any]:
        if self._access is not None:
            self._zap = self._access.start(self._context)
            self._poller.register(self._zap, zmq.POLLIN)
        router: zmq.Socket[Any] = self._context.socket(zmq.ROUTER)
        largest = self._policy.max_packet + _FRAME_SLACK
        self._backlogs = Backlogs(
            router,
            WIRE_PER_CREDIT * self._policy.each + largest,
            max(_LEAST_MEMORY, 2 * (self._policy.total + self._policy.each + largest)),
            plain=self._access is None,
        )
        self._socket = router
        for option, value in (
            (zmq.LINGER, 0),
            # No MAXMSGSIZE, because libzmq would disconnect without any report. Frames that arrive
            # completely are rejected and counted; `Backlogs` cuts off longer ones.
            # No high-water mark, because libzmq aborts the process if a connection breaks while
            # libzmq has stopped reading it. Credit and `Backlogs` bound the bytes.
            (zmq.RCVHWM, 0),
            # Sending to a lost connection must fail, because this is how a session ends.
            (zmq.ROUTER_MANDATORY, 1),
            # A new connection must not take over the routing id of a live one. Producers do not
            # choose routing ids, so a reconnect never needs its old id.
            (zmq.ROUTER_HANDOVER, 0),
            (zmq.HEARTBEAT_IVL, HEARTBEAT_MS),
            (zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS),
            (zmq.HEARTBEAT_TTL, HEARTBEAT_TIMEOUT_MS),
            (zmq.HANDSHAKE_IVL, _HANDSHAKE_MS),
            (zmq.IPV6, int("[" in bind)),
        ):
            router.setsockopt(option, value)
        if self._access is not None:
            self._access.secure(router)
        self._backlogs.start()
        router.bind(bind)
        self._poller.register(router, zmq.POLLIN)
        return router

    @property
    def endpoint(self) -> str:
        """The address that the receiver listens on, with the actual port."""
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

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
        if self._context.closed:
            return
        if self._access is not None:
            self._access.stop()
        router = getattr(self, "_socket", None)
        if router is not None:
            self._backlogs.close()
            router.close()
        if self._verdicts is not None:
            self._verdicts.close()
        self._context.term()

    # -- the loop

    def _step(self) -> bool:
        """Poll once and do the work that is due; return whether a record is due."""
        self._poll()
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

    def _poll(self) -> None:
        wait = min(self._tick_at, self._group.due_at()) - time.monotonic()
        ready = dict(self._poller.poll(max(0, int(wait * 1000 + 0.999))))
        if self._zap in ready and self._access is not None:
            self._access.handle()
        if self._socket in ready:
            self._receive()

    def _receive(self) -> None:
        """Read the messages that have arrived, until the group is full.

        libzmq returns the messages of the connections in turn. After the time of a group, reading
        continues only while each message adds to the group, so that a flood of useless messages
        cannot delay the commit.
        """
        self._backlogs.follow()
        end = time.monotonic() + self._group.seconds
        for _ in range(_BURST):
            try:
                frames = self._next_frames()
            except zmq.Again:
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
            route, *rest = frames
            if not self._backlogs.read(rest):
                protocol.counters.refused["zmtp"] += 1
                text = (
                    "left out a message from a peer that does not speak ZMTP 3, such as a browser"
                )
                self._limited_log.warning("zmtp", text)
                return
            user = _user_of(rest[0]) if self._access is not None else None
            buffers = [frame.buffer for frame in rest]
            protocol.handle(route.bytes, user, buffers, now, str(rest[0].get("Peer-Address")))
        except Exception:
            protocol.note_internal()

    def _next_frames(self) -> list[zmq.Frame]:
        """Return the frames of the next message, at most one more than a valid message has.

        An empty frame takes 2 bytes to send but about a hundred bytes as an object, so further
        frames are discarded.

        Raises:
            zmq.Again: there is no message.
        """
        frames = [self._socket.recv(zmq.NOBLOCK, copy=False)]
        while self._socket.getsockopt(zmq.RCVMORE):
            if len(frames) <= _MOST_FRAMES:
                frames.append(self._socket.recv(copy=False))
            else:
                self._socket.recv()
        return frames

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
        refused.update(self._backlogs.take_refused(now))
        self._room.measure(protocol.credit, self._group.journal_full)
        protocol.credit.grant(now)
        if self._verdicts is not None:
            self._verdicts.listen(protocol.answers.wants_verdicts)
            for producer, rows in self._verdicts.read():
                protocol.answers.tell(producer, rows)
        if now >= self._probe_at:
            self._probe_at = now + _IDLE_SECONDS
            protocol.answers.probe(now)
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
        self._socket.setsockopt(zmq.LINGER, 1000)
        yield self._record()

    def _send(self, route: bytes, message: Message) -> bool | None:
        try:
            self._socket.send_multipart([route, *encode(message)], zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                self._limited_log.warning("send", f"cannot answer a producer: {error}")
            return None
        return True

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
            captured=protocol.intake.captured,
            received=protocol.intake.received,
            ready=self._group.ready,
        )


def _check_address(bind: str, access: Access | None) -> None:
    check_bind(bind)
    if access is None:
        require_loopback(
            bind,
            "for other addresses make keys with `stream-ssl keys receiver` and "
            "`stream-ssl keys NAME --allow FILE`, and give the receiver both as `access`",
        )


def _user_of(frame: zmq.Frame) -> str | None:
    """Return the connection's User-Id, which ZAP set to the public key of the peer."""
    try:
        user = frame.get("User-Id")
    except zmq.ZMQError:
        return None
    return user if isinstance(user, str) else None
