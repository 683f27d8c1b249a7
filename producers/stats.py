"""What a producer counts."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Count:
    """Samples, and the bytes of their packets (dropped samples: of their payloads)."""

    samples: int = 0
    bytes: int = 0

    def add(self, samples: int, size: int) -> None:
        """Adds to both."""
        self.samples += samples
        self.bytes += size


@dataclass(slots=True)
class Stats:
    """A producer's counters since it was made.

    Attributes:
        accepted: taken by send().
        sent: left for the receiver for the first time.
        resent: left again, after a reconnect or a refusal that was not permanent.
        acked: on the receiver's disk.
        dropped: not taken, as the buffer was full (on_full="drop").
        rejected: refused by the receiver for good.
        reconnects: connections after the first.
        buffered: waiting or unacknowledged now.
        credit: bytes that the receiver last granted.
    """

    accepted: Count = field(default_factory=Count)
    sent: Count = field(default_factory=Count)
    resent: Count = field(default_factory=Count)
    acked: Count = field(default_factory=Count)
    dropped: Count = field(default_factory=Count)
    rejected: Count = field(default_factory=Count)
    reconnects: int = 0
    buffered: Count = field(default_factory=Count)
    credit: int = 0


@dataclass(frozen=True, slots=True)
class Rejection:
    """Samples that the receiver will not take, as told to `on_rejected`.

    Attributes:
        reason: one of stream_ssl.wire.REASONS.
        detail: what the receiver said.
        ids: of the samples.
    """

    reason: str
    detail: str
    ids: tuple[str, ...]
