"""Connections from which no message comes: libzmq hands over no message before it is whole, and
tells of a failed handshake to a socket's monitor alone."""

from __future__ import annotations

import contextlib
import logging
import resource
import socket
import struct
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from stream_ssl.rate_limited_logger import RateLimitedLogger

log = logging.getLogger(__name__)

_RECEIVED = struct.Struct("128xQ")  # tcpi_bytes_received in Linux's struct tcp_info
_IDLE_BYTES = 256  # a second, of heartbeats
_SHARE = 0.05  # of the receiver's time, at most
_SILENT_SECONDS = 10.0  # without a message, after which a connection counts as silent
_HANDSHAKES: dict[int, str] = {
    zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH: "no-key",  # plain text, where CURVE is asked for
    zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC: "server-key",  # encrypted to another receiver's key
}
_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL


_LOCAL = ""  # the peer of a connection over ipc://


@dataclass(slots=True)
class _Connection:
    peer: Any  # address and port: the descriptor may be another's by now
    bytes: int = 0  # received by TCP when a message was last finished, ...
    since: float = 0.0  # ... and when that was, time.monotonic
    finished: bool = True  # whether a message was, since the last check
    silent_since: float | None = None  # when accepted, until a message comes or it is counted


class UnfinishedMessages:
    """Cuts off a connection that sends more bytes than a conforming peer could without ending a
    message. Of TCP, Linux counts the bytes; elsewhere nothing is cut off. Nobody counts those of
    ipc://: once this process holds more memory than it should, its connections that have ended no
    message since the last check are cut off; a producer that was innocent connects again.

    Args:
        server: the socket to watch, before it is bound.
        limit: bytes of an unfinished message, at most.
        memory: bytes that this process may come to hold beside what it holds now.

    Attributes:
        monitor: to be polled for `follow`.
        cut: connections cut off so far.
    """

    def __init__(self, server: zmq.Socket[Any], limit: int, memory: int) -> None:
        self.monitor = server.get_monitor_socket(
            zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | _FAILED
        )
        self.cut = 0
        self._failures: Counter[str] = Counter()
        self._server, self._limit = server, limit
        self._memory = memory + _resident()
        self._connections: dict[int, _Connection] = {}
        self._next = self._silent_at = 0.0
        self._limited_log = RateLimitedLogger(log)

    def follow(self) -> None:
        """Note connections that were accepted or closed."""
        while self.monitor.poll(0):
            event = parse_monitor_message(self.monitor.recv_multipart())
            descriptor = int(event["value"])
            if event["event"] & _FAILED:  # the value is no descriptor but what went wrong
                self._failures[_HANDSHAKES.get(descriptor, "handshake")] += 1
                continue
            self._connections.pop(descriptor, None)
            if event["event"] == zmq.EVENT_ACCEPTED:
                with contextlib.suppress(OSError), _borrowed(descriptor) as tcp:
                    local = tcp.family == socket.AF_UNIX
                    peer = _LOCAL if local else tcp.getpeername()
                    connection = _Connection(peer, silent_since=time.monotonic())
                    self._connections[descriptor] = connection

    def finished(self, frame: zmq.Frame) -> None:
        """A message came, with this frame."""
        connection = self._connections.get(int(frame.get(zmq.SRCFD)))
        if connection is not None:
            connection.finished, connection.silent_since = True, None

    def take_failures(self, now: float) -> Mapping[str, int]:
        """Connections that came to nothing since the call before, by reason: "no-key",
        "server-key", any other "handshake" that failed (a plain peer's too, where it hung up
        first), and "silent": no message within ten seconds, as from one whose routing id is
        another's, which libzmq neither reads nor closes.
        """
        if now >= self._silent_at:
            self._silent_at = now + 1.0
            for connection in self._connections.values():
                since = connection.silent_since
                if since is not None and now - since >= _SILENT_SECONDS:
                    self._failures["silent"] += 1
                    connection.silent_since = None
        found, self._failures = self._failures, Counter()
        return found

    def check(self, now: float) -> int:
        """Check all connections, if it is time to; how many were cut off."""
        if now < self._next or not hasattr(socket, "TCP_INFO"):
            return 0
        before, held = self.cut, _resident()
        for descriptor, connection in list(self._connections.items()):
            with contextlib.suppress(OSError, struct.error), _borrowed(descriptor) as tcp:
                if connection.peer == _LOCAL:
                    self._check_local(tcp, connection, held)
                else:
                    self._check(tcp, connection, now)
        if self.cut > before:  # what the allocator keeps is not held against those that come
            self._memory = max(self._memory, held)
        self._next = now + (time.monotonic() - now) / _SHARE
        return self.cut - before

    def close(self) -> None:
        """Stop watching."""
        self._server.disable_monitor()
        self.monitor.close(0)

    def _check(self, tcp: socket.socket, connection: _Connection, now: float) -> None:
        facts = tcp.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED.size)
        received: int = _RECEIVED.unpack(facts)[0]
        if connection.finished:
            connection.bytes, connection.since, connection.finished = received, now, False
        unfinished = received - connection.bytes - _IDLE_BYTES * (now - connection.since)
        if unfinished > self._limit and tcp.getpeername() == connection.peer:
            self._cut_off(
                tcp,
                f"{connection.peer[0]} off: {unfinished:.0f} bytes of a message that does not end, "
                f"at most {self._limit} are taken",
            )

    def _check_local(self, local: socket.socket, connection: _Connection, held: int) -> None:
        if not connection.finished and held > self._memory:
            self._cut_off(
                local, f"this machine off: it ends no message, and {held:,} bytes are held here"
            )
        connection.finished = False

    def _cut_off(self, connection: socket.socket, why: str) -> None:
        connection.shutdown(socket.SHUT_RDWR)
        self.cut += 1
        self._limited_log.warning(
            "unfinished", f"cut a connection from {why}; look at what it runs"
        )


def _resident() -> int:
    """Bytes of memory that this process holds, beside files; 0 where that is not told."""
    try:
        _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
    except (OSError, ValueError):
        return 0
    return (int(resident) - int(shared)) * resource.getpagesize()


@contextlib.contextmanager
def _borrowed(descriptor: int) -> Any:
    """libzmq's own socket, which stays open."""
    tcp = socket.socket(fileno=descriptor)
    try:
        yield tcp
    finally:
        tcp.detach()
