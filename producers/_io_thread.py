"""The thread that owns a producer's sockets and its spool, because sockets are not thread-safe."""

from __future__ import annotations

import _thread
import atexit
import contextlib
import logging
import math
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from types import BuiltinFunctionType
from typing import Any

import zmq

from stream_ssl.producers._connection import Connection
from stream_ssl.producers._dialer import Dialer
from stream_ssl.producers._packer import Packet
from stream_ssl.producers._protocol import ProducerProtocol
from stream_ssl.producers._reporter import Reporter
from stream_ssl.producers.errors import ProducerError
from stream_ssl.producers.stats import Stats
from stream_ssl.rate_limited_logger import RateLimitedLogger
from stream_ssl.wire import Bye, Data, Hello, WireError, decode, encode
from stream_ssl.wire.messages import Frames

BYE_LINGER_MS = 500
BURST = 64  # maximum messages to send, or to receive, before the thread looks at the rest
CALLBACK_SECONDS = 10.0  # after its deadline, a closing producer waits this long for a callback
AWAY_SECONDS = 2.0  # a closing producer with a spool waits this long for a connection

logger = logging.getLogger("stream_ssl.producers")


class _Alarm:
    """A socket that wakes a thread which sleeps in a poll."""

    def __init__(self) -> None:
        self.asleep = False
        self._out, self._in = socket.socketpair()
        self._out.setblocking(False)
        self._in.setblocking(False)

    def fileno(self) -> int:
        """Return the descriptor that is readable after `ring`."""
        return self._in.fileno()

    def ring(self) -> None:
        """Wake the thread if it sleeps."""
        if self.asleep:
            self.asleep = False
            self._out.send(b"!")

    def quieten(self) -> None:
        """Make the descriptor wait for the next `ring`."""
        with contextlib.suppress(BlockingIOError):
            while self._in.recv(64):
                pass

    def close(self) -> None:
        self._out.close()
        self._in.close()


class _SpoolDisk:
    """Moves packets between an outbox and its spool. The lock is free during the disk access."""

    def __init__(self, changed: threading.Condition, protocol: ProducerProtocol) -> None:
        self._changed, self._protocol, self._outbox = changed, protocol, protocol.outbox

    def write(self) -> None:
        """Write the packets that are due to the spool."""
        outbox, spool = self._outbox, self._outbox.spool
        assert spool is not None
        with self._changed:
            outbox.close_packet(time.monotonic(), self._protocol.active)
            packets, loaded, mark = outbox.to_spool(self._protocol.active)
        if packets:
            written = spool.append(packets, loaded, mark)
            with self._changed:
                packets, loaded = packets[:written], min(loaded, written)
                outbox.on_spooled(packets, loaded, self._protocol.active)
                self._changed.notify_all()

    def load(self) -> None:
        """Load packets from the spool. Write their sequences to disk before they are sent."""
        outbox, spool = self._outbox, self._outbox.spool
        assert spool is not None
        with self._changed:
            due = outbox.load_spool(self._protocol.active)
            mark = outbox.sequences() if due else None
        if mark is not None:
            spool.mark(*mark)


class IoThread:
    """A thread that runs a producer's protocol over the network.

    The thread holds no reference to the Producer. So a producer that the user forgot to close can
    be garbage-collected, while its accepted samples are still sent.

    Args:
        exit_timeout: seconds that finish() waits by default.

    Attributes:
        changed: guards the protocol's state; notified whenever the state changes.
        full: whether the user found the buffer full.
        closed: whether the thread has ended.
        forked: whether this object is a copy in a forked process, where its thread does not run.
        room_waiters: functions that are called once, at the next change.
    """

    def __init__(
        self, dialer: Dialer, protocol: ProducerProtocol, reporter: Reporter, exit_timeout: float
    ) -> None:
        _require_threads()
        self.lock = threading.RLock()  # send() takes the bare lock, which is cheaper
        self.changed = threading.Condition(self.lock)
        self.full = self.closed = self.forked = self._stopping = False
        self.farewell = "closed"  # the reason of BYE
        self.room_waiters: list[Callable[[], None]] = []
        self._dialer, self._reporter = dialer, reporter
        self._protocol, self._outbox = protocol, protocol.outbox
        self._disk = _SpoolDisk(self.changed, protocol)
        self._exit_timeout = exit_timeout
        self._deadline = math.inf  # for the acknowledgements that finish() waits for
        self._away_deadline = math.inf  # the same, while disconnected and with a spool
        _all.add(self)
        self._at_exit: Any = None
        self._limited_log = RateLimitedLogger(logger)
        self._alarm = _Alarm()
        name = f"producer {protocol.hello.producer}"
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread. From now on, the interpreter waits for acknowledgements at its end."""
        _running.add(self)
        if util := sys.modules.get("multiprocessing.util"):  # its processes end without atexit
            self._at_exit = util.Finalize(None, _finish_all, exitpriority=0)
        try:
            self.thread.start()
        except RuntimeError:  # such as a limit on threads
            self._end()
            raise

    def wake(self) -> None:
        """Wake the thread if it sleeps. Call this with `changed` held."""
        self._alarm.ring()

    def finish(self, timeout: float | None = None) -> None:
        """Ask the thread to end once all samples are acknowledged.

        With a spool and no connection, the thread ends after AWAY_SECONDS at most.

        Args:
            timeout: seconds after which the thread ends in any case. None: the exit timeout.
        """
        with self.lock:
            timeout = self._exit_timeout if timeout is None else timeout
            now = time.monotonic()
            self._deadline = min(self._deadline, now + timeout)
            self._away_deadline = min(self._deadline, now + AWAY_SECONDS)
            self._outbox.flush_to = self._outbox.taken
            self.changed.notify_all()
            self.wake()

    def join(self) -> None:
        """Wait for the end of the thread after finish(), but not for a callback that is stuck."""
        while self.thread.is_alive():
            self.thread.join(0.25)
            hook, since = self._reporter.calling or (None, math.inf)
            if time.monotonic() - max(since, self._deadline) >= CALLBACK_SECONDS:
                text = "producer %r: closed without its thread: a callback does not return: %r"
                logger.error(text, self._protocol.hello.producer, hook)
                return

    def snapshot(self) -> Stats:
        """Return a copy of the counters. Call this with `changed` held."""
        outbox = self._outbox
        stats = deepcopy(outbox.stats)
        if not self.closed:
            stats.buffered.add(outbox.buffered, outbox.memory)
        stats.accepted.add(*outbox.offered.accepted())
        if outbox.spool is not None:
            stats.spooled.add(outbox.spool.samples, outbox.spool.stored_bytes)
        stats.state = "closed" if self.closed else self._protocol.public_state
        return stats

    def _should_stop(self) -> bool:
        if self._deadline < math.inf and not self._stopping:
            protocol, outbox = self._protocol, self._outbox
            away = outbox.spool is not None and not protocol.active
            over = time.monotonic() >= (self._away_deadline if away else self._deadline)
            done = outbox.done >= outbox.taken
            self._stopping = over or done or protocol.fatal is not None
        return self._stopping

    def _run(self) -> None:
        context = zmq.Context()
        try:
            while not self._should_stop():
                self._serve(context)
        except BaseException as error:
            logger.exception("a producer's thread died")
            with self.changed:
                self._protocol.stop(ProducerError(f"the producer's thread died: {error!r}"))
        finally:
            self._end()
            context.destroy(linger=0)

    def _end(self) -> None:
        """Write the remaining samples to the spool, or drop and count them; then report."""
        protocol, outbox = self._protocol, self._outbox
        with self.changed:
            why = protocol.why()
            outbox.take_in()
            if outbox.spool is not None:
                protocol.disconnected("the producer closes")
                if len(outbox.packer):
                    outbox.enqueue(outbox.packer.take())
        if outbox.spool is not None:
            self._disk.write()
            if left := outbox.spool.samples:
                text = "%d samples are left in the spool %s, for the next run: %s"
                logger.warning(text, left, outbox.spool.folder, why)
            outbox.spool.close()
        with self.changed:
            left = outbox.drop_rest()
            self.closed = True
            self.changed.notify_all()
        if left:
            text = (
                "producer %r: closed with %d samples unacknowledged: a source that goes on by "
                "position sends them again, else they are lost: %s"
            )
            logger.warning(text, protocol.hello.producer, left, why)
        self._tell()
        _running.discard(self)
        if self._at_exit is not None:
            self._at_exit.cancel()
        self._alarm.close()

    def _serve(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """Serve one connection from its opening to its end, then pause before the next one."""
        connection = self._dialer.connect(context)
        try:
            while not self._should_stop() and not connection.lost:
                self._step(connection)
                if not connection.up:
                    self._dialer.diagnose(connection, self._diagnosed)
                if self._protocol.state == "refused":
                    break
        finally:
            if connection.up and self._stopping:
                connection.send(encode(Bye(self.farewell)))
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
                self.changed.wait_for(self._should_stop, self._dialer.pause())

    def _disconnected(self, reason: str) -> None:
        reason = self._dialer.explain(reason)
        self._protocol.disconnected(reason)
        if not reason.startswith("still connecting"):
            self._outbox.stats.last_error = self._protocol.reason

    def _diagnosed(self, reason: str) -> None:
        with self.changed:
            if self._protocol.state == "offline":
                self._disconnected(reason)
                self.changed.notify_all()

    def _step(self, connection: Connection) -> None:
        """Send what can be sent, then wait for an event and handle it."""
        if self._outbox.spool is not None:
            self._disk.write()
            self._disk.load()
        blocked, timeout = self._send(connection)
        poller = zmq.Poller()
        poller.register(connection.socket, zmq.POLLIN | (zmq.POLLOUT if blocked else 0))
        poller.register(connection.monitor, zmq.POLLIN)
        poller.register(self._alarm.fileno(), zmq.POLLIN)
        ready = dict(poller.poll(math.ceil(1000 * timeout)))
        self._alarm.asleep = False
        if self._alarm.fileno() in ready:
            self._alarm.quieten()
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
                    self._alarm.asleep = not self._should_stop()
                    left = min(self._protocol.timer(now), self._deadline - now)
                    return False, max(0.0, left) if self._alarm.asleep else 0.0
            if not connection.send(_frames(sent)):
                self._alarm.asleep = True
                return True, 0.0 if self._should_stop() else 1.0
        with self.changed:
            assert sent is not None
            self._protocol.on_sent(sent, time.monotonic())
        return False, 0.0

    def _outgoing(self, connection: Connection, now: float) -> Hello | tuple[int, Packet] | None:
        """Return the message to send over this connection now, or None."""
        if self._should_stop() or not connection.up:
            return None
        if self._protocol.greeting_timed_out(now):
            connection.lost, connection.reason = True, self._protocol.reason
            return None
        return self._protocol.outgoing(now)

    def _watch(self, connection: Connection) -> None:
        was_up = connection.up
        connection.watch()
        with self.changed:
            if connection.up and not was_up:
                self._dialer.on_handshake()
                self._protocol.connected(time.monotonic())
            elif not connection.up:
                self._disconnected(connection.reason)
            self.changed.notify_all()

    def _receive(self, connection: Connection) -> None:
        """Handle the messages that have arrived, at most BURST."""
        for _ in range(BURST):
            if (frames := connection.receive()) is None:
                return
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
                if self._protocol.active and self._dialer.on_welcome():
                    self._move(connection)
                    return

    def _move(self, connection: Connection) -> None:
        """Leave the earlier receiver after its WELCOME. Call this with `changed` held."""
        self._protocol.moved()
        connection.send(encode(Bye("moved")))
        connection.lost, connection.reason = True, self._protocol.reason
        self.changed.notify_all()

    def _tell(self) -> None:
        """Log, and call the user's callbacks, without the lock, which a log handler may need."""
        protocol, outbox, now = self._protocol, self._outbox, time.monotonic()
        look = self._reporter.is_due((protocol.state, protocol.reason, self.full, self.closed), now)
        outcomes = outbox.outcomes
        news = outcomes.rejections or outcomes.deliveries or protocol.verdicts
        if not (look or news or self.room_waiters):
            return
        with self.changed:
            if protocol.state == "refused":
                outbox.stats.last_error = protocol.reason
            rejections, deliveries = outcomes.take()
            verdicts, protocol.verdicts = protocol.verdicts, []
            waiters, self.room_waiters = self.room_waiters, []
            self.full &= not self.closed and outbox.memory > outbox.buffer_bytes // 2
            stats = self.snapshot() if look else None
        for waiter in waiters:
            waiter()
        self._reporter.tell(rejections, deliveries, verdicts)
        if stats is not None:
            self._reporter.report(protocol, stats, self.full, now)


def _require_threads() -> None:
    if not isinstance(_thread.start_new_thread, BuiltinFunctionType):
        raise ProducerError(
            "gevent or eventlet has replaced threads by greenlets, which a producer would stop: "
            "call gevent.monkey.patch_all(thread=False), or send from another process"
        )


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
        if (spool := io._outbox.spool) is not None:
            spool.forget_lock()
    _running.clear()


atexit.register(_finish_all)
if hasattr(os, "register_at_fork"):  # Windows has no forks
    os.register_at_fork(after_in_child=_forget_all)
