"""How a journal can refuse, and the lock that keeps a second writer out."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import lmdb


class JournalError(Exception):
    """Nothing of the append was kept; the same append may be tried again later."""


class JournalFull(JournalError):
    """No room: the budget is used up, or the disk is."""


def take_writer_lock(path: Path) -> int:
    """A descriptor whose closing frees the journal for another writer.

    Raises:
        JournalError: another process has it, or the folder cannot be used.
    """
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle = os.open(path / "writer.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise translate(error, path) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise JournalError(
            f"journal {path} is being written by another process: stop the other receiver first"
        ) from None
    return handle


def translate(error: Exception, path: Path) -> JournalError:
    """LMDB's or the system's error as the journal's."""
    text = str(error)
    full = isinstance(error, lmdb.DiskError) or any(
        word in text for word in ("No space left", "Disk quota", "Errno 28", "Errno 122")
    )
    kind = JournalFull if full else JournalError
    return kind(f"journal {path}: {text}")
