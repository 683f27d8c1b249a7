"""Access control: CURVE keys on an allow-list, checked at the handshake and for every message.

The check at the handshake alone is not enough. It does not end a connection when its key is
revoked, and the routing id of a connection does not prove its key.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from stat import S_IMODE
from typing import Any

import zmq
from zmq.auth.base import Authenticator
from zmq.utils import z85

from stream_ssl.bounded_files import read_json
from stream_ssl.durable import replacing
from stream_ssl.rate_limited_logger import RateLimitedLogger
from stream_ssl.wire import Keys, check_name
from stream_ssl.wire.keys import check_key
from stream_ssl.wire.run_folder import ANY_NAME, MOST_BYTES

log = logging.getLogger(__name__)

DOMAIN = "stream-ssl"
_RELOAD_SECONDS = 0.2
_SETTLED_SECONDS = 3.0
"""Age of a change after which another one has another time, on any file system."""


class AllowList:
    """An allow-list in a JSON file {"producer name": "public key", ...}; reloaded when it changes.

    The key under the name "*" may send for every producer.

    Attributes:
        broken: whether the newest version of the file is invalid and the previous list is in use.

    Raises:
        ValueError: the file is missing or malformed.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.broken = False
        self._loaded_stat = self._stat()
        self._settled = self._is_settled()
        self._names = self._read()  # key -> producer
        self._checked = time.monotonic()
        self._errors = 0
        self._limited_log = RateLimitedLogger(log)

    @classmethod
    def enter(cls, path: str | Path, name: str, public: str) -> None:
        """Add or replace the key of a producer in the file; create the file if it is missing.

        The file keeps its mode and its owners: the receiver may run as another user.

        Raises:
            ValueError: the file is malformed, or the key belongs to another producer.
        """
        path = Path(path).resolve()  # a link stays
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.parent):  # two processes must not read and replace the list at once
            keys = {name: key for key, name in cls(path)._names.items()} if path.exists() else {}
            keys[name] = public
            _key_to_name(keys, path)
            _replace(path, keys)

    @classmethod
    def revoke(cls, path: str | Path, name: str) -> None:
        """Remove the key of a producer from the file, which keeps its mode and its owners.

        Raises:
            ValueError: the file is missing or malformed, or has no key of this name.
        """
        path = Path(path).resolve()
        cls(path)  # without a folder there is nothing to lock
        with _locked(path.parent):
            keys = {name: key for key, name in cls(path)._names.items()}
            if name not in keys:
                there = ", ".join(sorted(keys)) or "none"
                raise ValueError(f"allow-list {path}: it has no key of {name!r}; it names: {there}")
            del keys[name]
            _replace(path, keys)

    def name_of(self, key: str | None) -> str | None:
        """Return the name that the list gives to a key, or None if the key is not listed."""
        return None if key is None else self._names.get(key)

    def reload(self) -> None:
        """Reload the file if it has changed; if it is invalid, log this and keep the old list."""
        if time.monotonic() - self._checked < _RELOAD_SECONDS:
            return
        self._checked = time.monotonic()
        before, self._loaded_stat = self._loaded_stat, self._stat()
        is_new = self._loaded_stat != before
        if not is_new and self._settled:
            return
        self._settled = self._is_settled()
        names = self._names
        try:
            self._names = self._read()
        except ValueError as error:
            if not is_new and self.broken:
                return
            self._errors += 1
            self.broken = True
            if isinstance(error.__cause__, OSError):  # such as no free descriptor: retry
                self._loaded_stat = None
            text = f"{error}; the list before it stays in force"
            self._limited_log.log(logging.ERROR, "list", text)
        else:
            if is_new or self.broken or self._names != names:
                log.info("allow-list %s: %d keys", self.path, len(self._names))
            self.broken = False

    def take_errors(self) -> int:
        """Return how often a changed file was invalid since the last call."""
        errors, self._errors = self._errors, 0
        return errors

    def _stat(self) -> tuple[int, int, int] | None:
        try:
            stat = self.path.stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_ino, stat.st_size

    def _is_settled(self) -> bool:
        """Return whether a further change would show in the file's facts.

        Some file systems keep times in whole seconds. A second change within the same second can
        then leave the facts as they are.
        """
        if self._loaded_stat is None:
            return True
        return abs(time.time() - self._loaded_stat[0] * 1e-9) > _SETTLED_SECONDS

    def _read(self) -> dict[str, str]:
        try:
            names = read_json(self.path, MOST_BYTES, links=True)
        except OSError as error:
            remedy = "let the receiver's user read it (chown)"
            if isinstance(error, FileNotFoundError):
                remedy = f"enter a producer with: stream-ssl keys NAME --allow {self.path}"
            raise ValueError(f"allow-list {self.path}: {error.strerror}; {remedy}") from error
        except ValueError as error:  # such as an empty file after a power cut
            raise ValueError(
                f"allow-list {error}; repair the file, or remove it and enter each producer with: "
                f"stream-ssl keys NAME --allow {self.path}"
            ) from None
        return _key_to_name(names, self.path)


def _replace(path: Path, keys: dict[str, str]) -> None:
    """Write a list of keys by name in place of the file. An earlier file's mode and owners stay."""
    before = path.stat() if path.exists() else None
    with replacing(path) as file:
        if before is not None:
            for owners in ((-1, before.st_gid), (before.st_uid, -1)):
                with contextlib.suppress(OSError):  # only root may give a file away
                    os.fchown(file.fileno(), *owners)
            os.fchmod(file.fileno(), S_IMODE(before.st_mode))
        file.write(json.dumps(keys, indent=1).encode() + b"\n")


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold an exclusive lock on a folder, if its file system supports locks."""
    handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # a network file system may not support locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _key_to_name(names: Any, path: Path) -> dict[str, str]:
    """Check the content of the file, name -> key, and return key -> name."""
    if not isinstance(names, dict):
        raise ValueError(f'allow-list {path}: must be {{"producer name": "public key", ...}}')
    found: dict[str, str] = {}
    for name, key in names.items():
        try:
            if name != ANY_NAME:
                check_name(name)
            check_key("public", key)
        except ValueError as error:
            raise ValueError(f"allow-list {path}: {name!r}: {error}") from None
        if key in found:
            raise ValueError(
                f"allow-list {path}: {name!r} and {found[key]!r} have one key; "
                "a key names one producer, which may use names below its own: NAME/..."
            )
        found[key] = name
    return found


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


def belongs(producer: str, name: str) -> bool:
    """Return whether an allow-list name covers a producer: its name, a parent of it, or "*"."""
    return name in (producer, ANY_NAME) or producer.startswith(f"{name}/")


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
