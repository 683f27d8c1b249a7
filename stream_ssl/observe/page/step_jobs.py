"""Jobs that other threads give to the learner's thread, which runs them between two steps.

Only the learner's thread may read the memory, between two steps. Slots change during a step, and on
a GPU the kernels of another thread would disturb the capture of a graph.
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
"""The most jobs that wait at once. One more job is refused."""

ANSWER_PATIENCE = 20.0
"""The most seconds that a question waits until its job begins, so steps may take this long.

The time-outs of all that ask are longer (`api.py`, `lib.js`, `daemon/run_states.py`)."""

SHARE = 0.01
"""The share of the time of the thread that calls `serve`."""

MOST_CREDIT = 0.05
"""The most seconds of unused time that are saved for a burst of jobs."""

MOST_DEBT = 0.1
"""The most seconds of debt after a long job.

Without the limit, one very long job would stop the page for minutes."""


class Busy(Exception):
    """The learner had no time for a job; ask again later."""


class StepJobs:
    """A queue of jobs that take a bounded share of the learner's time.

    The time after a job pays for the job: the next job starts one second after a job of 10 ms. So
    SHARE holds for any jobs and any number of viewers.

    Args:
        cost: returns the processor time of the thread that calls `serve`, in seconds. A job during
            which other programs held the processor costs no more for it.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        cost: Callable[[], float] = time.thread_time,
    ) -> None:
        self.share, self.spent = SHARE, 0.0
        self._clock, self._cost, self._began = clock, cost, clock()
        self._credit, self._since = MOST_CREDIT, clock()
        self._closed = False
        self._jobs: queue.Queue[tuple[Callable[[], Any], Future[Any], bool]] = queue.Queue(
            MOST_WAITING
        )

    def ask(
        self, job: Callable[[], T], timeout: float = ANSWER_PATIENCE, metered: bool = True
    ) -> T:
        """Run `job` on the learner's thread, and return its result or raise its exception.

        Any other thread may call this method.

        Args:
            timeout: seconds to wait until the job begins.
            metered: False for a caller that limits its own share. Such a job runs at the next
                pause, and does not count against the share of the other jobs.

        Raises:
            Busy: too many jobs wait, the job did not begin within `timeout` seconds, or `close` was
                called.
        """
        return self.result(self.submit(job, metered), timeout)

    def submit(self, job: Callable[[], T], metered: bool = True) -> Future[T]:
        """Queue `job` for the next pause of the learner, and return a future to pass to `result`.

        Raises:
            Busy: too many jobs wait.
        """
        future: Future[T] = Future()
        try:
            self._jobs.put_nowait((job, future, metered))
        except queue.Full:
            raise Busy(
                f"{MOST_WAITING} requests already wait for the learner; try again later"
            ) from None
        if self._closed:
            self.close()
        return future

    def result(self, future: Future[T], timeout: float = ANSWER_PATIENCE) -> T:
        """Return the result of a job, or raise its exception; see `ask`."""
        try:
            return future.result(timeout)
        except TimeoutError:
            if future.cancel():
                raise Busy(f"the learner did not answer within {timeout:g} s") from None
            return future.result()  # the job has just begun or ended

    def close(self) -> None:
        """Stop running jobs. Waiting and later calls of `ask` raise Busy at once."""
        self._closed = True
        with suppress(queue.Empty):
            while True:
                future = self._jobs.get_nowait()[1]
                if future.set_running_or_notify_cancel():
                    future.set_exception(Busy("the learner is stopping"))

    @property
    def used(self) -> float:
        """Processor time of all jobs as a share of the time since the queue was created."""
        return self.spent / max(1e-9, self._clock() - self._began)

    def serve(self) -> None:
        """Run waiting jobs as far as the share allows. Only the learner's thread calls this."""
        if self._jobs.empty():
            return
        spent = self._cost()
        earned = self.share * (self._clock() - self._since)
        self._credit = min(MOST_CREDIT, self._credit + earned)
        later = []
        while not self._jobs.empty():
            job, future, metered = self._jobs.get_nowait()
            if metered and self._credit <= 0:
                later.append((job, future, metered))
                continue
            if future.set_running_or_notify_cancel():
                _run(job, future)
            before, spent = spent, self._cost()
            self.spent += spent - before
            if metered:
                self._credit = max(-MOST_DEBT, self._credit - (spent - before))
        self._since = self._clock()
        for waiting in later:
            with suppress(queue.Full):  # the queue is full again, so the job times out
                self._jobs.put_nowait(waiting)


def _run(job: Callable[[], Any], future: Future[Any]) -> None:
    try:
        future.set_result(job())
    except Exception as error:
        future.set_exception(error)
