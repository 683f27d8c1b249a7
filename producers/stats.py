"""A producer's counters, and the records that it passes to its callbacks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

State = Literal["connecting", "connected", "disconnected", "refused", "closed"]
Outcome = Literal["acknowledged", "spooled", "rejected", "dropped"]


@dataclass(slots=True)
class Count:
    """A number of samples, and their size in bytes.

    Bytes are those of the packets. For accepted and dropped samples, bytes are those of the images.
    """

    samples: int = 0
    bytes: int = 0

    def add(self, samples: int, size: int) -> None:
        """Add to both numbers."""
        self.samples += samples
        self.bytes += size


@dataclass(slots=True)
class Stats:
    """A producer's counters since its creation, and the state of its connection.

    Attributes:
        accepted: samples that send() accepted.
        sent: samples sent to the receiver for the first time.
        resent: samples sent again, after a reconnect or a temporary refusal.
        acked: samples that the receiver acknowledged; they are on its disk.
        dropped: samples that will never be sent, for any reason.
        dropped_by_reason: dropped samples by reason: "buffer_full" and "spool_full" (the new
            sample), "oldest" (dropped for a newer sample), "spool_damaged" (unreadable on disk),
            "closed" (still unacknowledged when the producer closed or the interpreter ended).
        rejected: samples that the receiver rejected permanently.
        reconnects: number of connections after the first.
        buffered: samples in memory that are waiting or unacknowledged now.
        spooled: samples in the spool that are waiting or unacknowledged now. Some of them are in
            memory too.
        credit: bytes that the receiver granted last.
        state: "connecting", "connected", "disconnected", "refused" or "closed".
        last_error: why the connection last failed or was refused. "" if it never failed.
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

    @property
    def waiting(self) -> int:
        """The samples that wait or are unacknowledged: at least this number."""
        return max(self.buffered.samples, self.spooled.samples)  # many are in both places

    def drop(self, reason: str, samples: int, size: int) -> None:
        """Count dropped samples, in total and by reason."""
        self.dropped.add(samples, size)
        self.dropped_by_reason.setdefault(reason, Count()).add(samples, size)


@dataclass(frozen=True, slots=True)
class StateChange:
    """A change of the connection's state, or of its reason, as passed to `on_state`.

    Attributes:
        state: the new state; see Stats.
        reason: the reason as text for people. "" when connected.
        previous: the state before.
    """

    state: State
    reason: str
    previous: State


@dataclass(frozen=True, slots=True)
class Rejection:
    """Samples that the receiver rejected permanently, as passed to `on_rejected`.

    Attributes:
        reason: one of stream_ssl.wire.REASONS.
        detail: the receiver's explanation.
        ids: the ids of the samples.
    """

    reason: str
    detail: str
    ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Delivery:
    """The outcome of one sample, as passed to `on_delivery` and to the future of submit().

    Attributes:
        id: the id of the sample.
        outcome: "acknowledged" (on the receiver's disk), "spooled" (on this machine's disk; this
            run or a later run sends it), "rejected" (permanently, by the receiver) or "dropped".
        detail: why the sample was rejected or dropped.
    """

    id: str
    outcome: Outcome
    detail: str = ""
