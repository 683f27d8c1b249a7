"""Support for sources whose broker keeps each message until the source acknowledges it."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Mapping
from time import time as now
from typing import Protocol, runtime_checkable

from stream_ssl.producers.sources.base import Skipped, Source
from stream_ssl.producers.sources.fields import fitting_meta, label_of, short_id
from stream_ssl.producers.sources.image_files import codec_of, no_image
from stream_ssl.producers.stats import Delivery
from stream_ssl.wire.sample import MAX_TIME, Position, Sample, is_capture_time

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


def sample_of(
    data: bytes,
    headers: Mapping[str, str],
    place: str,
    time: float,
    skipped: Skipped,
    **meta: object,
) -> Sample | None:
    """Return the sample in a message, which is an image file described by headers.

    The result is None if the data is not an image. `skipped` counts such a message. It also counts
    a header `time` or `label` that cannot be read; the sample is then made without this header.

    Args:
        data: a JPEG, PNG or WebP file.
        headers: `id`, `time` (seconds since the Unix epoch) and `label` describe the sample, in
            upper or lower case. Other headers become meta.
        place: the message's place in the broker, used as the id if no header gives an id.
        time: when the broker received the message, in seconds since the Unix epoch.
    """
    codec = codec_of(data)
    if codec is None:
        skipped.note("no image", f"message {place}", no_image(data))
        return None
    own = {name.lower(): value for name, value in headers.items() if name.lower() in OWN_HEADERS}
    rest = {name: value for name, value in headers.items() if name.lower() not in OWN_HEADERS}
    return Sample(
        short_id(own.get("id") or place),
        data,
        codec,
        time=_time_of(own.get("time"), time, skipped, place),
        source=skipped.source,
        label=label_of(own.get("label"), skipped, f"message {place}"),
        meta=fitting_meta(meta, rest),
    )


def _time_of(header: str | None, received: float, skipped: Skipped, place: str) -> float:
    """Return the time in a header, or when the broker received the message if there is none.

    A producer may have set the broker's time, too, and have counted other units than milliseconds.
    """
    for stated in (header, received):
        if stated is None or not str(stated).strip():
            continue
        with contextlib.suppress(ValueError):
            if is_capture_time(time := float(stated)):
                return time
        why = f"{stated!r:.80} is no number of seconds since the Unix epoch, at most {MAX_TIME:g}"
        skipped.note("bad time", f"the time of message {place}", why)
    return now()
