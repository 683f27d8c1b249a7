"""A logger that limits how often an event of one kind is logged."""

from __future__ import annotations

import logging
import time


class RateLimitedLogger:
    """A logger that writes a limited number of lines per kind of event and counts the rest.

    Args:
        log: the logger to write to.
        seconds: the length of a window.
        lines: the most lines of one kind within a window.
    """

    def __init__(self, log: logging.Logger, seconds: float = 5.0, lines: int = 1) -> None:
        self._log = log
        self._seconds, self._lines = seconds, lines
        # Kind -> (start of its window, lines written, lines suppressed). The dict stays small,
        # because a kind is a reason and never a sender.
        self._windows: dict[str, tuple[float, int, int]] = {}

    def warning(self, kind: str, message: str) -> None:
        """Log a message at level WARNING, unless its kind has reached the limit."""
        self.log(logging.WARNING, kind, message)

    def log(self, level: int, kind: str, message: str, exc_info: bool = False) -> None:
        """Log a message, unless its kind has reached the limit; `exc_info` is as in `logging`."""
        now = time.monotonic()
        start, lines, left_out = self._windows.get(kind, (now, 0, 0))
        if now - start >= self._seconds:
            start, lines = now, 0
        if lines >= self._lines:
            self._windows[kind] = (start, lines, left_out + 1)
            return
        more = f" ({left_out} more of these since the last line)" if left_out else ""
        self._log.log(level, "%s%s", printable(message, 2000), more, exc_info=exc_info)
        self._windows[kind] = (start, lines + 1, 0)


def printable(text: object, length: int = 200) -> str:
    """Return untrusted text as one line of at most `length` characters, safe to log.

    Peers, files and servers choose names, reasons and URLs. Escape sequences in such text could
    control the terminal that shows the log, and line breaks could forge log lines.
    """
    whole = str(text)
    cut = whole[:length] + ("..." if len(whole) > length else "")
    return "".join(sign if sign.isprintable() else "?" for sign in cut)
