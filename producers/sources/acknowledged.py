"""Sources behind which a broker keeps each message until it is told that it is safe."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from stream_ssl.producers.sources.base import Source
from stream_ssl.producers.sources.fields import codec_of, fitting_meta, short_id
from stream_ssl.producers.stats import Delivery
from stream_ssl.wire.sample import Position, Sample

OWN_HEADERS = ("id", "time", "label")


@runtime_checkable
class Acknowledged(Source, Protocol):
    """A source that passes acknowledgements on to a broker."""

    def acknowledged(self, position: Position) -> None:
        """All samples up to this position are on the receiver's disk, or refused for good.

        Called from any thread, in the order of the samples; must not wait.
        """
        ...

    def lag(self) -> int | None:
        """Messages that the broker has for this source and that were not sent; None: not known."""
        ...

    def close(self) -> None:
        """Tell the broker what it was not told yet, and part from it."""
        ...


@dataclass(slots=True, eq=False)
class _Sent:
    position: Position
    settled: bool = False


class Deliveries:
    """Tells a source how far its samples are safe, although their fates become known in any order.

    What is dropped, as a producer closes, holds up all that comes after it: the broker keeps these
    messages, and the next run sends them.
    """

    def __init__(self, source: Acknowledged) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._sent: deque[_Sent] = deque()

    def expect(self, position: Position) -> Expected:
        """The next sample, with the position after it; to be called with what became of it."""
        sent = _Sent(position)
        with self._lock:
            self._sent.append(sent)
        return Expected(self, sent)

    def _settle(self, sent: _Sent) -> None:
        with self._lock:  # until the source has been told: it is to hear in order
            sent.settled = True
            last = None
            while self._sent and self._sent[0].settled:
                last = self._sent.popleft()
            if last is not None:
                self._source.acknowledged(last.position)


class Expected:
    """A callback for `on_delivery`."""

    def __init__(self, deliveries: Deliveries, sent: _Sent) -> None:
        self._deliveries, self._sent = deliveries, sent

    def __call__(self, delivery: Delivery) -> None:
        if delivery.outcome != "dropped":
            self._deliveries._settle(self._sent)

    def passed_over(self) -> None:
        """The sample cannot be sent, and was counted: nothing is to wait for it."""
        self._deliveries._settle(self._sent)


class UnreadableError(ValueError):
    """A message that makes no sample; `reason` is what it is counted under."""

    def __init__(self, reason: str, why: str) -> None:
        super().__init__(why)
        self.reason = reason


def sample_of(
    data: bytes, headers: Mapping[str, str], place: str, time: float, source: str, **meta: object
) -> Sample:
    """The sample of a message: an image file, described by its headers.

    Args:
        data: a JPEG, PNG or WebP file.
        headers: `id`, `time` (seconds since the Unix epoch) and `label` describe the sample, in
            upper or lower case; others become meta.
        place: the message's own in the broker: the id where no header names one.
        time: when the broker got it, seconds since the Unix epoch.
        source: names where it was captured.
        meta: further facts.

    Raises:
        UnreadableError: no image, or a header that breaks its rule.
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
            time=float(own["time"]) if "time" in own else time,
            source=source,
            label=int(own["label"]) if "label" in own else None,
            meta=fitting_meta(meta, rest),
        )
    except ValueError as error:
        raise UnreadableError("bad header", str(error)) from None
