"""endpoints.json in the run folder: the addresses of a run's processes."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stream_ssl.bounded_files import open_file, read_map
from stream_ssl.daemon.endings import Life
from stream_ssl.durable import make_folder, write
from stream_ssl.process.failures import Failure, check_writable
from stream_ssl.rate_limited_logger import RateLimitedLogger
from stream_ssl.wire.run_folder import ENDPOINTS

log = logging.getLogger(__name__)
limited_log = RateLimitedLogger(log, seconds=60.0)

FILE = ENDPOINTS
CHECK_SECONDS = 2.0
"""Seconds between two checks that the file still has a process's addresses."""
OTHER_FOLDER = "choose another run folder with --run"


@contextmanager
def hold_role(run: Path, role: str) -> Iterator[Life]:
    """Hold a role ("receiver", "learner") in a run folder until the block ends or the process dies.

    The folder keeps a record of how the process ended; see endings.py.

    Raises:
        Failure: another living process holds the role.
        ValueError: the folder cannot be written, and a retry will not help.
    """
    check_writable(run, "run folder", OTHER_FOLDER)
    try:
        make_folder(run)
        handle = open_file(run / f"{role}.lock", os.O_RDWR | os.O_CREAT, mode=0o644)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise
        raise ValueError(
            f"run folder {run} cannot be written ({error.strerror}); {OTHER_FOLDER}"
        ) from error
    with os.fdopen(handle, "r+", errors="replace") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Failure(
                f"{run}: a {role} already runs here (pid "
                f"{lock.read(32).strip() or 'unknown'}). Stop it, or give the new process "
                "another run folder with --run."
            ) from None
        except OSError as error:  # some network file systems have no locks
            raise ValueError(
                f"run folder {run}: its file system cannot lock {role}.lock ({error.strerror}); "
                f"{OTHER_FOLDER}"
            ) from error
        with contextlib.suppress(OSError):  # the lock holds even on a full disk
            pid = str(os.getpid()).encode()
            os.pwrite(handle, pid, 0)
            os.ftruncate(handle, len(pid))
        life = Life(run, role)
        with life.recorded():
            yield life


def holder(run: Path, role: str) -> int | None:
    """Return the id of the living process that holds a role in a run folder; None: no process.

    The lock is tried only if the process that it names is alive. Trying a free lock could stop a
    process that takes the lock at that moment.
    """
    try:
        with os.fdopen(open_file(run / f"{role}.lock"), errors="replace") as lock:
            pid = int(lock.read(32))
            if pid <= 0 or not _alive(pid):
                return None
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return pid
    except (OSError, ValueError, OverflowError):
        return None
    return None


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it belongs to another user
        pass
    return True


class Announcement:
    """The addresses of a role in endpoints.json, kept there while the process runs."""

    def __init__(self, run: Path, role: str, **addresses: str) -> None:
        self._run, self._role, self._addresses = run, role, addresses
        self._limited_log = RateLimitedLogger(log, seconds=60.0)
        self._done, self._check_at = False, 0.0
        self.write()

    def write(self) -> None:
        """Write the addresses if the file lacks them. Call this regularly.

        A full disk may accept them later, and somebody may remove, replace or damage the file.
        """
        if time.monotonic() < self._check_at:
            return
        self._check_at = time.monotonic() + CHECK_SECONDS
        path = self._run / FILE
        try:
            if self._done and _entry_of(self._run, self._role) == self._addresses:
                return
            publish(self._run, self._role, **self._addresses)
        except (OSError, ValueError) as error:  # a full disk, or a link instead of the lock
            text = f"{path} cannot be written, and may contain an older address: {error}"
            self._limited_log.warning("endpoints", text)
        else:
            if self._done:
                text = f"{path} was lost, replaced or damaged, and has been written again"
                self._limited_log.warning("again", text)
            self._done = True


def _entry_of(run: Path, role: str) -> dict[str, str] | None:
    """Return this process's entry in the file; None if it is missing or cannot be used."""
    try:
        entry = dict(read_map(run / FILE)[role])
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return entry if entry.pop("pid", None) == os.getpid() else None


def publish(run: Path, role: str, **addresses: str) -> None:
    """Write the addresses and the process id of a role. Entries of other roles stay."""
    with _changing(run) as endpoints:
        endpoints[role] = {**addresses, "pid": os.getpid()}


def withdraw(run: Path, role: str) -> None:
    """Remove the entry of a role, if no process has the role. A missing file is created."""
    if (role in load(run) or not (run / FILE).exists()) and holder(run, role) is None:
        with _changing(run) as endpoints:
            endpoints.pop(role, None)


@contextlib.contextmanager
def _changing(run: Path) -> Iterator[dict[str, dict[str, Any]]]:
    """Yield the entries by role, and write them at the end."""
    handle = open_file(run / f"{FILE}.lock", os.O_RDWR | os.O_CREAT, mode=0o644)
    with os.fdopen(handle, "r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        endpoints = load(run)
        yield endpoints
        write(run / FILE, json.dumps(endpoints, indent=2) + "\n")


def place_of(run: Path) -> dict[str, str]:
    """Return the path and the inode of a run folder. A copy of the folder has two other values."""
    return {"folder": str(run.resolve()), "inode": str(run.stat().st_ino)}


def load(run: Path) -> dict[str, dict[str, Any]]:
    """Return the entries by role; empty if nothing has run here.

    A file that cannot be read counts as empty: each process writes its addresses again.
    """
    try:
        return _read(run)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        text = f"{run / FILE} cannot be used ({error}): the running processes write it again"
        limited_log.warning(str(run), text)
        return {}


def fault(run: Path) -> str | None:
    """Return why the file cannot be used; None if it can, or if it does not exist."""
    try:
        _read(run)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        return str(error)
    return None


def _read(run: Path) -> dict[str, dict[str, Any]]:
    """Return the entries by role; raise ValueError or OSError if the file cannot be used."""
    endpoints = read_map(run / FILE)
    try:
        return {role: entry for role, entry in endpoints.items() if isinstance(entry["http"], str)}
    except (LookupError, TypeError, AttributeError):
        raise ValueError(f"{run / FILE} is damaged: an entry has no address") from None
