"""Errors of the journal's writer."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import lmdb

LOCAL_DISK = "choose a folder on a local disk"
"""The remedy for a file system on which no journal can be written."""


class JournalError(Exception):
    """A failed append. Nothing was written, and the caller may retry the same append."""


class JournalFull(JournalError):
    """A failed append because the budget is used up or the disk is full."""


class BudgetUsed(JournalFull):
    """A failed append because the budget is used up. The disk works and has room."""


def as_journal_error(error: Exception, path: Path) -> JournalError:
    """Return an error of LMDB or of the system as a JournalError of the journal at `path`."""
    text = str(error)
    full = isinstance(error, lmdb.DiskError) or any(
        word in text for word in ("No space left", "Disk quota", "Errno 28", "Errno 122")
    )
    kind = JournalFull if full else JournalError
    invalid = isinstance(error, lmdb.Error) and os.strerror(errno.EINVAL) in text  # from 9p
    if (invalid or is_unsuited(text)) and LOCAL_DISK not in text:
        text = f"{text}: its file system cannot map or lock files; {LOCAL_DISK}"
    return kind(f"journal {path}: {text}")


def is_unsuited(text: str) -> bool:
    """Return whether an error comes from a file system that cannot map or lock files.

    Some network shares cannot, and some folders that a virtual machine shares with its host.
    """
    return any(os.strerror(number) in text for number in (errno.ENODEV, errno.ENOLCK))
