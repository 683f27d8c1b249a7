"""A lock on a folder that only one process may write."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stream_ssl.process.failures import Failure

log = logging.getLogger(__name__)


@contextmanager
def only_writer(folder: Path, refusal: str) -> Iterator[None]:
    """Hold a lock on a folder until the block ends or the process dies.

    Args:
        folder: the folder, which exists.
        refusal: the error if another process holds the lock.

    Raises:
        Failure: another process holds the lock.
        OSError: the folder cannot be opened.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Failure(refusal) from None
        except OSError as error:  # some network file systems lock no folders
            log.debug("%s cannot be locked: %s", folder, error)
        yield
    finally:
        os.close(handle)
