"""One transport connection: a DEALER socket and the monitor that says what becomes of it.

A connection that fails is thrown away, not mended: libzmq gives up by itself after some handshake
failures, and a fresh socket carries no messages of the old one in either direction.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import parse_monitor_message

from stream_ssl.wire.messages import Frame, Frames

HEARTBEAT_MS = 1000
HEARTBEAT_TIMEOUT_MS = 3000
HANDSHAKE_MS = 5000
RETRY_MS = 100
RETRY_MAX_MS = 1000
MAX_REPLY = 1 << 20  # bytes; the receiver's messages are small


@dataclass(frozen=True, slots=True)
class Curve:
    """What a CURVE client needs, in Z85."""

    public: str
    secret: str
    server: str


class Connection:
    """A socket on its way to one address.

    Attributes:
        up: the ZMTP handshake is done, its authentication included.
        lost: it has failed and must be thrown away.
        reason: why it is not up, for people.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, curve: Curve | None):
        self.up = False
        self.lost = False
        self.reason = f"still connecting to {address}"
        self._address, self._curve = address, curve
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = 0
        self._configure()
        self.monitor = self.socket.get_monitor_socket(
            zmq.EVENT_CONNECT_RETRIED
            | zmq.EVENT_HANDSHAKE_SUCCEEDED
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_DISCONNECTED
        )
        self.monitor.linger = 0
        self.socket.connect(address)

    def _configure(self) -> None:
        set_option = self.socket.setsockopt
        set_option(zmq.IMMEDIATE, 1)  # nothing waits in a pipe to nowhere
        set_option(zmq.RECONNECT_IVL, RETRY_MS)
        set_option(zmq.RECONNECT_IVL_MAX, RETRY_MAX_MS)
        set_option(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        set_option(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        set_option(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        set_option(zmq.HEARTBEAT_TTL, HEARTBEAT_TIMEOUT_MS)
        set_option(zmq.MAXMSGSIZE, MAX_REPLY)
        if "[" in self._address:
            set_option(zmq.IPV6, 1)
        if self._curve:
            self.socket.curve_publickey = self._curve.public.encode()
            self.socket.curve_secretkey = self._curve.secret.encode()
            self.socket.curve_serverkey = self._curve.server.encode()

    def send(self, frames: Frames) -> bool:
        """Whether the message has left; False: try again when the socket is writable."""
        try:
            self.socket.send_multipart(frames, zmq.DONTWAIT, copy=True)
        except zmq.Again:
            return False
        return True

    def receive(self) -> list[Frame] | None:
        """The next message, if there is one."""
        try:
            return list(self.socket.recv_multipart(zmq.DONTWAIT))
        except zmq.Again:
            return None

    def watch(self) -> None:
        """Reads what the monitor has to say into `up`, `lost` and `reason`."""
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
                f"{self._address} refuses this key (status {value}): it is not on the receiver's "
                "allow-list; add the public key there"
            )
        elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL and value == errno.EAGAIN:
            self._fail(f"{self._address} accepts connections but does not answer; is it hung?")
        else:
            self._fail(self._handshake())

    def _handshake(self) -> str:
        if self._curve:
            return (
                f"{self._address} broke off the encrypted handshake: most likely the server key is "
                "wrong, or it is a receiver in plain text; compare server_key with its public key"
            )
        return (
            f"{self._address} broke off the plain-text handshake: most likely it requires keys; "
            "pass keys= and server_key="
        )

    def _fail(self, reason: str) -> None:
        if not self.lost:
            self.lost, self.up, self.reason = True, False, reason

    def close(self, linger_ms: int = 0) -> None:
        """Frees both sockets; what was sent may take `linger_ms` to leave."""
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(linger_ms)
