"""One transport connection: a DEALER socket, and the monitor that reports its events.

A connection that fails is closed and replaced. libzmq does not reconnect after some handshake
failures, and a new socket carries no messages of the old one.
"""

from __future__ import annotations

import contextlib
import errno
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import zmq
from zmq.utils.monitor import parse_monitor_message

from stream_ssl.wire import Keys, require_loopback
from stream_ssl.wire.keys import IN_RUN_REMEDY, public_key
from stream_ssl.wire.messages import Frame, Frames
from stream_ssl.wire.run_folder import KEYS, find_receiver

HEARTBEAT_MS = 1000
HEARTBEAT_TIMEOUT_MS = 3000
HANDSHAKE_MS = 5000
RETRY_MS = 100
RETRY_MAX_MS = 1000
DIAGNOSE_SECONDS = 1.0  # timeout of each network operation of diagnose()
MAX_REPLY = 1 << 20  # bytes; the receiver's messages are small
KEYS_REMEDY = (
    "pass run=FOLDER (--run FOLDER to `stream-ssl produce`) where the run's folder is on this "
    "machine, or keys= and server_key= (--key and --server_key)"
)


@dataclass(frozen=True, slots=True)
class Curve:
    """The keys of a CURVE client, in Z85."""

    name: str
    public: str
    secret: str
    server: str

    def __str__(self) -> str:
        return f"the key {self.name!r} (public {self.public})"


def curve_of(
    address: str, keys: Keys | str | Path | None, server_key: Keys | str | Path | None
) -> Curve | None:
    """Return the keys of a CURVE connection, or None for plain text.

    Raises:
        ValueError: plain text is used outside loopback, only one of the two keys is given, or a
            key file is invalid.
    """
    if keys is None and server_key is None:
        require_loopback(address, f"{KEYS_REMEDY}; made with: stream-ssl keys NAME")
        return None
    if keys is None or server_key is None:
        raise ValueError(
            f"keys and server_key belong together: {KEYS_REMEDY}, both, or neither on loopback"
        )
    pair = keys if isinstance(keys, Keys) else Keys.load(keys)
    if pair.secret is None:
        raise ValueError(
            f"keys {pair.name!r}: only the public half; pass {pair.name}.secret.json, "
            f"made with: stream-ssl keys {pair.name}"
        )
    return Curve(pair.name, pair.public, pair.secret, public_key(server_key))


def curve_in_run(
    run: str | Path,
    name: str,
    keys: Keys | str | Path | None,
    server_key: Keys | str | Path | None,
) -> tuple[str, Curve | None]:
    """Return the address of a run's receiver for a producer's name, and the keys for CURVE.

    Raises:
        ValueError: the run has no receiver, the run has no key that this producer can read, or
            the run uses plain text and a key is given.
    """
    found = find_receiver(run, name)
    if found.server_key is None:
        if keys is not None or server_key is not None:
            raise ValueError(
                f"run {run}: it speaks plain text (`access: plain`) and takes no key; leave keys= "
                "and server_key= (--key and --server_key) out"
            )
        return found.address, curve_of(found.address, None, None)
    if keys is None and found.key is not None:
        keys = Keys.load(found.key, IN_RUN_REMEDY)
    if keys is None:
        folder = Path(run) / KEYS
        allow = folder / "allow.json" if folder.exists() else "ALLOW_LIST"
        raise ValueError(
            f"run {run}: this user can read no producer's key there; run the producer as the run's "
            "user, or pass a key of its own as keys= (--key), made with: "
            f"stream-ssl keys {name or 'NAME'} --allow {allow}"
        )
    server = found.server_key if server_key is None else server_key
    return found.address, curve_of(found.address, keys, server)


class Diagnosis(NamedTuple):
    """The result of a probe of an address.

    Attributes:
        reason: why a handshake fails; None: unknown.
        ipv6: whether the peer accepts connections, but only at an IPv6 address.
    """

    reason: str | None
    ipv6: bool = False


def diagnose(address: str) -> Diagnosis:
    """Find out why a handshake with an address fails.

    The function resolves the host name and connects over plain TCP, which may take some seconds.
    """
    transport, _, rest = address.partition("://")
    if transport != "tcp":
        return Diagnosis(None)
    host, _, port = rest.rpartition(":")
    host = host.strip("[]")
    try:
        found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        return Diagnosis(
            f"the host name {host!r} cannot be resolved ({error.strerror}); check its spelling and "
            "this machine's name server"
        )
    for family, *_, place in sorted(found, key=lambda one: one[0] == socket.AF_INET6):
        with contextlib.suppress(OSError), socket.socket(family) as peer:
            peer.settimeout(DIAGNOSE_SECONDS)
            peer.connect(place)
            answer = b""
            with contextlib.suppress(OSError):
                answer = _first_answer(peer)
            return Diagnosis(_no_receiver(address, answer), family == socket.AF_INET6)
    return Diagnosis(None)


def _no_receiver(address: str, answer: bytes) -> str | None:
    """Return why a peer that begins with these bytes is not a receiver; None: it may be one."""
    if not answer or answer[0] == 0xFF:  # the first byte of ZeroMQ's greeting
        return None
    if answer.startswith(b"HTTP/"):
        return (
            f"{address} is an HTTP address, such as that of the run's page: give the data address, "
            "which the receiver logs at its start (listening on tcp://...) and writes to "
            "RUN/endpoints.json"
        )
    return f"{address} answers {answer[:24]!r}, which is no ZeroMQ; is it another service's port?"


def _first_answer(peer: socket.socket) -> bytes:
    """Return the peer's first bytes.

    ZeroMQ sends its greeting at once. Send a silent peer an HTTP request.
    """
    try:
        return peer.recv(64)
    except TimeoutError:
        peer.sendall(b"GET / HTTP/1.0\r\n\r\n")
        return peer.recv(64)


class Connection:
    """A socket that connects to one address.

    Args:
        context: the context of the socket.
        address: the address.
        curve: the keys. None: plain text.
        ipv6: whether a host name stands for an IPv6 address. libzmq tries one kind only.

    Attributes:
        up: whether the ZMTP handshake is complete, including authentication.
        lost: whether the connection has failed and must be replaced.
        reason: why the connection is not up, as text for people.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        curve: Curve | None,
        ipv6: bool = False,
    ) -> None:
        self.up = False
        self.lost = False
        self.reason = f"still connecting to {address}"
        self._address, self._curve = address, curve
        self.ipv6 = ipv6 or "[" in address
        self._opened = False
        try:
            self._open(context)
        except zmq.ZMQError as error:  # such as too many open files, which passes
            self._fail(f"no socket can be opened ({error.strerror}); it is tried again")

    def _open(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.socket = context.socket(zmq.DEALER)
        try:
            self.socket.linger = 0
            self._configure()
            self._monitor()
            self.socket.connect(self._address)
        except zmq.ZMQError:
            self.socket.close(0)
            raise
        self._opened = True

    def _monitor(self) -> None:
        self.monitor = self.socket.get_monitor_socket(
            zmq.EVENT_CONNECT_RETRIED
            | zmq.EVENT_HANDSHAKE_SUCCEEDED
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_DISCONNECTED
        )
        self.monitor.linger = 0

    def _configure(self) -> None:
        set_option = self.socket.setsockopt
        set_option(zmq.IMMEDIATE, 1)  # queue no messages while there is no connection
        set_option(zmq.RECONNECT_IVL, RETRY_MS)
        set_option(zmq.RECONNECT_IVL_MAX, RETRY_MAX_MS)
        set_option(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        set_option(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        set_option(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        set_option(zmq.HEARTBEAT_TTL, HEARTBEAT_TIMEOUT_MS)
        set_option(zmq.MAXMSGSIZE, MAX_REPLY)
        set_option(zmq.IPV6, int(self.ipv6))
        if self._curve:
            self.socket.curve_publickey = self._curve.public.encode()
            self.socket.curve_secretkey = self._curve.secret.encode()
            self.socket.curve_serverkey = self._curve.server.encode()

    def send(self, frames: Frames) -> bool:
        """Send a message. Return False if the socket is full; try again when it is writable."""
        try:
            self.socket.send_multipart(frames, zmq.DONTWAIT, copy=True)
        except zmq.Again:
            return False
        return True

    def receive(self) -> list[Frame] | None:
        """Return the next message, or None if there is none."""
        try:
            return list(self.socket.recv_multipart(zmq.DONTWAIT))
        except zmq.Again:
            return None

    def watch(self) -> None:
        """Update `up`, `lost` and `reason` from the events of the monitor."""
        while not self.lost and self.monitor.poll(0):
            event = parse_monitor_message(self.monitor.recv_multipart())
            self._note(event["event"], event["value"])

    def _note(self, event: int, value: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.up = True
        elif event == zmq.EVENT_CONNECT_RETRIED:
            self.reason = f"nobody listens at {self._address}; is the receiver running there?"
        elif event == zmq.EVENT_DISCONNECTED:
            self._fail(
                f"the connection to {self._address} broke"
                if self.up
                else f"{self._address} hung up before the handshake; does a receiver listen there?"
            )
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self._fail(
                f"{self._address} refuses {self._curve} (status {value}): it is not on the "
                "receiver's allow-list; add the public key there"
            )
        elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL and value == errno.EAGAIN:
            self._fail(f"{self._address} accepts connections but does not answer; is it hung?")
        else:
            self._fail(self._handshake())

    def _handshake(self) -> str:
        if self._curve:
            return (
                f"{self._address} broke off the encrypted handshake: the receiver ended just then, "
                "the server key is wrong, or it is a receiver in plain text. If this message comes "
                "again, compare server_key with its public key"
            )
        return (
            f"{self._address} broke off the plain-text handshake: most likely it requires keys; "
            + KEYS_REMEDY
        )

    def _fail(self, reason: str) -> None:
        if not self.lost:
            self.lost, self.up, self.reason = True, False, reason

    def close(self, linger_ms: int = 0) -> None:
        """Close both sockets. Unsent messages have `linger_ms` milliseconds to leave."""
        if not self._opened:
            return
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(linger_ms)
