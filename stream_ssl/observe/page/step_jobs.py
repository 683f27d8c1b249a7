"""Work that other threads ask of the learner's thread, done between two of its steps.

Between two steps the memory is whole, and only the learner's own thread may read it: slots change
during a step, and on a GPU another thread's kernels would break into a graph being captured.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")

MOST_WAITING = 16
"""Jobs that wait at once; one more is refused."""

MOST_CREDIT = 0.05
"""Seconds of unused time that are saved up for a burst of jobs, at most."""

MOST_DEBT = 0.1
"""Longest pause after one long job, in seconds: else a job during which the machine stood still
would keep the page blind for minutes."""


class Busy(Exception):
    """The learner had no time for a job; ask again later."""


class StepJobs:
    """Runs jobs in a bounded share of the learner's time.

    Each job is paid for by the time that passes after it: one of 10 ms at a share of 0.01 lets the
    next one start a second later. So the share is kept whatever is asked, and however often.

    Args:
        share: of the time of the thread that calls `serve`, above 0 and at most 1.
        clock: monotonic seconds.

    Raises:
        ValueError: a share outside its range.
    """

    def __init__(self, share: float = 0.01, clock: Callable[[], float] = time.perf_counter) -> None:
        if not 0 < share <= 1:
            raise ValueError(f"share of the learner's time is {share}: above 0 and at most 1")
        self.share, self.spent = share, 0.0
        self._clock, self._began = clock, clock()
        self._credit, self._since = MOST_CREDIT, clock()
        self._closed = False
        self._jobs: queue.Queue[tuple[Callable[[], Any], Future[Any], bool]] = queue.Queue(
            MOST_WAITING
        )

    def ask(self, job: Callable[[], T], timeout: float = 10.0, metered: bool = True) -> T:
        """What `job` returns, or raises, on the learner's thread. For any other thread.

        Args:
            job: what to run.
            timeout: seconds to wait until it begins.
            metered: False for one whose asker keeps it within a share of its own: it is run at
                once, and costs the others nothing.

        Raises:
            Busy: too many wait, or none was run within `timeout` seconds.
        """
        future: Future[T] = Future()
        try:
            self._jobs.put_nowait((job, future, metered))
        except queue.Full:
            raise Busy(f"{MOST_WAITING} requests wait for the learner already") from None
        if self._closed:
            self.close()
        try:
            return future.result(timeout)
        except TimeoutError:
            if future.cancel():
                raise Busy(f"the learner came to no pause within {timeout:g} s") from None
            return future.result()  # it began, or ended, just now

    def close(self) -> None:
        """Nothing is run any more: whoever waits, or asks later, is told so at once."""
        self._closed = True
        with suppress(queue.Empty):
            while True:
                future = self._jobs.get_nowait()[1]
                if future.set_running_or_notify_cancel():
                    future.set_exception(Busy("the learner stops"))

    @property
    def used(self) -> float:
        """Share of the time since it was made that jobs took."""
        return self.spent / max(1e-9, self._clock() - self._began)

    def serve(self) -> None:
        """Run what waits, as far as there is time for it. For the learner's thread."""
        if self._jobs.empty():
            return
        now = self._clock()
        self._credit = min(MOST_CREDIT, self._credit + self.share * (now - self._since))
        later = []
        while not self._jobs.empty():
            job, future, metered = self._jobs.get_nowait()
            if metered and self._credit <= 0:
                later.append((job, future, metered))
                continue
            if future.set_running_or_notify_cancel():
                _run(job, future)
            before, now = now, self._clock()
            self.spent += now - before
            if metered:
                self._credit = max(-MOST_DEBT, self._credit - (now - before))
        self._since = now
        for waiting in later:
            with suppress(queue.Full):  # its place was taken: it times out
                self._jobs.put_nowait(waiting)


def _run(job: Callable[[], Any], future: Future[Any]) -> None:
    try:
        future.set_result(job())
    except Exception as error:
        future.set_exception(error)
