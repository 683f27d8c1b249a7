"""The copies of a spool's newest mark outside its segments, which also work on a full disk.

A mark is written to a segment and to the file `mark`. Both need room on the disk. While there is
none, a mark overwrites bytes of the file `reserve`, which has its full size from the beginning.
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from typing import Any

from stream_ssl import durable
from stream_ssl.bounded_files import open_binary, open_file
from stream_ssl.producers._spool_records import MARK, read_record

HALF_BYTES = 16 * 1024  # a mark of some 2,000 packets
_NAMES = ("mark", "reserve")
COPY_FILES = (*_NAMES, "mark.part", "reserve.part")

logger = logging.getLogger("stream_ssl.producers")


class MarkCopies:
    """The files `mark` and `reserve` of a spool's folder.

    Args:
        folder: the folder. The reserve is written now if there is room for it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._mark, self._reserve = (folder / name for name in _NAMES)
        self._reserved = True  # whether the reserve may hold a mark
        if not self._reserve.exists():
            self._reserved = False
            with contextlib.suppress(OSError):  # the next start tries again
                durable.write(self._reserve, bytes(2 * HALF_BYTES), 0o600)

    def write(self, record: bytes) -> None:
        """Write the copy of a mark that is in a segment."""
        try:
            durable.write(self._mark, record, 0o600)
        except OSError as error:
            logger.warning("spool %s: %s; the mark has no copy", self._folder, error.strerror)

    def write_reserve(self, record: bytes, order: int) -> bool:
        """Write a mark that no segment has room for. Return False if this fails.

        The marks take turns in two halves of the reserve, by their number `order`, so a torn write
        leaves the mark before.
        """
        if len(record) > HALF_BYTES:
            return False
        try:
            self._overwrite(record, order % 2 * HALF_BYTES)
        except (OSError, ValueError):
            return False
        self._reserved = True
        return True

    def newest(self) -> dict[str, Any]:
        """Return the fields of the newest mark; empty if there is none, or it is damaged."""
        found: dict[str, Any] = {}
        for path, offset in ((self._mark, 0), (self._reserve, 0), (self._reserve, HALF_BYTES)):
            with contextlib.suppress(OSError, ValueError), open_binary(path) as file:
                file.seek(offset)
                record = read_record(file)
                if record is not None and record.kind == MARK:
                    found = max(found, record.info, key=lambda info: info.get("order", 0))
        return found

    def forget(self) -> None:
        """Delete the copies. The next segment syncs the folder, before a start could read both.

        If the disk refuses to delete a copy, the copy stays. A start then finds its packets gone.
        """
        with contextlib.suppress(OSError, ValueError):
            self._mark.unlink(missing_ok=True)
            if self._reserved:
                self._overwrite(bytes(2 * HALF_BYTES), 0)
                self._reserved = False

    def _overwrite(self, data: bytes, offset: int) -> None:
        """Replace bytes of the reserve, which needs no room on the disk."""
        handle = open_file(self._reserve, os.O_WRONLY)
        try:
            os.pwrite(handle, data, offset)
            os.fsync(handle)
        finally:
            os.close(handle)
