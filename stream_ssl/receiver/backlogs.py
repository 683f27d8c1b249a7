"""What came of a connection and was not read: bounded, connection by connection.

libzmq tells of it neither the bytes nor, before a message is whole, that there are any; of a failed
handshake it tells a socket's monitor alone. Its own bound, RCVHWM, is not to be used: it stops
reading, and where such a connection then ends, libzmq's next heartbeat on it, either way, ends the
process (`Assertion failed: !_io_error`, up to 4.3.5 and in its sources of 2026).
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import resource
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from stream_ssl.rate_limited_logger import RateLimitedLogger

log = logging.getLogger(__name__)

WIRE_PER_CREDIT = 4
"""Bytes of tiny packets under CURVE, for one of header and payload."""

_LIBC = ctypes.CDLL(None)
_TCP_INFO = struct.Struct("128xQ")  # tcpi_bytes_received in Linux's struct tcp_info
_HEARTBEAT_BYTES = 256  # a second, at most, that belong to no message
_FRAME_OVERHEAD = 64  # bytes that ZMTP and CURVE put around a frame, at most
_LEAST_CUT = 64 << 10  # bytes that wait of a connection, or it is not why memory is short
_CHECK_SECONDS = 0.05  # between two looks, or more, so that they take
_CHECK_SHARE = 0.05  # of a core's time, at most
_SILENT_SECONDS = 10.0  # without a message, after which a connection counts as silent
_HANDSHAKES: dict[int, str] = {
    zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC: "server-key",  # encrypted to another receiver's key
}
_HANDSHAKE_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_LOCAL = ""  # the peer of a connection over ipc://


@dataclass(slots=True)
class _Connection:
    peer: Any  # address and port: the descriptor may be another's by now
    checked: float  # when, time.monotonic; at first, when it was accepted
    read: int = 0  # bytes of messages read from it; written by the receiver's thread alone
    allowed: int = 0  # beside those, of what TCP received before the last check; or less than none
    ended: bool = True  # whether a message came whole since the last check
    silent_since: float | None = None  # when accepted, until a message comes or it is counted
    cut: bool = False  # libzmq has not closed it yet


class Backlogs:
    """Cuts off a connection of which more bytes came than its credit allows and were not read:
    whole messages, or one that does not end. Of TCP, Linux counts the bytes; elsewhere nothing is
    cut off. Once this process holds more memory than it should, those connections are cut off of
    which most waits: half as much as of the worst, or more. Of ipc:// nobody counts the bytes:
    there it is those of which no message came whole since the last check. A producer that was
    innocent connects again.

    It watches in a thread of its own: the receiver's waits for its disk, and meanwhile libzmq goes
    on receiving.

    Args:
        server: the socket to watch, before it is bound.
        limit: bytes of one connection that may wait to be read.
        memory: bytes that this process may come to hold beside what it holds now.
        plain: whether the socket speaks plain text.

    Attributes:
        cut: connections cut off so far.
    """

    def __init__(
        self, server: zmq.Socket[Any], limit: int, memory: int, plain: bool = False
    ) -> None:
        self._monitor = server.get_monitor_socket(
            zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | _HANDSHAKE_FAILED
        )
        self.cut = self._told = 0
        self._failures: Counter[str] = Counter()
        mismatch = "plain-receiver" if plain else "no-key"  # of one that speaks the other
        self._reasons = {**_HANDSHAKES, zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH: mismatch}
        self._following = threading.Lock()  # of the monitor, and of what is noted from it
        self._closing, self._thread = threading.Event(), threading.Thread(target=self._watch)
        self._server, self._limit = server, limit
        self._memory = memory + _resident()
        self._connections: dict[int, _Connection] = {}
        self._next = self._silent_at = 0.0
        self._limited_log = RateLimitedLogger(log)

    def start(self) -> None:
        """Watch from now on, until closed."""
        self._thread.daemon = True
        self._thread.start()

    def _watch(self) -> None:
        while not self._closing.wait(_CHECK_SECONDS):
            try:
                self.follow()
                self.check(time.monotonic())
            except Exception:  # without this thread nothing bounds what a connection sends
                text = "the connections could not be checked; the check is tried again"
                self._limited_log.log(logging.ERROR, "check", text, exc_info=True)

    def follow(self) -> None:
        """Note connections that were accepted or closed; before messages of them are read."""
        with self._following:
            self._follow()

    def _follow(self) -> None:
        while self._monitor.poll(0):
            event = parse_monitor_message(self._monitor.recv_multipart())
            descriptor = int(event["value"])
            if event["event"] & _HANDSHAKE_FAILED:  # the value is no descriptor but what went wrong
                self._failures[self._reasons.get(descriptor, "handshake")] += 1
                continue
            self._connections.pop(descriptor, None)
            if event["event"] == zmq.EVENT_ACCEPTED:
                with contextlib.suppress(OSError), _borrowed(descriptor) as tcp:
                    local = tcp.family == socket.AF_UNIX
                    peer = _LOCAL if local else tcp.getpeername()
                    now = time.monotonic()
                    self._connections[descriptor] = _Connection(peer, now, silent_since=now)

    def read(self, frames: Sequence[zmq.Frame]) -> bool:
        """Record that a message with these frames was read.

        Returns False where libzmq does not name the message's connection: it names none for
        ZMTP 1 and 2. The bytes of such a connection stay counted as unread.
        """
        try:
            descriptor = int(frames[0].get(zmq.SRCFD))
        except (IndexError, zmq.ZMQError):
            return False
        connection = self._connections.get(descriptor)
        if connection is not None:
            connection.read += sum(len(frame) + _FRAME_OVERHEAD for frame in frames)
            connection.ended, connection.silent_since = True, None
        return True

    def take_refused(self, now: float) -> Mapping[str, int]:
        """Connections that came to nothing since the call before, by reason: "oversize", which
        were cut off; "no-key", "plain-receiver", "server-key", any other "handshake" that failed (a
        plain peer's too, where it hung up first), and "silent": no message within ten seconds, as
        from one whose routing id is another's, which libzmq neither reads nor closes.
        """
        with self._following:
            found, self._failures = self._failures, Counter()
            connections = list(self._connections.values())
        found["oversize"], self._told = self.cut - self._told, self.cut
        if now >= self._silent_at:
            self._silent_at = now + 1.0
            for connection in connections:
                since = connection.silent_since
                if since is not None and now - since >= _SILENT_SECONDS:
                    found["silent"] += 1
                    connection.silent_since = None
        return +found

    def check(self, now: float) -> int:
        """Check all connections, if it is time to; how many were cut off."""
        if now < self._next or not hasattr(socket, "TCP_INFO"):
            return 0
        before, held, waiting = self.cut, _resident(), dict[int, int]()
        with self._following:
            connections = {key: one for key, one in self._connections.items() if not one.cut}
        for descriptor, connection in connections.items():
            with contextlib.suppress(OSError, struct.error), _borrowed(descriptor) as tcp:
                if connection.peer == _LOCAL:
                    self._check_local(tcp, connection, held)
                else:
                    waiting[descriptor] = self._check(tcp, connection, now)
        if held > self._memory and self.cut == before:
            _release()
            if (held := _resident()) > self._memory:
                self._cut_worst(connections, waiting, held)
        self._next = now + (time.monotonic() - now) / _CHECK_SHARE
        return self.cut - before

    def close(self) -> None:
        """Stop watching."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()
        self._server.disable_monitor()
        self._monitor.close(0)

    def _check(self, tcp: socket.socket, connection: _Connection, now: float) -> int:
        """How many bytes wait, of a connection that is cut off where these are too many."""
        facts = tcp.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        received: int = _TCP_INFO.unpack(facts)[0]
        read, others = connection.read, _HEARTBEAT_BYTES * (now - connection.checked)
        connection.allowed = min(received - read, connection.allowed + math.ceil(others))
        connection.checked = now
        waiting = received - read - connection.allowed
        if waiting > self._limit and tcp.getpeername() == connection.peer:
            self._cut_off(
                tcp,
                connection,
                f"{connection.peer[0]} off: {waiting} bytes came of it that could not be read yet, "
                f"at most {self._limit} may; it ends no message, or ignores its credit",
            )
        return waiting

    def _cut_worst(
        self, connections: Mapping[int, _Connection], waiting: Mapping[int, int], held: int
    ) -> None:
        worst = max(waiting.values(), default=0)
        if worst < _LEAST_CUT:  # the allocator keeps it: that is not held against those that come
            self._memory = held
        for descriptor, size in waiting.items():
            if 2 * size >= worst and size >= _LEAST_CUT:
                connection = connections[descriptor]
                why = (
                    f"{connection.peer[0]} off: {size:,} bytes of it wait, as much as of any, and "
                    f"{held:,} bytes of memory are held here"
                )
                with contextlib.suppress(OSError), _borrowed(descriptor) as tcp:
                    if tcp.getpeername() == connection.peer:
                        self._cut_off(tcp, connection, why)

    def _check_local(self, local: socket.socket, connection: _Connection, held: int) -> None:
        if not connection.ended and held > self._memory:
            self._cut_off(
                local,
                connection,
                f"this machine off: it ends no message, and {held:,} bytes are held here",
            )
        connection.ended = False

    def _cut_off(self, descriptor: socket.socket, connection: _Connection, why: str) -> None:
        descriptor.shutdown(socket.SHUT_RDWR)
        connection.cut = True
        self.cut += 1
        self._limited_log.warning("backlog", f"cut a connection from {why}; look at what it runs")


def _resident() -> int:
    """Bytes of memory that this process holds, beside files; 0 where that is not told."""
    try:
        _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
    except (OSError, ValueError):
        return 0
    return (int(resident) - int(shared)) * resource.getpagesize()


def _release() -> None:
    """Give memory that was freed back to the system, where the C library can (glibc)."""
    with contextlib.suppress(AttributeError):
        _LIBC.malloc_trim(0)


@contextlib.contextmanager
def _borrowed(descriptor: int) -> Any:
    """libzmq's own socket, which stays open."""
    tcp = socket.socket(fileno=descriptor)
    try:
        yield tcp
    finally:
        tcp.detach()
