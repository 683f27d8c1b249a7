"""A log that a flood of the same event does not drown."""

from __future__ import annotations

import logging
import time


class SeldomLog:
    """Logs few lines of each kind of event in a while, and says how many were left out.

    Args:
        log: where to.
        seconds: length of a while.
        lines: of one kind within it.
    """

    def __init__(self, log: logging.Logger, seconds: float = 5.0, lines: int = 1) -> None:
        self._log = log
        self._seconds, self._lines = seconds, lines
        # Kinds are few: reasons, not senders. Since when, lines since, and those left out.
        self._while: dict[str, tuple[float, int, int]] = {}

    def warn(self, kind: str, message: str) -> None:
        """One line of a kind, or none."""
        self.tell(logging.WARNING, kind, message)

    def tell(self, level: int, kind: str, message: str, trace: bool = False) -> None:
        """One line of a kind at a level of `logging`, or none; with the traceback of the exception
        at hand, if told so."""
        now = time.monotonic()
        since, lines, left_out = self._while.get(kind, (now, 0, 0))
        if now - since >= self._seconds:
            since, lines = now, 0
        if lines >= self._lines:
            self._while[kind] = (since, lines, left_out + 1)
            return
        more = f" ({left_out} more of these since the last line)" if left_out else ""
        self._log.log(level, "%s%s", message, more, exc_info=trace)
        self._while[kind] = (since, lines + 1, 0)


def printable(text: str, length: int = 80) -> str:
    """What a stranger said, fit for a line of a log: cut, without line ends or escapes."""
    cut = text[:length] + ("..." if len(text) > length else "")
    return "".join(sign if sign.isprintable() else "?" for sign in cut)
