"""Logging that a flood of equal events cannot fill."""

from __future__ import annotations

import logging
import time


class RateLimitedLogger:
    """Logs a bounded number of lines per kind of event, and says how many it left out.

    Args:
        log: where to.
        seconds: length of a window.
        lines: most lines of one kind within a window.
    """

    def __init__(self, log: logging.Logger, seconds: float = 5.0, lines: int = 1) -> None:
        self._log = log
        self._seconds, self._lines = seconds, lines
        # Kind -> (start of its window, lines written in it, lines left out). Kinds are few:
        # reasons, not senders.
        self._windows: dict[str, tuple[float, int, int]] = {}

    def warning(self, kind: str, message: str) -> None:
        """Logs a message at level WARNING, unless its kind has used up its lines."""
        self.log(logging.WARNING, kind, message)

    def log(self, level: int, kind: str, message: str, exc_info: bool = False) -> None:
        """Logs a message, unless its kind has used up its lines; `exc_info` as in `logging`."""
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
    """Return foreign text as one bounded line without control characters.

    Peers, files and servers choose names, reasons and URLs. Escape sequences in them would act on
    the terminal that shows a log, and line ends would forge lines of it.
    """
    whole = str(text)
    cut = whole[:length] + ("..." if len(whole) > length else "")
    return "".join(sign if sign.isprintable() else "?" for sign in cut)
