"""What the receiver tells those who watch it: one record per group commit, or per idle second."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ReceiverRecord:
    """Increments since the record before, then gauges.

    Bytes count header and payload of DATA, as credit does.
    """

    packets: int = 0
    samples: int = 0
    bytes: int = 0
    duplicates: int = 0  # samples that came again
    rejected: Mapping[str, int] = field(default_factory=dict)  # samples, by reason of refusal
    refused: Mapping[str, int] = field(default_factory=dict)  # connections and messages, by reason
    missing: int = 0  # packets that a producer can no longer send and this journal does not hold
    acked_samples: int = 0
    fsync_seconds: float | None = None  # of the group commit; None: nothing was written
    journal_failures: int = 0  # commits that found no room or a failing disk
    journal_damaged: int = 0  # segments found damaged, since the journal was opened

    producers: int = 0  # connected
    journal_bytes: int = 0  # on disk
    journal_first: int = 1  # oldest position held
    journal_last: int = 0  # newest position held; first - 1 when empty
    credit: int = 0  # bytes granted to all producers together
    full: bool = False  # no packet fits: the journal's budget, or the disk, is used up
    room: int = 0  # bytes that the journal can still take
    lag_bytes: int = 0  # journalled and not yet read by the learner
    captured: float | None = None  # when the latest sample was, seconds since the Unix epoch
    received: float | None = None  # when the latest packet came, seconds since the Unix epoch
    ready: bool = True  # False: the journal cannot be written
