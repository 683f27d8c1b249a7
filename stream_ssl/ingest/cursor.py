"""What receiver and learner tell each other, through small files in the run's folder."""

from __future__ import annotations

import errno
import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path

from stream_ssl.durable import write

log = logging.getLogger(__name__)

FILE_NAME = "cursor.json"
_LENGTH = 64  # of the file: more than any two positions take
FULL_NAME = "journal.full"


@dataclass(frozen=True, slots=True)
class CursorState:
    """Journal positions: the next to read, and the first that checkpoints still need.

    Records before `durable` may be trimmed.
    """

    read: int = 1
    durable: int = 1


class Cursor:
    """How far the learner has come, and whether the journal has room for more.

    The file `cursor.json` is written by the learner and read by the receiver; the empty file
    `journal.full` is the receiver's, and lies there while no producer can be given credit.

    Args:
        folder: where the file lies; made if it is missing.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.path = Path(folder) / FILE_NAME
        self._full_path = self.path.with_name(FULL_NAME)
        self._seen: tuple[int, int, int] | None = None
        self._state = CursorState()

    def publish(self, read: int, durable: int) -> None:
        """Replaces the state, atomically.

        No fsync, twice a second: a mark lost with the power only trims less until the next.

        Raises:
            ValueError: positions that are not 1 <= durable <= read.
            OSError: the folder cannot be written.
        """
        if not 1 <= durable <= read:
            raise ValueError(
                f"cursor read={read}, durable={durable}: must hold 1 <= durable <= read; a "
                "checkpoint cannot need less than what was read before it"
            )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        content = json.dumps({"read": read, "durable": durable}).ljust(_LENGTH).encode()
        try:
            write(self.path, content, wait=False)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            # Trimming would make room: so tell of it in the bytes that the file has already.
            with self.path.open("r+b") as file:
                file.write(content)

    @property
    def full(self) -> bool:
        """Whether the receiver has no room until something is trimmed."""
        return self._full_path.exists()

    def tell_full(self, is_full: bool) -> None:
        """For the receiver. What cannot be told now is told at the next call."""
        try:
            if is_full:
                self._full_path.touch()
            else:
                self._full_path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("cannot tell the learner that the journal is full: %s", error)

    def load(self) -> CursorState:
        """The newest state; the last good one while the file is missing or damaged."""
        try:
            facts = self.path.stat()
            seen = (facts.st_mtime_ns, facts.st_ino, facts.st_size)
            if seen == self._seen:
                return self._state
            self._seen = seen  # a damaged one is told of once
            fields = json.loads(self.path.read_bytes())
            read, durable = int(fields["read"]), int(fields["durable"])
            if not 1 <= durable <= read:
                raise ValueError(f"read={read}, durable={durable}")
        except FileNotFoundError:
            return self._state
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("cursor %s cannot be read (%r): keeping %s", self.path, error, self._state)
            return self._state
        self._state = CursorState(read, durable)
        return self._state
