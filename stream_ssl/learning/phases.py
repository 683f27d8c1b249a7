"""Seconds by phase of a step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from stream_ssl.learning.records import PHASES


class Phases:
    """Adds up monotonic time under the phase that is running.

    On a GPU kernels run behind the host; each phase of the learner ends by reading a number back,
    so that its time is the device's too.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - started
