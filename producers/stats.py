"""What a producer counts, and what it tells its callbacks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

State = Literal["connecting", "connected", "disconnected", "refused", "closed"]
Outcome = Literal["acknowledged", "spooled", "rejected", "dropped"]


@dataclass(slots=True)
class Count:
    """Samples, and the bytes of their packets (samples that were dropped: of their payloads)."""

    samples: int = 0
    bytes: int = 0

    def add(self, samples: int, size: int) -> None:
        """Adds to both."""
        self.samples += samples
        self.bytes += size


@dataclass(slots=True)
class Stats:
    """A producer's counters since it was made, and how its connection is.

    Attributes:
        accepted: taken by send().
        sent: left for the receiver for the first time.
        resent: left again, after a reconnect or a refusal that was not permanent.
        acked: on the receiver's disk.
        dropped: will never be sent, whatever the reason.
        dropped_by_reason: the same by reason: "buffer_full" and "spool_full" (the new sample),
            "oldest" (made room for a newer one), "spool_damaged" (the disk lost it), "closed"
            (left unacknowledged by close(), or by the interpreter's end).
        rejected: refused by the receiver for good.
        reconnects: connections after the first.
        buffered: waiting or unacknowledged now, in memory.
        spooled: waiting or unacknowledged now, in the spool folder; some of them in memory too.
        credit: bytes that the receiver last granted.
        state: "connecting", "connected", "disconnected", "refused" or "closed".
        last_error: why the connection last failed or was refused; "" if it never was.
    """

    accepted: Count = field(default_factory=Count)
    sent: Count = field(default_factory=Count)
    resent: Count = field(default_factory=Count)
    acked: Count = field(default_factory=Count)
    dropped: Count = field(default_factory=Count)
    dropped_by_reason: dict[str, Count] = field(default_factory=dict)
    rejected: Count = field(default_factory=Count)
    reconnects: int = 0
    buffered: Count = field(default_factory=Count)
    spooled: Count = field(default_factory=Count)
    credit: int = 0
    state: State = "connecting"
    last_error: str = ""

    def drop(self, reason: str, samples: int, size: int) -> None:
        """Counts dropped samples, in total and by reason."""
        self.dropped.add(samples, size)
        self.dropped_by_reason.setdefault(reason, Count()).add(samples, size)


@dataclass(frozen=True, slots=True)
class StateChange:
    """How the connection is now, as told to `on_state`.

    Attributes:
        state: see Stats.
        reason: why, for people; "" when connected.
        previous: the state before.
    """

    state: State
    reason: str
    previous: State


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


@dataclass(frozen=True, slots=True)
class Delivery:
    """What became of one accepted sample, as told to `on_delivery` and by the future of submit().

    Attributes:
        id: of the sample.
        outcome: "acknowledged" (on the receiver's disk), "spooled" (on this machine's disk, to be
            sent by this run or a later one), "rejected" (by the receiver, for good), "dropped".
        detail: why, where it was rejected or dropped.
    """

    id: str
    outcome: Outcome
    detail: str = ""
