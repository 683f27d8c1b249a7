"""Messages that do not end: libzmq bounds a frame, but hands over no message before it is whole."""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import time
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from stream_ssl.ingest.rate_limited_logger import RateLimitedLogger

log = logging.getLogger(__name__)

_RECEIVED = struct.Struct("128xQ")  # tcpi_bytes_received in Linux's struct tcp_info
_IDLE_BYTES = 256  # a second, of heartbeats
_SHARE = 0.05  # of the receiver's time, at most


@dataclass(slots=True)
class _Connection:
    peer: Any  # address and port: the descriptor may be another's by now
    bytes: int = 0  # received by TCP when a message was last finished, ...
    since: float = 0.0  # ... and when that was, time.monotonic
    finished: bool = True  # whether a message was, since the last check


class UnfinishedMessages:
    """Cuts off a TCP connection that sends more bytes than a conforming peer could without ending a
    message. Linux counts the bytes; elsewhere nothing is cut off.

    Args:
        server: the socket to watch, before it is bound.
        limit: bytes of an unfinished message, at most.

    Attributes:
        monitor: to be polled for `follow`.
        cut: connections cut off so far.
    """

    def __init__(self, server: zmq.Socket[Any], limit: int) -> None:
        self.monitor = server.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self.cut = 0
        self._server, self._limit = server, limit
        self._connections: dict[int, _Connection] = {}
        self._next = 0.0
        self._limited_log = RateLimitedLogger(log)

    def follow(self) -> None:
        """Note connections that were accepted or closed."""
        while self.monitor.poll(0):
            event = parse_monitor_message(self.monitor.recv_multipart())
            descriptor = int(event["value"])
            self._connections.pop(descriptor, None)
            if event["event"] == zmq.EVENT_ACCEPTED:
                with contextlib.suppress(OSError), _borrowed(descriptor) as tcp:
                    if tcp.family != socket.AF_UNIX:
                        self._connections[descriptor] = _Connection(tcp.getpeername())

    def finished(self, frame: zmq.Frame) -> None:
        """A message came, with this frame."""
        connection = self._connections.get(int(frame.get(zmq.SRCFD)))
        if connection is not None:
            connection.finished = True

    def check(self, now: float) -> int:
        """Check all connections, if it is time to; how many were cut off."""
        if now < self._next or not hasattr(socket, "TCP_INFO"):
            return 0
        before = self.cut
        for descriptor, connection in list(self._connections.items()):
            with contextlib.suppress(OSError, struct.error), _borrowed(descriptor) as tcp:
                self._check(tcp, connection, now)
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
            tcp.shutdown(socket.SHUT_RDWR)
            self.cut += 1
            self._limited_log.warning(
                "unfinished",
                f"cut a connection from {connection.peer[0]} off: {unfinished:.0f} bytes of a "
                f"message that does not end, at most {self._limit} are taken; look at what it runs",
            )


@contextlib.contextmanager
def _borrowed(descriptor: int) -> Any:
    """libzmq's own socket, which stays open."""
    tcp = socket.socket(fileno=descriptor)
    try:
        yield tcp
    finally:
        tcp.detach()
