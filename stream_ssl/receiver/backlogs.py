"""A limit for the unread bytes that each client connection may queue.

libzmq does not report how many bytes wait in its queues. It reports a failed handshake only to the
monitor of a socket. Its own limit, RCVHWM, cannot be used, because it stops reading the connection.
If such a connection then breaks, the next heartbeat on it aborts the process (`Assertion failed:
!_io_error`, up to 4.3.5 and in its sources of 2026).
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

from stream_ssl.background import Background
from stream_ssl.rate_limited_logger import RateLimitedLogger

log = logging.getLogger(__name__)

WIRE_PER_CREDIT = 4
"""Bytes on the wire for each byte of credit, for tiny packets under CURVE."""

_LIBC = ctypes.CDLL(None)
_TCP_INFO = struct.Struct("128xQ")  # tcpi_bytes_received in Linux's struct tcp_info
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # struct linger
_HEARTBEAT_BYTES = 256  # most bytes per second that belong to no message
_FRAME_OVERHEAD = 64  # most bytes that ZMTP and CURVE add to a frame
_LEAST_CUT = 64 << 10  # a connection with fewer unread bytes does not cause a lack of memory
_CHECK_SECONDS = 0.05  # least time between two checks
_CHECK_SHARE = 0.05  # most of a core's time for checks; many connections are checked less often
_SILENT_SECONDS = 10.0  # seconds without a message after which a connection counts as silent
_HANDSHAKES: dict[int, str] = {
    zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC: "server-key",  # encrypted for another receiver's key
}
_HANDSHAKE_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_LOCAL = ""  # the peer of a connection over ipc://


@dataclass(slots=True)
class _Connection:
    peer: Any  # address and port, to detect a descriptor that another connection reuses
    checked: float  # time.monotonic of the last check, at first of the accept
    read: int = 0  # bytes of messages that were read; only the receiver's thread writes it
    allowed: int = 0  # received bytes beyond `read` that belong to no message; may be negative
    ended: bool = True  # whether a complete message was read since the last check
    silent_since: float | None = None  # time of the accept; None after a message or its count
    cut: bool = False  # whether it was cut off, although libzmq has not closed it yet


class Backlogs:
    """A watchdog that cuts off connections with too many unread bytes.

    A connection is cut off if its unread bytes exceed `limit`, in complete messages or in one that
    does not end. Linux counts the received bytes of a TCP connection; other systems cut off
    nothing.

    If the process holds too much memory, the connections with the most unread bytes are cut off:
    the worst one, and all with at least half as much. The bytes of an ipc:// connection are not
    counted. An ipc:// connection is cut off if it completed no message since the last check. A
    producer that is cut off by mistake reconnects.

    The watchdog has its own thread, because libzmq continues to receive while the receiver's thread
    waits for the disk.

    Args:
        server: the socket to watch; it must not be bound yet.
        limit: most unread bytes of one connection.
        memory: most bytes that this process may allocate beyond its present memory.
        plain: whether the socket accepts plain text.

    Attributes:
        cut: the number of connections cut off so far.
    """

    def __init__(
        self, server: zmq.Socket[Any], limit: int, memory: int, plain: bool = False
    ) -> None:
        self._monitor = server.get_monitor_socket(
            zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | _HANDSHAKE_FAILED
        )
        self.cut = self._reported = 0
        self._failures: Counter[str] = Counter()
        mismatch = "plain-receiver" if plain else "no-key"  # CURVE on one side only
        self._reasons = {**_HANDSHAKES, zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH: mismatch}
        self._following = threading.Lock()  # guards the monitor and the results of its events
        self._background = Background("backlogs", self._watch, _CHECK_SECONDS)
        self._server, self._limit = server, limit
        self._memory = memory + _resident()
        self._connections: dict[int, _Connection] = {}
        self._next = self._silent_at = 0.0
        self._limited_log = RateLimitedLogger(log)

    def start(self) -> None:
        """Start the thread, which runs until `close`."""
        self._background.start()

    def _watch(self) -> None:
        self.follow()
        self.check(time.monotonic())

    def follow(self) -> None:
        """Update the list of connections; call this before reading messages of new connections."""
        with self._following:
            self._follow()

    def _follow(self) -> None:
        while self._monitor.poll(0):
            event = parse_monitor_message(self._monitor.recv_multipart())
            descriptor = int(event["value"])
            if event["event"] & _HANDSHAKE_FAILED:  # the value is an error code and no descriptor
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

        Returns:
            False if libzmq does not give the descriptor of the connection, as for ZMTP 1 and 2. The
            bytes of such a connection still count as unread.
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
        """Return the number of failed connections since the last call, by reason.

        - "oversize": the connection was cut off.
        - "no-key": the client speaks plain text, and the receiver requires keys.
        - "plain-receiver": the client uses keys, and the receiver speaks plain text.
        - "server-key": the client uses the key of another receiver.
        - "handshake": the handshake failed for another reason, or a plain-text peer closed first.
        - "silent": no message came within ten seconds. libzmq neither reads nor closes a
          connection whose routing id is in use.
        """
        with self._following:
            found, self._failures = self._failures, Counter()
            connections = list(self._connections.values())
        found["oversize"], self._reported = self.cut - self._reported, self.cut
        if now >= self._silent_at:
            self._silent_at = now + 1.0
            for connection in connections:
                since = connection.silent_since
                if since is not None and now - since >= _SILENT_SECONDS:
                    found["silent"] += 1
                    connection.silent_since = None
        return +found

    def check(self, now: float) -> int:
        """Check all connections if a check is due; return how many were cut off."""
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
        """Stop the thread and close the monitor."""
        self._background.close()
        self._server.disable_monitor()
        self._monitor.close(0)

    def _check(self, tcp: socket.socket, connection: _Connection, now: float) -> int:
        """Return the unread bytes of a connection; cut it off if they exceed the limit."""
        facts = tcp.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        received: int = _TCP_INFO.unpack(facts)[0]
        read, heartbeats = connection.read, _HEARTBEAT_BYTES * (now - connection.checked)
        connection.allowed = min(received - read, connection.allowed + math.ceil(heartbeats))
        connection.checked = now
        waiting = received - read - connection.allowed
        if waiting > self._limit and tcp.getpeername() == connection.peer:
            self._cut_off(
                tcp,
                connection,
                f"{connection.peer[0]}: it has {waiting:,} unread bytes, and the limit is "
                f"{self._limit:,}. It sends a message without an end, or ignores its credit",
            )
        return waiting

    def _cut_worst(
        self, connections: Mapping[int, _Connection], waiting: Mapping[int, int], held: int
    ) -> None:
        worst = max(waiting.values(), default=0)
        if worst < _LEAST_CUT:  # the allocator keeps the memory, so later connections must not pay
            self._memory = held
        for descriptor, size in waiting.items():
            if 2 * size >= worst and size >= _LEAST_CUT:
                connection = connections[descriptor]
                why = (
                    f"{connection.peer[0]}: it has {size:,} unread bytes, among the most of all, "
                    f"and the receiver holds too much memory, {held:,} bytes"
                )
                with contextlib.suppress(OSError), _borrowed(descriptor) as tcp:
                    if tcp.getpeername() == connection.peer:
                        self._cut_off(tcp, connection, why)

    def _check_local(self, local: socket.socket, connection: _Connection, held: int) -> None:
        if not connection.ended and held > self._memory:
            self._cut_off(
                local,
                connection,
                "this machine: it has completed no message, and the receiver holds too much "
                f"memory, {held:,} bytes",
            )
        connection.ended = False

    def _cut_off(self, descriptor: socket.socket, connection: _Connection, why: str) -> None:
        # Without an RST at the close, a peer that waits for room would learn of it a minute later.
        descriptor.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        descriptor.shutdown(socket.SHUT_RDWR)
        connection.cut = True
        self.cut += 1
        self._limited_log.warning("backlog", f"cut off a connection from {why}. Check that program")


def _resident() -> int:
    """Return the resident bytes of this process without file pages; 0 if unknown."""
    try:
        _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
    except (OSError, ValueError):
        return 0
    return (int(resident) - int(shared)) * resource.getpagesize()


def _release() -> None:
    """Return freed memory to the system, if the C library supports it (glibc)."""
    with contextlib.suppress(AttributeError):
        _LIBC.malloc_trim(0)


@contextlib.contextmanager
def _borrowed(descriptor: int) -> Any:
    """Yield a socket for a descriptor of libzmq, without closing the descriptor."""
    tcp = socket.socket(fileno=descriptor)
    try:
        yield tcp
    finally:
        tcp.detach()
