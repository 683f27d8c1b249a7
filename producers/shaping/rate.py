"""A limit on samples per second."""

from __future__ import annotations

import time
from collections.abc import Callable

BURST_SECONDS = 0.02
ROUNDING = 1e-6  # of a sample: a smaller rest may be less than the clock can tell


class RateLimit:
    """A token bucket: `wait` returns `rate` times a second on average.

    Args:
        rate: samples per second.
        clock: seconds that never run backwards.
        sleep: waits for so many seconds, or somewhat longer; true when it was interrupted.

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
        # What a late wake-up missed is made up for, a long pause is not.
        self._burst = max(1.0, rate * BURST_SECONDS)
        self._tokens = 1.0
        self._clock, self._sleep = clock, sleep
        self._last = clock()

    def wait(self) -> bool:
        """True once the next sample is due; False when the sleep was interrupted."""
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
