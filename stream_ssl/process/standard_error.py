"""Standard error that stops no process: text is lost if it cannot be written."""

from __future__ import annotations

import io
import os
import select
import stat
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

STDERR = 2
PATIENCE_SECONDS = 1.0
"""Seconds for which a text waits until the reader of a full pipe or a stopped terminal goes on."""


class Lossy(io.FileIO):
    """A file that loses text which it cannot write, such as on a full disk or in a full pipe.

    A full pipe takes no text while its reader is paused, such as `less`, a terminal after Ctrl-S,
    or ssh without a network. The first text waits for the reader, and the next ones do not.

    Attributes:
        lost: how many texts were lost since the last written one, because no reader took them.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number, "wb", closefd=False)
        self.lost = 0
        self._cut = False
        # Only a piece of this size surely fits into a pipe that has room.
        regular = stat.S_ISREG(os.fstat(number).st_mode)
        self._piece = sys.maxsize if regular else select.PIPE_BUF

    def write(self, text: ReadableBuffer) -> int:
        """Write the text or lose its rest, and return its length."""
        given = bytes(text)
        rest = b"\n" + given if self._cut else given
        with suppress(OSError):
            while rest:
                if not has_room(self.fileno(), 0.0 if self.lost else PATIENCE_SECONDS):
                    self.lost += 1
                    break
                rest = rest[super().write(rest[: self._piece]) or 0 :]
                self._cut = bool(rest)
            else:
                self.lost = 0
        return len(given)


def has_room(number: int, seconds: float) -> bool:
    """Return whether this file takes text within some seconds, or fails at once."""
    poll = select.poll()
    poll.register(number, select.POLLOUT)
    return bool(poll.poll(1000 * seconds))


def lose_what_cannot_be_written() -> None:
    """Make standard error lose texts that cannot be written, so that they stop no command.

    Otherwise a wrong configuration would not end with status 2, and a supervisor would start the
    process again for ever.
    """
    if isinstance(sys.stderr, io.TextIOWrapper):
        file = io.BufferedWriter(Lossy(sys.stderr.fileno()))
        form = sys.stderr.encoding, sys.stderr.errors
        sys.stderr = io.TextIOWrapper(file, *form, line_buffering=True)


def lost() -> int:
    """Return how many of the last texts were lost because nobody read standard error."""
    raw = getattr(getattr(sys.stderr, "buffer", None), "raw", None)
    return raw.lost if isinstance(raw, Lossy) else 0
