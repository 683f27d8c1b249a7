"""The queue between the thread that receives a source's messages and the thread that sends them."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Generic, TypeVar

M = TypeVar("M")

POLL_SECONDS = 0.2  # between two looks at the time


class ArrivedMessages(Generic[M]):
    """The messages that one thread has received and the sender's thread has not taken yet.

    Args:
        idle_seconds: seconds without a message after which `take` returns None; None: never. They
            count from the first call of `begin` or `restart`.

    Attributes:
        changed: guards the messages; notified at each change.
        stopped: whether `stop` was called.
        paused: whether no messages are fetched now, so that the idle time does not count.
        error: why no further messages come.
    """

    def __init__(self, idle_seconds: float | None) -> None:
        self.changed = threading.Condition()
        self.stopped = threading.Event()
        self.paused = False
        self.error: Exception | None = None
        self._idle = idle_seconds
        self._since = math.inf  # when the idle time began
        self._messages: deque[M] = deque()

    def __len__(self) -> int:
        return len(self._messages)

    def begin(self) -> None:
        """Begin the idle time, unless it has begun."""
        if self._since == math.inf:
            self.restart()

    def restart(self) -> None:
        """Begin the idle time anew."""
        self._since = time.monotonic()

    def put(self, messages: Sequence[M]) -> None:
        """Append messages."""
        with self.changed:
            self._messages.extend(messages)
            if messages:
                self.restart()
            self.changed.notify_all()

    def take(self) -> M | None:
        """Wait for the next message and remove it; return None if stopped or idle for too long.

        Raises:
            Exception: no further messages come; see `fail`.
        """
        with self.changed:
            self._since = max(self._since, time.monotonic())
            while not self._messages and not self.stopped.is_set():
                if self.error is not None:
                    raise self.error
                idle = None if self.paused else self._idle
                if idle is not None and time.monotonic() - self._since >= idle:
                    return None
                self.changed.wait(POLL_SECONDS)
            if self.stopped.is_set():
                return None
            self.restart()
            self.changed.notify_all()
            return self._messages.popleft()

    def clear(self) -> None:
        """Remove all messages."""
        self._messages.clear()

    def fail(self, error: Exception) -> None:
        """Let `take` raise an error once all messages are taken."""
        with self.changed:
            self.error = error
            self.changed.notify_all()

    def stop(self) -> None:
        """Let `take` return None. Thread-safe."""
        self.stopped.set()
        with self.changed:
            self.changed.notify_all()
