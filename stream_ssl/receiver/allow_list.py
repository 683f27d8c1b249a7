"""The allow-list of a receiver: the names of its producers, with their public keys."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from stat import S_IMODE
from typing import Any

from stream_ssl.bounded_files import read_json
from stream_ssl.durable import replacing
from stream_ssl.rate_limited_logger import RateLimitedLogger
from stream_ssl.wire import check_name
from stream_ssl.wire.keys import check_key
from stream_ssl.wire.run_folder import ANY_NAME, MOST_BYTES

log = logging.getLogger(__name__)

_RELOAD_SECONDS = 0.2
_SETTLED_SECONDS = 3.0
"""Seconds after a change of the file. Any later change has another time, on any file system."""


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


def belongs(producer: str, name: str) -> bool:
    """Return whether an allow-list name covers a producer: its name, a parent of it, or "*"."""
    return name in (producer, ANY_NAME) or producer.startswith(f"{name}/")
