"""Base class of sources whose items come live: a bounded queue of the newest, and reconnects."""

from __future__ import annotations

import logging
import random
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Generic, TypeVar

from stream_ssl.producers.sources.arrived import ArrivedMessages
from stream_ssl.producers.sources.base import Facts, Skipped, SourceError, checked, mark
from stream_ssl.producers.sources.ranges import DAY, check_above_0, check_ranges
from stream_ssl.rate_limited_logger import RateLimitedLogger
from stream_ssl.wire.sample import Position, Sample

log = logging.getLogger(__name__)

END_SECONDS = 0.5  # for the reading thread to end after `stop`
FIRST_PAUSE = 0.5  # seconds before the second attempt; each later pause is twice as long
LEAST_WAIT = 1.0  # seconds that each attempt may take, even if the source gives up earlier
LOG_SECONDS, LOG_LINES = 60.0, 10  # a stream may end after each item, as snapshots of cameras do
WAITING_BYTES = 256 * 2**20  # most bytes of the items that wait for the sender

Item = TypeVar("Item")


class Live(ABC, Generic[Item]):
    """A source of a live stream, which a separate thread reads.

    If the stream is lost or cannot be opened, the thread retries after pauses that double from
    0.5 s up to `retry_seconds`. Changes are logged with their reasons. The newest items matter
    most: if the sender cannot keep up, the source drops the oldest waiting items and counts them in
    `skipped` as "late". A live stream cannot resume at a position. A restart continues with the
    current items. A source does not fail within the first second of an attempt, even after
    `give_up_seconds`.

    Args:
        name: the source's name.
        timeout: seconds without any sign of life after which the source reconnects, above 0 and at
            most a day.
        retry_seconds: longest pause between two attempts, in seconds, above 0 and at most a day.
        give_up_seconds: seconds without an image after which the source fails; null: never.
        waiting: maximum number of images that wait for the sender.

    Raises:
        ValueError: an argument is invalid.
    """

    def __init__(
        self,
        name: str,
        timeout: float = 10.0,
        retry_seconds: float = 30.0,
        give_up_seconds: float | None = None,
        waiting: int = 16,
    ) -> None:
        check_above_0(
            timeout=timeout,
            retry_seconds=retry_seconds,
            give_up_seconds=give_up_seconds,
            waiting=waiting,
        )
        check_ranges(("timeout", timeout, 0, DAY), ("retry_seconds", retry_seconds, 0, DAY))
        self.name = name
        self.skipped = Skipped(name)
        self._limited_log = RateLimitedLogger(log, LOG_SECONDS, LOG_LINES)
        self._timeout = timeout
        self._retry_seconds, self._give_up_seconds = retry_seconds, give_up_seconds
        self._waiting = waiting
        self._facts: Facts = {"source": name, "live": True}
        self._ready: ArrivedMessages[tuple[Item, int]] = ArrivedMessages(None)
        self._ready_bytes = 0
        self._came = time.monotonic()  # when the last item came
        self._stopped = self._ready.stopped

    def samples(self, position: Position = None) -> Iterator[tuple[Sample, Position]]:
        """Yield each sample with its position, which only identifies this source; see `Source`."""
        if position is not None:
            checked(position, self._facts, self.name)
        return self._sent()

    def stop(self) -> None:
        """End `samples` immediately. Thread-safe."""
        self._ready.stop()

    @abstractmethod
    def received(self) -> Iterator[tuple[Item, int]]:
        """Connect, and yield each item with the bytes that it holds; runs in the reading thread.

        Return or raise an error of `failures` when the connection ends, and when `is_overdue`.
        """

    @abstractmethod
    def sample(self, item: Item) -> Sample | None:
        """Return the sample of an item; None if it has none. Runs in the sender's thread."""

    @abstractmethod
    def failures(self) -> tuple[type[Exception], ...]:
        """Return the error types of a lost connection. Any other error ends the source."""

    def reason(self, error: Exception) -> str:
        """Return the reason of a failure, for the log; must contain no password."""
        return str(error) or type(error).__name__

    def explained(self, why: str) -> str:
        """Return why no item comes, with the address and the remedy; must contain no password."""
        return why

    def patience(self, silent: float = 0.0) -> float:
        """Return the seconds that an attempt may wait: `timeout`, or less near the end of patience.

        Args:
            silent: seconds since the last item.
        """
        if self._give_up_seconds is None:
            return self._timeout
        return min(self._timeout, max(LEAST_WAIT, self._give_up_seconds - silent))

    def is_overdue(self) -> bool:
        """Return whether no item has come for `give_up_seconds`."""
        silent = time.monotonic() - self._came
        return self._give_up_seconds is not None and silent >= self._give_up_seconds

    def _sent(self) -> Iterator[tuple[Sample, Position]]:
        # A separate thread reads the stream while the sender is busy. FFmpeg also cannot be
        # interrupted while it waits.
        name = f"live {self.name}"
        reader = threading.Thread(target=self._read, name=name, daemon=True)
        self._came = time.monotonic()
        reader.start()
        try:
            while (item := self._take()) is not None:
                sample = self.sample(item)
                if sample is not None:
                    yield sample, mark(None, self._facts)
            self.skipped.tell_end(self._stopped)
        finally:
            self.stop()
            reader.join(END_SECONDS)  # frees a device; a silent host ends after `timeout`

    def _take(self) -> Item | None:
        """Wait for the oldest item and remove it; return None once stopped."""
        with self._ready.changed:
            taken = self._ready.take()
            if taken is None:
                return None
            item, size = taken
            self._ready_bytes -= size
            return item

    def _read(self) -> None:
        try:
            self._keep_connected()
        except Exception as error:  # passed on to the caller's thread
            self._ready.fail(error)

    def _keep_connected(self) -> None:
        """Receive items and reconnect when the stream ends, until stopped."""
        pause = FIRST_PAUSE
        while not self._stopped.is_set():
            why = "the stream ended"
            try:
                for item, size in self.received():
                    pause, self._came = FIRST_PAUSE, time.monotonic()
                    self._hand_over(item, size)
                    if self._stopped.is_set():
                        return
            except self.failures() as error:
                why = self.reason(error)
            if self._stopped.is_set():
                return
            why, silent = self.explained(why), time.monotonic() - self._came
            if self.is_overdue():
                raise SourceError(f"source {self.name!r}: no frame for {silent:.0f} s: {why}")
            wait = min(pause, self._retry_seconds) * random.uniform(0.5, 1.0)
            if self._give_up_seconds is not None:
                wait = min(wait, max(0.0, self._give_up_seconds - silent))
            self._limited_log.warning(
                "lost", f"source {self.name}: no frames: {why}; trying again in {wait:.1f} s"
            )
            self._stopped.wait(wait)
            pause *= 2

    def _hand_over(self, item: Item, size: int) -> None:
        with self._ready.changed:
            while len(self._ready) and (
                len(self._ready) >= self._waiting or self._ready_bytes + size > WAITING_BYTES
            ):
                if self._take() is None:
                    return  # stopped
                why = "the sender is too slow; raise waiting if frames come in bursts, as with HLS"
                self.skipped.note("late", "the oldest frame that waits", why)
            self._ready_bytes += size
            self._ready.put([(item, size)])


def connection_id() -> str:
    """Return text that identifies a connection: the time in milliseconds, and random digits.

    A clock that restarts at each boot repeats its times. The random digits distinguish such
    connections.
    """
    return f"{round(time.time() * 1000)}{secrets.token_hex(2)}"
