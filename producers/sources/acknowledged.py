"""Support for sources whose broker keeps each message until the source acknowledges it."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Generic, Protocol, TypeVar, runtime_checkable

from stream_ssl.producers.sources.base import Skipped, Source, SourceError
from stream_ssl.producers.sources.fields import codec_of, fitting_meta, label_of, short_id
from stream_ssl.producers.stats import Delivery
from stream_ssl.wire.sample import MAX_TIME, Position, Sample, is_capture_time

M = TypeVar("M")

POLL_SECONDS = 0.2  # between two looks at the time
OWN_HEADERS = ("id", "time", "label")


@runtime_checkable
class Acknowledged(Source, Protocol):
    """A source that passes acknowledgements on to a broker."""

    def acknowledged(self, position: Position) -> None:
        """Record that all samples up to `position` are on the receiver's disk or rejected for good.

        Any thread may call this method, in the order of the samples. It must not block.
        """
        ...

    def lag(self) -> int | None:
        """Return how many messages the broker holds that were not sent yet; None: unknown."""
        ...

    def close(self) -> None:
        """Send the remaining acknowledgements to the broker, and disconnect."""
        ...


class ArrivedMessages(Generic[M]):
    """The messages that a broker's thread has received and the sender's thread has not taken yet.

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
        self.error: SourceError | None = None
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
            SourceError: no further messages come.
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

    def fail(self, error: SourceError) -> None:
        """Let `take` raise an error once all messages are taken."""
        with self.changed:
            self.error = error
            self.changed.notify_all()

    def stop(self) -> None:
        """Let `take` return None. Thread-safe."""
        self.stopped.set()
        with self.changed:
            self.changed.notify_all()


class Deliveries:
    """Reports to a source how far its samples are settled, while deliveries complete in any order.

    A sample that is dropped because the producer closes holds back all later samples. The broker
    keeps their messages, and the next run sends them.
    """

    def __init__(self, source: Acknowledged) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._sent: deque[Expected] = deque()

    def expect(self, position: Position) -> Expected:
        """Return the callback for the next sample, whose position is `position`."""
        expected = Expected(self, position)
        with self._lock:
            self._sent.append(expected)
        return expected

    def settle(self, expected: Expected) -> None:
        """Record that a sample is settled, and report how far all samples are."""
        with self._lock:  # held during the call, so that the source gets the results in order
            expected.settled = True
            last = None
            while self._sent and self._sent[0].settled:
                last = self._sent.popleft()
            if last is not None:
                self._source.acknowledged(last.position)


class Expected:
    """A callback for `on_delivery` of one sample."""

    def __init__(self, deliveries: Deliveries, position: Position) -> None:
        self.position, self.settled = position, False
        self._deliveries = deliveries

    def __call__(self, delivery: Delivery) -> None:
        if delivery.outcome != "dropped":
            self.passed_over()

    def passed_over(self) -> None:
        """Settle a sample that cannot be sent and was already counted."""
        self._deliveries.settle(self)


class UnreadableError(ValueError):
    """A message that does not contain a valid sample. `reason` is the name of its counter."""

    def __init__(self, reason: str, why: str) -> None:
        super().__init__(why)
        self.reason = reason


def sample_of(
    data: bytes,
    headers: Mapping[str, str],
    place: str,
    time: float,
    skipped: Skipped,
    **meta: object,
) -> Sample:
    """Return the sample in a message, which is an image file described by headers.

    A header `time` or `label` that cannot be read costs only itself, and `skipped` counts it.

    Args:
        data: a JPEG, PNG or WebP file.
        headers: `id`, `time` (seconds since the Unix epoch) and `label` describe the sample, in
            upper or lower case. Other headers become meta.
        place: the message's place in the broker, used as the id if no header gives an id.
        time: when the broker received the message, in seconds since the Unix epoch.

    Raises:
        UnreadableError: the data is not an image, or the id is invalid.
    """
    codec = codec_of(data)
    if codec is None:
        first = data[:8].hex(" ") or "nothing"
        raise UnreadableError("no image", f"neither JPEG, PNG nor WebP: it begins with {first}")
    own = {name.lower(): value for name, value in headers.items() if name.lower() in OWN_HEADERS}
    rest = {name: value for name, value in headers.items() if name.lower() not in OWN_HEADERS}
    try:
        return Sample(
            short_id(own.get("id") or place),
            data,
            codec,
            time=_time_of(own.get("time"), time, skipped, place),
            source=skipped.source,
            label=label_of(own.get("label"), skipped, f"message {place}"),
            meta=fitting_meta(meta, rest),
        )
    except ValueError as error:
        raise UnreadableError("bad header", str(error)) from None


def _time_of(header: str | None, received: float, skipped: Skipped, place: str) -> float:
    """Return the time in a header, or when the broker received the message if there is none."""
    if header is None or not header.strip():
        return received
    try:
        time = float(header)
    except ValueError:
        time = math.nan
    if math.isfinite(time) and is_capture_time(time):
        return time
    why = f"{header!r:.80} is no number of seconds since the Unix epoch, at most {MAX_TIME:g}"
    skipped.note("bad time", f"the time of message {place}", why)
    return received
