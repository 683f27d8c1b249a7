"""Access control: CURVE keys on an allow-list, checked at the handshake and for every message.

The check at the handshake alone is not enough. It does not end a connection when its key is
revoked, and the routing id of a connection does not prove its key.
"""

from __future__ import annotations

import logging
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import zmq
from zmq.auth.base import Authenticator
from zmq.utils import z85

from stream_ssl.rate_limited_logger import RateLimitedLogger
from stream_ssl.receiver.allow_list import AllowList, belongs
from stream_ssl.wire import Keys

log = logging.getLogger(__name__)

DOMAIN = "stream-ssl"


class Access:
    """The authentication of a receiver's connections by CURVE, and authorisation of its messages.

    Args:
        keys: the key pair of the receiver, or the path of NAME.secret.json.
        allow: the path of the allow-list.

    Raises:
        ValueError: the secret is missing, or a file is malformed.

    Attributes:
        denied: handshakes that were denied so far, also those whose check raised an exception.
    """

    def __init__(self, keys: Keys | str | Path, allow: str | Path) -> None:
        self.keys = keys if isinstance(keys, Keys) else Keys.load(keys)
        if self.keys.secret is None:
            raise ValueError(
                f"receiver keys {self.keys.name!r}: the secret half is needed; "
                f"name {self.keys.name}.secret.json"
            )
        self.allow = AllowList(allow)
        self.denied = 0
        self._authenticator: _Authenticator | None = None

    def start(self, context: zmq.Context[Any]) -> zmq.Socket[Any]:
        """Start to answer handshakes; call `handle` when the returned socket is readable."""
        self._authenticator = _Authenticator(self, context)
        self._authenticator.start()
        return self._authenticator.zap_socket

    def secure(self, socket: zmq.Socket[Any]) -> None:
        """Make a socket a CURVE server; call this before `bind`."""
        assert self.keys.secret is not None
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.keys.secret.encode())
        # Without an enforced domain, libzmq accepts every client if the ZAP handler is missing.
        socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN.encode())
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def handle(self) -> None:
        """Answer the waiting handshakes. Never raises: a handshake whose check fails is denied."""
        if self._authenticator is not None:
            self.allow.reload()
            self._authenticator.answer_all()

    def permits(self, key: str | None, producer: str) -> bool:
        """Return whether the key in a message's User-Id may now send for a producer."""
        name = self.allow.name_of(key)
        return name is not None and belongs(producer, name)

    def knows(self, key: str | None) -> bool:
        """Return whether the key in a message's User-Id is now on the list."""
        return self.allow.name_of(key) is not None

    def stop(self) -> None:
        """Close the socket that `start` returned."""
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator = None


def _peer_of(message: list[bytes]) -> str:
    """Return the address and the public key in a ZAP request, for the log."""
    address = message[3].decode("ascii", "replace")[:64] if len(message) > 3 else "unknown"
    if len(message) <= 6 or len(message[6]) != 32:
        return f"{address} without a key"
    return f"{address} with the public key {z85.encode(message[6]).decode()}"


class _Authenticator(Authenticator):
    """A ZAP handler in the receiver's own loop.

    The handler thread of pyzmq is not used, because it ends when a check raises an exception.
    """

    def __init__(self, access: Access, context: zmq.Context[Any]) -> None:
        super().__init__(context)
        self._access = access
        self._replied = False
        self._peer = ""
        self._limited_log = RateLimitedLogger(log)
        self.configure_curve_callback(DOMAIN, self)

    def callback(self, domain: str, key: bytes) -> bool:  # noqa: ARG002 - pyzmq's signature
        """Return whether a public key (Z85) may connect; the key becomes the User-Id."""
        return self._access.allow.name_of(key.decode("ascii")) is not None

    def answer_all(self) -> None:
        while True:
            try:
                message = self.zap_socket.recv_multipart(zmq.NOBLOCK)
            except zmq.ZMQError:
                return
            self._answer(message)

    def _answer(self, message: list[bytes]) -> None:
        self._replied = False
        self._peer = _peer_of(message)
        try:
            _run_without_waiting(self.handle_zap_message(message))
        except Exception:
            text = "a handshake could not be checked and was denied"
            self._limited_log.log(logging.ERROR, "internal", text, exc_info=True)
        if not self._replied:  # a REP socket must answer before it can receive again
            request = message[1] if len(message) > 1 else b""
            self._send_zap_reply(request, b"500", b"Internal error")

    def _send_zap_reply(
        self, request_id: bytes, status_code: bytes, status_text: bytes, user_id: str = "anonymous"
    ) -> None:
        self._replied = True
        if status_code != b"200":
            self._access.denied += 1
            reason = status_text.decode("utf-8", "replace")
            self._limited_log.warning(reason, f"connection denied: {self._peer}: {reason}")
        super()._send_zap_reply(request_id, status_code, status_text, user_id)


def _run_without_waiting(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine that never waits, without an event loop.

    Raises:
        RuntimeError: the coroutine has waited.
    """
    try:
        coroutine.send(None)
    except StopIteration:
        return
    coroutine.close()
    raise RuntimeError("a handshake's check waited for something")
