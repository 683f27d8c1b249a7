"""Limits on how often an event of one kind is logged."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Hashable


class LineLimit:
    """A limit on the log lines of each kind within a window, which counts the lines left out.

    Args:
        lines: the most lines of one kind within a window.
        seconds: the length of a window.
        clock: monotonic seconds.
        kinds: the most kinds. All further kinds count as one.
    """

    def __init__(
        self,
        lines: int,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
        kinds: float = math.inf,
    ) -> None:
        self._lines, self._seconds, self._clock, self._kinds = lines, seconds, clock, kinds
        # Kind -> (start of its window, lines written, lines left out).
        self._windows: dict[Hashable, tuple[float, int, int]] = {}

    def admit(self, kind: Hashable) -> str | None:
        """Return None if a line must be left out, else the text that the line ends with.

        The text is empty, or says how many lines of this kind were left out before.
        """
        if kind not in self._windows and len(self._windows) >= self._kinds:
            kind = None
        now = self._clock()
        start, lines, left_out = self._windows.get(kind, (now, 0, 0))
        if now - start >= self._seconds:
            start, lines = now, 0
        if lines >= self._lines:
            self._windows[kind] = (start, lines, left_out + 1)
            return None
        self._windows[kind] = (start, lines + 1, 0)
        return f" ({left_out} more of these since the last line)" if left_out else ""


class RateLimitedLogger:
    """A logger that writes a limited number of lines per kind of event and counts the rest.

    Args:
        log: the logger to write to.
        seconds: the length of a window.
        lines: the most lines of one kind within a window.
    """

    def __init__(self, log: logging.Logger, seconds: float = 5.0, lines: int = 1) -> None:
        self._log, self._limit = log, LineLimit(lines, seconds)

    def warning(self, kind: str, message: str) -> None:
        """Log a message at level WARNING, unless its kind has reached the limit."""
        self.log(logging.WARNING, kind, message)

    def log(self, level: int, kind: str, message: str, exc_info: bool = False) -> None:
        """Log a message, unless its kind has reached the limit; `exc_info` is as in `logging`."""
        more = self._limit.admit(kind)
        if more is not None:
            self._log.log(level, "%s%s", printable(message, 2000), more, exc_info=exc_info)


def printable(text: object, length: int = 200) -> str:
    """Return untrusted text as one line of at most `length` characters, safe to log.

    Peers, files and servers choose names, reasons and URLs. Escape sequences in such text could
    control the terminal that shows the log, and line breaks could forge log lines.
    """
    whole = str(text)
    cut = whole[:length] + ("..." if len(whole) > length else "")
    return "".join(one if one.isprintable() else "?" for one in cut)
