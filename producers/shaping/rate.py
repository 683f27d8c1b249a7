"""A limit on samples per second."""

from __future__ import annotations

import time
from collections.abc import Callable

BURST_SECONDS = 0.02
ROUNDING = 1e-6  # samples; the clock may not resolve a shorter wait


class RateLimit:
    """A token bucket whose `wait` returns `rate` times a second on average.

    Args:
        rate: samples per second, above 0.
        clock: returns monotonic seconds.
        sleep: sleeps for a number of seconds or slightly longer. It returns true if interrupted.

    Raises:
        ValueError: the rate is not above 0.
    """

    def __init__(
        self,
        rate: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], bool | None] = time.sleep,
    ) -> None:
        if not rate > 0:
            raise ValueError(f"rate {rate}: must be above 0 samples per second, or null for none")
        self.rate = rate
        # The burst makes up for a late wake-up, but not for a long pause.
        self._burst = max(1.0, rate * BURST_SECONDS)
        self._tokens = 1.0
        self._clock, self._sleep = clock, sleep
        self._last = clock()

    def wait(self) -> bool:
        """Wait until the next sample is due. Return False if the sleep was interrupted."""
        self._fill()
        while self._tokens < 1 - ROUNDING:
            if self._sleep((1 - self._tokens) / self.rate):
                return False
            self._fill()
        self._tokens -= 1
        return True

    def _fill(self) -> None:
        now = self._clock()
        self._tokens = min(self._burst, self._tokens + (now - self._last) * self.rate)
        self._last = now
