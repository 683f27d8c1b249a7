"""The thread that owns a producer's sockets and its spool, because sockets are not thread-safe."""

from __future__ import annotations

import atexit
import logging
import math
import os
import random
import socket
import threading
import time
import weakref
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace

import zmq

from stream_ssl.producers._connection import Connection, Curve, diagnose
from stream_ssl.producers._packer import Packet
from stream_ssl.producers._protocol import ProtocolState
from stream_ssl.producers._reporter import Reporter
from stream_ssl.producers.errors import ProducerError
from stream_ssl.producers.stats import Stats
from stream_ssl.rate_limited_logger import RateLimitedLogger
from stream_ssl.wire import Bye, Data, Hello, WireError, decode, encode
from stream_ssl.wire.messages import Frames

BACKOFF = (0.05, 1.0)  # seconds between connections: first pause and maximum
BYE_LINGER_MS = 500
BURST = 64  # maximum messages to send before reading acknowledgements
DIAGNOSE_SECONDS = (0.5, 10.0)  # without a handshake: before the first diagnosis, between others
AWAY_SECONDS = 2.0  # a closing producer with a spool waits this long for a connection
LOOK_SECONDS = 0.25  # between two reports of the counters, while nothing else happens

logger = logging.getLogger("stream_ssl.producers")


class IoThread:
    """A thread that runs a producer's protocol over the network.

    The thread holds no reference to the Producer. So a producer that the user forgot to close can
    be garbage-collected, while its accepted samples are still sent.

    Args:
        address: the receiver's address.
        curve: the keys of the connection. None: plain text.
        protocol: the producer's protocol state.
        reporter: logs and calls the user's callbacks.
        exit_timeout: seconds that finish() waits by default.
        ask_first: the address of the earlier receiver, which is asked first which packets it has.

    Attributes:
        changed: guards the protocol's state; notified whenever the state changes.
        full: whether the user found the buffer full.
        closed: whether the thread has ended.
        forked: whether this object is a copy in a forked process, where its thread does not run.
        room_waiters: functions that are called once, at the next change.
    """

    def __init__(
        self,
        address: str,
        curve: Curve | None,
        protocol: ProtocolState,
        reporter: Reporter,
        exit_timeout: float,
        ask_first: str | None = None,
    ) -> None:
        self.lock = threading.RLock()  # send() takes the bare lock, which is cheaper
        self.changed = threading.Condition(self.lock)
        self.full = False
        self.room_waiters: list[Callable[[], None]] = []
        self._address, self._curve = address, curve
        self._ask_first = ask_first  # the earlier receiver, until it has sent WELCOME
        self._protocol, self._reporter = protocol, reporter
        self._exit_timeout = exit_timeout
        self._deadline = math.inf  # for the acknowledgements that finish() waits for
        self._away_deadline = math.inf  # the same, while disconnected and with a spool
        self._stopping = False
        self._asleep = False
        self.closed = False
        self.forked = False
        _all.add(self)
        self._backoff = BACKOFF[0]
        self._diagnosis: str | None = None
        self._limited_log = RateLimitedLogger(logger)
        self._diagnose_at = 0.0
        self._seen: tuple[object, ...] = ()
        self._look_at = 0.0
        self._wake_out, self._wake_in = socket.socketpair()
        self._wake_out.setblocking(False)
        self._wake_in.setblocking(False)
        name = f"producer {protocol.hello.producer}"
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread. From now on, the interpreter waits for acknowledgements at its end."""
        _running.add(self)
        self.thread.start()

    def wake(self) -> None:
        """Wake the thread if it sleeps. Call this with `changed` held."""
        if self._asleep:
            self._asleep = False
            self._wake_out.send(b"!")

    def finish(self, timeout: float | None = None) -> None:
        """Ask the thread to end once all samples are acknowledged.

        With a spool and no connection, the thread ends after AWAY_SECONDS at most.

        Args:
            timeout: seconds after which the thread ends in any case. None: the exit timeout.
        """
        with self.changed:
            timeout = self._exit_timeout if timeout is None else timeout
            now = time.monotonic()
            self._deadline = min(self._deadline, now + timeout)
            self._away_deadline = min(self._deadline, now + AWAY_SECONDS)
            self._protocol.flush_to = self._protocol.taken
            self.changed.notify_all()
            self.wake()

    def join(self) -> None:
        """Wait until the thread has ended."""
        self.thread.join()

    def snapshot(self) -> Stats:
        """Return a copy of the counters. Call this with `changed` held."""
        protocol = self._protocol
        stats = deepcopy(protocol.stats)
        if not self.closed:
            stats.buffered.add(protocol.buffered, protocol.memory)
        if protocol.spool is not None:
            stats.spooled.add(protocol.spool.samples, protocol.spool.bytes)
        stats.state = "closed" if self.closed else protocol.public_state
        return stats

    def _should_stop(self) -> bool:
        if self._deadline < math.inf and not self._stopping:
            protocol, now = self._protocol, time.monotonic()
            away = protocol.spool is not None and protocol.state != "active"
            over = now >= (self._away_deadline if away else self._deadline)
            done = protocol.done >= protocol.taken
            self._stopping = over or done or protocol.fatal is not None
        return self._stopping

    def _run(self) -> None:
        context = zmq.Context()
        try:
            while not self._should_stop():
                self._serve(context)
        except Exception as error:
            logger.exception("a producer's thread died")
            self._die(error)
        finally:
            self._end()
            context.destroy(linger=0)

    def _die(self, error: Exception) -> None:
        with self.changed:
            self._protocol.fatal = ProducerError(f"the producer's thread died: {error!r}")
            self._protocol.state = "refused"
            self._protocol.reason = str(self._protocol.fatal)

    def _end(self) -> None:
        """Write the remaining samples to the spool, or drop and count them; then report."""
        protocol = self._protocol
        with self.changed:
            why = protocol.why()
            if protocol.spool is not None:
                protocol.disconnected("the producer closes")
                if len(protocol.packer):
                    protocol.enqueue(protocol.packer.take())
        if protocol.spool is not None:
            self._write_spool()
            if left := protocol.spool.samples:
                text = "%d samples are left in the spool %s, for the next run: %s"
                logger.warning(text, left, protocol.spool.folder, why)
            protocol.spool.close()
        with self.changed:
            if left := protocol.drop_rest():
                text = (
                    "producer %r: closed with %d samples unacknowledged: a source that goes on by "
                    "position sends them again, else they are lost: %s"
                )
                logger.warning(text, protocol.hello.producer, left, why)
            self.closed = True
            self.changed.notify_all()
        self._tell()
        _running.discard(self)
        self._wake_out.close()
        self._wake_in.close()

    def _serve(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """Serve one connection from its opening to its end, then pause before the next one."""
        connection = Connection(context, self._ask_first or self._address, self._curve)
        opened = time.monotonic()
        try:
            while not self._should_stop() and not connection.lost:
                self._step(connection)
                if not connection.up and time.monotonic() - opened > DIAGNOSE_SECONDS[0]:
                    self._diagnose()
                if self._protocol.state == "refused":
                    break
        finally:
            if connection.up and self._stopping:
                connection.send(encode(Bye("closed")))
            connection.close(BYE_LINGER_MS if connection.up else 0)
        if self._stopping:
            return
        with self.changed:
            self._disconnected(connection.reason)
            self.changed.notify_all()
        self._tell()
        with self.changed:
            if self._protocol.state == "refused":
                self.changed.wait_for(self._should_stop)
            else:
                self.changed.wait_for(self._should_stop, self._pause())

    def _pause(self) -> float:
        """Return the seconds before the next connection.

        The pause doubles each time. It is random, so that producers do not reconnect in step.
        """
        pause, self._backoff = self._backoff, min(2 * self._backoff, BACKOFF[1])
        return pause * random.uniform(0.5, 1.0)

    def _disconnected(self, reason: str) -> None:
        """Record why there is no connection. A diagnosis is more precise than `reason`."""
        reason = self._diagnosis or reason
        if self._ask_first is not None:
            reason += (
                f" ({self._ask_first} is asked first what it has of this producer: see abandon)"
            )
        self._protocol.disconnected(reason)
        if not reason.startswith("still connecting"):
            self._protocol.stats.last_error = self._protocol.reason

    def _diagnose(self) -> None:
        """Probe the peer over plain TCP in the background, because name resolution is slow."""
        if time.monotonic() < self._diagnose_at:
            return
        self._diagnose_at = time.monotonic() + DIAGNOSE_SECONDS[1]

        def look() -> None:
            self._diagnosis = diagnose(self._ask_first or self._address)
            if self._diagnosis is not None:
                with self.changed:
                    if self._protocol.state == "offline":
                        self._disconnected(self._diagnosis)
                        self.changed.notify_all()

        threading.Thread(target=look, name="producer diagnosis", daemon=True).start()

    def _step(self, connection: Connection) -> None:
        """Send what can be sent, then wait for an event and handle it."""
        if self._protocol.spool is not None:
            self._write_spool()
            self._load_spool()
        blocked, timeout = self._send(connection)
        poller = zmq.Poller()
        poller.register(connection.socket, zmq.POLLIN | (zmq.POLLOUT if blocked else 0))
        poller.register(connection.monitor, zmq.POLLIN)
        poller.register(self._wake_in.fileno(), zmq.POLLIN)
        ready = dict(poller.poll(math.ceil(1000 * timeout)))
        self._asleep = False
        if self._wake_in.fileno() in ready:
            self._drain_wakes()
        if connection.monitor in ready:
            self._watch(connection)
        if connection.socket in ready:
            self._receive(connection)
        self._tell()

    def _send(self, connection: Connection) -> tuple[bool, float]:
        """Send until nothing is due or the socket is full.

        Return whether the socket is full, and the seconds to sleep.
        """
        sent = None
        for _ in range(BURST):
            with self.changed:
                now = time.monotonic()
                if sent is not None:
                    self._protocol.on_sent(sent, now)
                sent = self._outgoing(connection, now)
                if sent is None:
                    self._asleep = not self._should_stop()
                    return False, self._sleep(now) if self._asleep else 0.0
            if not connection.send(_frames(sent)):
                self._asleep = True
                return True, 0.0 if self._should_stop() else 1.0
        with self.changed:
            assert sent is not None
            self._protocol.on_sent(sent, time.monotonic())
        return False, 0.0

    def _sleep(self, now: float) -> float:
        return max(0.0, min(self._protocol.timer(now), self._deadline - now))

    def _outgoing(self, connection: Connection, now: float) -> Hello | tuple[int, Packet] | None:
        """Return the message to send over this connection now, or None."""
        if self._should_stop() or not connection.up:
            return None
        if self._protocol.greeting_timed_out(now):
            connection.lost, connection.reason = True, self._protocol.reason
            return None
        return self._protocol.outgoing(now)

    def _write_spool(self) -> None:
        """Write the packets that are due to the spool. The lock is free during the disk write."""
        protocol, spool = self._protocol, self._protocol.spool
        assert spool is not None
        with self.changed:
            protocol.close_packet(time.monotonic())
            packets, loaded, mark = protocol.to_spool()
        if packets:
            written = spool.append(packets, loaded, mark)
            with self.changed:
                protocol.on_spooled(packets[:written], min(loaded, written))
                self.changed.notify_all()

    def _load_spool(self) -> None:
        """Load packets from the spool. Write their sequences to disk before they are sent."""
        protocol, spool = self._protocol, self._protocol.spool
        assert spool is not None
        with self.changed:
            mark = protocol.sequences() if protocol.load_spool() else None
        if mark is not None:
            spool.mark(*mark)

    def _drain_wakes(self) -> None:
        try:
            while self._wake_in.recv(64):
                pass
        except BlockingIOError:
            pass

    def _watch(self, connection: Connection) -> None:
        was_up = connection.up
        connection.watch()
        with self.changed:
            if connection.up and not was_up:
                self._diagnosis = None
                self._protocol.connected(time.monotonic())
            elif not connection.up:
                self._disconnected(connection.reason)
            self.changed.notify_all()

    def _receive(self, connection: Connection) -> None:
        """Handle all messages that have arrived."""
        while (frames := connection.receive()) is not None:
            with self.changed:
                try:
                    self._protocol.received(decode(frames), time.monotonic())
                except WireError as error:
                    self._protocol.unreadable(error)
                except Exception:  # no message of a peer may end this thread
                    text = "a message could not be handled; the connection is closed"
                    self._limited_log.log(logging.ERROR, "internal", text, exc_info=True)
                    connection.lost, connection.reason = True, text
                self.changed.notify_all()
                if connection.lost:
                    return
                if self._protocol.state == "active":
                    self._backoff = BACKOFF[0]
                    if self._ask_first is not None:
                        self._move(connection)
                        return

    def _move(self, connection: Connection) -> None:
        """Leave the earlier receiver after its WELCOME. Call this with `changed` held."""
        self._ask_first, self._diagnosis = None, None
        self._protocol.moved()
        connection.send(encode(Bye("moved")))
        connection.lost, connection.reason = True, self._protocol.reason
        self.changed.notify_all()

    def _tell(self) -> None:
        """Call the user's callbacks without the lock, because they may take time."""
        protocol, now = self._protocol, time.monotonic()
        seen = (protocol.state, protocol.reason, self.full, self.closed)
        look = seen != self._seen or now >= self._look_at
        told = protocol.rejections or protocol.deliveries or protocol.verdicts
        if not (look or told or self.room_waiters):
            return
        with self.changed:
            if protocol.state == "refused":
                protocol.stats.last_error = protocol.reason
            rejections, protocol.rejections = protocol.rejections, []
            deliveries, protocol.deliveries = protocol.deliveries, []
            verdicts, protocol.verdicts = protocol.verdicts, []
            waiters, self.room_waiters = self.room_waiters, []
            self.full &= not self.closed and protocol.memory > protocol.buffer_bytes // 2
            stats = self.snapshot() if look else None
        for waiter in waiters:
            waiter()
        for rejection in rejections:
            self._reporter.call(self._reporter.on_rejected, rejection)
        for callback, delivery in deliveries:
            self._reporter.call(callback, delivery)
        for verdict in verdicts:
            self._reporter.call(self._reporter.on_verdict, verdict)
        if stats is not None:
            self._seen, self._look_at = seen, now + LOOK_SECONDS
            self._reporter.report(protocol, stats, self.full, now)


def _frames(message: Hello | tuple[int, Packet]) -> Frames:
    if isinstance(message, Hello):
        return encode(replace(message, clock=time.time()))
    sequence, packet = message
    return Data(sequence, packet.data.header, packet.data.payload).encode()


_all: weakref.WeakSet[IoThread] = weakref.WeakSet()
_running: set[IoThread] = set()


def _finish_all() -> None:
    """Finish all producers that were not closed, when the interpreter ends."""
    left = list(_running)
    for io in left:
        io.finish()
    for io in left:
        io.join()


def _forget_all() -> None:
    """Mark all producers as forked in a child process, where none of their threads runs."""
    for io in _all:
        io.forked = True
    _running.clear()


atexit.register(_finish_all)
os.register_at_fork(after_in_child=_forget_all)
