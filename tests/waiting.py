"""Waiting for an event, with a deadline for the busiest machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(
    ask: Callable[[], T], what: Callable[[], str] = lambda: "no event", seconds: float = 150.0
) -> T:
    """Wait until `ask` returns something true, and return it. Fail with the text of `what`.

    A question that takes long, such as a scrape of all metrics, is asked less often. Otherwise it
    would take the processor from the processes that are waited for.
    """
    deadline = time.monotonic() + seconds
    asked = time.monotonic()
    while not (answer := ask()):
        now = time.monotonic()
        assert now < deadline, f"not in {seconds:.0f} s: {what()}"
        time.sleep(max(0.005, min(0.2, 5 * (now - asked))))
        asked = time.monotonic()
    return answer
