"""The socket that producers connect to."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from stream_ssl.rate_limited_logger import RateLimitedLogger
from stream_ssl.receiver.access import Access
from stream_ssl.receiver.backlogs import WIRE_PER_CREDIT, Backlogs
from stream_ssl.receiver.credit import CreditPolicy
from stream_ssl.receiver.verdicts import MAX_PATH
from stream_ssl.wire import Message, encode, require_loopback
from stream_ssl.wire.address import check_bind

log = logging.getLogger(__name__)

HEARTBEAT_MS = 1000
HEARTBEAT_TIMEOUT_MS = 3000
_HANDSHAKE_MS = 5000
_FRAME_SLACK = 64 << 10
_LEAST_MEMORY = 64 << 20  # bytes that the receiver may allocate beyond its memory at the start
_MOST_FRAMES = 5  # of a valid message, including the connection's routing id


@dataclass(frozen=True, slots=True)
class Incoming:
    """A message of a producer, before it is decoded; `peer` is the address of the sender."""

    route: bytes
    frames: list[memoryview]
    user: str | None
    peer: str


class Listener:
    """A listening socket with bounded unread bytes, which only known keys can connect to.

    Args:
        bind: the ZeroMQ address to listen on; port 0 selects a free port.
        access: the keys and the allow-list. None: plain text, which is possible only on loopback.
        policy: the rule for sharing credit, which limits the unread bytes.

    Attributes:
        backlogs: the limit for the unread bytes.

    Raises:
        ValueError: the address is invalid, or it needs keys and `access` is None.
        OSError: the address cannot be bound.
    """

    def __init__(self, bind: str, access: Access | None, policy: CreditPolicy) -> None:
        check_bind(bind)
        if access is None:
            require_loopback(
                bind,
                "for other addresses make keys with `stream-ssl keys receiver` and "
                "`stream-ssl keys NAME --allow FILE`, and give the receiver both as `access`",
            )
        self._access = access
        self._limited_log = RateLimitedLogger(log)
        self._context: zmq.Context[Any] = zmq.Context()
        self._poller = zmq.Poller()
        self._zap = None if access is None else access.start(self._context)
        if self._zap is not None:
            self._poller.register(self._zap, zmq.POLLIN)
        self.socket: zmq.Socket[Any] = self._context.socket(zmq.ROUTER)
        largest = policy.max_packet + _FRAME_SLACK
        self.backlogs = Backlogs(
            self.socket,
            WIRE_PER_CREDIT * policy.each + largest,
            max(_LEAST_MEMORY, 2 * (policy.total + policy.each + largest)),
            plain=access is None,
        )
        try:
            self._configure(ipv6="[" in bind)
            self.backlogs.start()
            if _is_taken(bind):  # libzmq would take a Unix socket from the process that listens
                raise zmq.ZMQError(errno.EADDRINUSE)
            self.socket.bind(bind)
        except zmq.ZMQError as error:
            self.close()
            remedy = _remedy(bind, error.errno)
            text = f"cannot listen at {bind}: {error.strerror}; {remedy} (receiver.bind)"
            raise OSError(error.errno, text) from error
        self._poller.register(self.socket, zmq.POLLIN)

    def _configure(self, ipv6: bool) -> None:
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
            (zmq.IPV6, int(ipv6)),
        ):
            self.socket.setsockopt(option, value)
        if self._access is not None:
            self._access.secure(self.socket)

    @property
    def endpoint(self) -> str:
        """The address of the socket, with the actual port, or the absolute path if it fits."""
        endpoint = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        path = endpoint.removeprefix("ipc://")
        if path == endpoint or path.startswith("@"):  # the name of an abstract socket
            return endpoint
        absolute = str(Path(path).absolute())  # producers start in other folders
        return f"ipc://{absolute}" if len(os.fsencode(absolute)) <= MAX_PATH else endpoint

    def wait(self, seconds: float) -> bool:
        """Answer handshakes for at most `seconds`; return whether messages have arrived."""
        ready = dict(self._poller.poll(max(0, int(seconds * 1000 + 0.999))))
        if self._zap in ready and self._access is not None:
            self._access.handle()
        if self.socket not in ready:
            return False
        self.backlogs.follow()
        return True

    def receive(self) -> list[zmq.Frame] | None:
        """Return the frames of the next message, or None if there is none.

        The list has at most one frame more than a valid message. An empty frame takes 2 bytes to
        send but about a hundred bytes as an object, so further frames are discarded.
        """
        try:
            frames = [self.socket.recv(zmq.NOBLOCK, copy=False)]
        except zmq.Again:
            return None
        while self.socket.getsockopt(zmq.RCVMORE):
            if len(frames) <= _MOST_FRAMES:
                frames.append(self.socket.recv(copy=False))
            else:
                self.socket.recv()
        return frames

    def open(self, frames: list[zmq.Frame]) -> Incoming | None:
        """Return the message in these frames, or None if the sender does not speak ZMTP 3."""
        route, *rest = frames
        if not self.backlogs.read(rest):
            text = "left out a message from a peer that does not speak ZMTP 3, such as a browser"
            self._limited_log.warning("zmtp", text)
            return None
        user = _user_of(rest[0]) if self._access is not None else None
        peer = str(rest[0].get("Peer-Address"))
        return Incoming(route.bytes, [frame.buffer for frame in rest], user, peer)

    def send(self, route: bytes, message: Message) -> bool | None:
        """Send a message to a connection.

        Returns:
            True: sent; False: the connection would block; None: the connection is lost.
        """
        try:
            self.socket.send_multipart([route, *encode(message)], zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                self._limited_log.warning("send", f"cannot answer a producer: {error}")
            return None
        return True

    def close(self, linger_ms: int = 0) -> None:
        """Close the socket. Unsent messages have `linger_ms` milliseconds to leave."""
        if self._context.closed:
            return
        if self._access is not None:
            self._access.stop()
        self.backlogs.close()
        self.socket.close(linger_ms)
        self._context.term()


def _is_taken(bind: str) -> bool:
    """Return whether a process listens at an ipc:// address; False for any other address."""
    transport, _, path = bind.partition("://")
    if transport != "ipc":
        return False
    with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(OSError):
        probe.setblocking(False)
        return probe.connect_ex(path) in (0, errno.EAGAIN)
    return False  # a path that is too long


def _remedy(bind: str, number: int | None) -> str:
    """Return the remedy for an error of the system at an address."""
    if bind.startswith("ipc:"):
        if number == errno.EADDRINUSE:
            return "stop the process that listens there, or choose another path"
        return f"choose a path of at most {MAX_PATH} bytes in a folder that this user may write"
    if number in (errno.EADDRINUSE, errno.EACCES):
        return "choose another port, or 0 for a free one"
    return "give an address or an interface of this machine, such as 127.0.0.1, [::1], or * for all"


def _user_of(frame: zmq.Frame) -> str | None:
    """Return the connection's User-Id, which ZAP set to the public key of the peer."""
    try:
        user = frame.get("User-Id")
    except zmq.ZMQError:
        return None
    return user if isinstance(user, str) else None
