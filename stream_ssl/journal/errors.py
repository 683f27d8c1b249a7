"""Errors of the journal's writer."""

from __future__ import annotations

from pathlib import Path

import lmdb


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
    return kind(f"journal {path}: {text}")
