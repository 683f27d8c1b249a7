"""A log that a flood of the same event does not drown."""

from __future__ import annotations

import logging
import time


class SeldomLog:
    """Logs each kind of event at most once in a while, and says how many were left out.

    Args:
        log: where to.
        seconds: the least time between two lines of one kind.
    """

    def __init__(self, log: logging.Logger, seconds: float = 5.0) -> None:
        self._log = log
        self._seconds = seconds
        self._last: dict[str, tuple[float, int]] = {}  # kinds are few: reasons, not senders

    def warn(self, kind: str, message: str) -> None:
        """One line of a kind, or none."""
        now = time.monotonic()
        last, left_out = self._last.get(kind, (float("-inf"), 0))
        if now - last < self._seconds:
            self._last[kind] = (last, left_out + 1)
            return
        more = f" ({left_out} more of these since the last line)" if left_out else ""
        self._log.warning("%s%s", message, more)
        self._last[kind] = (now, 0)
