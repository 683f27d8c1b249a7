"""The lock that lets only one process write a journal."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from stream_ssl.bounded_files import open_file
from stream_ssl.durable import make_folder
from stream_ssl.journal.errors import LOCAL_DISK, JournalError, as_journal_error
from stream_ssl.journal.segment import Damaged

LOCK_FILE = "writer.lock"


class WriterLock:
    """An exclusive lock of a journal's folder, from construction to `release`.

    Args:
        folder: the folder of the journal; created if it is missing.

    Raises:
        JournalError: another process has the lock, or the folder cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._handle: int | None = None
        try:
            make_folder(folder, mode=0o700)
            handle = open_file(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT)
        except (OSError, ValueError) as error:
            raise as_journal_error(error, folder) from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(handle)
            why = "is being written by another process: stop the other receiver first"
            if not isinstance(error, BlockingIOError):  # some network file systems have no locks
                why = f"cannot be locked ({error.strerror}): {LOCAL_DISK}"
            raise JournalError(f"journal {folder} {why}") from None
        self._handle = handle

    def check(self) -> None:
        """Check that the lock file is still the locked one.

        If the folder was deleted and created again, another process may hold the new lock.

        Raises:
            Damaged: the lock file was deleted or replaced.
        """
        if not self.is_in_place():
            raise Damaged(f"{LOCK_FILE} was deleted: start the receiver again")

    def is_in_place(self) -> bool:
        """Return whether the lock file is still the locked one."""
        assert self._handle is not None, "released"
        try:
            found = (self._folder / LOCK_FILE).stat()
        except OSError:
            return False
        return os.path.samestat(found, os.fstat(self._handle))

    def release(self) -> None:
        """Release the lock, if it is not released yet."""
        if self._handle is not None:
            fcntl.flock(self._handle, fcntl.LOCK_UN)  # closing is not enough during a fork
            os.close(self._handle)
            self._handle = None
