"""The records that a receiver reports, and the counters behind them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any, Final

CONNECTED: Final = 0.0
STOPPED: Final = 1.0
SOURCE_ENDED: Final = 2.0
"""The values of `ReceiverRecord.producer_finished`."""


@dataclass(slots=True)
class Counters:
    """The increments since the previous record.

    Bytes are those of header and payload of DATA, as for credit. Times are seconds since the Unix
    epoch.
    """

    packets: int = 0
    samples: int = 0
    bytes: int = 0
    duplicates: int = 0  # samples that were received more than once
    rejected: Counter[str] = field(default_factory=Counter)  # samples, by reason
    refused: Counter[str] = field(default_factory=Counter)  # connections and messages, by reason
    refused_last: dict[str, str] = field(default_factory=dict)  # latest sender, by reason
    missing: int = 0  # packets that neither the producer nor this journal has any more
    acked_samples: int = 0
    fsync_seconds: float | None = None  # of the group commit; None: nothing was written
    # By producer: the name of its key on the allow-list; in plain text, its own name.
    producer_samples: Counter[str] = field(default_factory=Counter)
    producer_bytes: Counter[str] = field(default_factory=Counter)
    producer_received: dict[str, float] = field(default_factory=dict)  # its latest packet
    producer_captured: dict[str, float] = field(default_factory=dict)  # its latest sample
    producer_rejected: Counter[str] = field(default_factory=Counter)  # samples
    producer_finished: dict[str, float] = field(default_factory=dict)  # how it ended
    producer_clock: dict[str, float] = field(default_factory=dict)  # its clock minus this one
    producer_sporadic: dict[str, float] = field(default_factory=dict)  # 1: its silence is no fault
    journal_failures: int = 0  # commits that failed because of a full or failing disk
    allow_list_errors: int = 0  # changed lists that could not be used

    def take(self) -> dict[str, Any]:
        """Return the increments by name, and count from zero again."""
        taken, zero = {}, Counters()
        for name in (item.name for item in fields(self)):
            taken[name] = getattr(self, name)
            setattr(self, name, getattr(zero, name))
        return taken


@dataclass(slots=True)
class ReceiverRecord(Counters):
    """A report of the receiver, one for each group commit or idle second.

    The fields of `Counters` are increments since the previous record, the others are gauges.
    """

    journal_damaged: int = 0  # segments found damaged, since the journal was opened
    producers: int = 0  # connected
    journal_bytes: int = 0  # on disk
    journal_first: int = 1  # oldest position on disk
    journal_last: int = 0  # newest position on disk; first - 1 when empty
    credit: int = 0  # bytes granted to all producers together
    full: bool = False  # no packet fits, because the journal's budget or the disk is used up
    disk_full: bool = False  # no packet fits, because of the disk and not of the budget
    room: int = 0  # bytes that the journal can still accept
    allow_list_broken: bool = False  # the newest list cannot be read; the previous one is in use
    lag_bytes: int = 0  # in the journal and not yet read by the learner
    captured: float | None = None  # capture time of the latest sample
    received: float | None = None  # receipt time of the latest packet
    ready: bool = True  # False: the journal cannot be written
    journal_away: bool = False  # the journal's folder was moved, deleted or replaced
