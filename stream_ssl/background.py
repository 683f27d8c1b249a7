"""A thread that calls a function at regular intervals."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Self

from stream_ssl.rate_limited_logger import RateLimitedLogger

log = logging.getLogger(__name__)


class Background:
    """A daemon thread that calls a function every few seconds; a context manager.

    If a call raises an exception, the thread logs the exception and continues.

    Args:
        name: the name of the thread.
        work: the function to call.
        every: seconds to wait before each call.
        at_once: do not wait before the first call.
    """

    def __init__(
        self, name: str, work: Callable[[], object], every: float, at_once: bool = False
    ) -> None:
        self._name, self._work, self._every = name, work, every
        self._log = RateLimitedLogger(log, seconds=60.0, lines=3)
        self._first = 0.0 if at_once else every
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> Self:
        """Start the thread."""
        self._thread.start()
        return self

    def close(self) -> None:
        """Stop the thread, and wait for a call in progress to return."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.close()

    def _run(self) -> None:
        wait = self._first
        while not self._closing.wait(wait):
            wait = self._every
            try:
                self._work()
            except Exception:
                text = f"the thread {self._name!r} failed; it tries again in {self._every:g} s"
                self._log.log(logging.ERROR, "failed", text, exc_info=True)
