"""The choice of checkpoints to keep: the newest few, one to fall back on, and a history."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HISTORY = ((3600, 24), (86_400, 7))
"""Length of a period in seconds, and number of periods whose last checkpoint is kept.

The periods are 24 hours and 7 days.
"""


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A checkpoint on the disk.

    Attributes:
        path: folder of the checkpoint.
        created: seconds since the Unix epoch.
        updated: the step that made the weights.
        bytes: size of the checkpoint.
    """

    path: Path
    created: float
    updated: int
    bytes: int


def newest_kept(entries: Sequence[StoredCheckpoint], keep: int) -> set[Path]:
    """Return the newest `keep` checkpoints and the newest whose weights are known to be good.

    The weights of the newest checkpoint are known to be good only after another update was made on
    them. So the newest checkpoint of earlier weights is kept too.

    Args:
        entries: all checkpoints, the oldest first.
        keep: number of newest checkpoints to keep.
    """
    kept = {entry.path for entry in entries[-keep:]}
    earlier = [entry for entry in entries if entry.updated < entries[-1].updated]
    return kept | {entry.path for entry in earlier[-1:]}


def history(entries: Sequence[StoredCheckpoint], kept: set[Path]) -> list[StoredCheckpoint]:
    """Return the other checkpoints that belong to the history, the newest first.

    The periods follow the creation times of the checkpoints, as in backup tools. Hours and days
    without a checkpoint do not count.

    Args:
        entries: all checkpoints, the oldest first.
        kept: checkpoints that are kept anyway.
    """
    chosen: set[Path] = set()
    for seconds, periods in HISTORY:
        last: dict[int, Path] = {}
        for entry in reversed(entries):
            last.setdefault(int(entry.created // seconds), entry.path)
        chosen |= set(list(last.values())[:periods])
    return [entry for entry in reversed(entries) if entry.path in chosen - kept]


def within(budget: float, entries: Sequence[StoredCheckpoint]) -> list[StoredCheckpoint]:
    """Return the longest prefix of the entries that fits into `budget` bytes."""
    fitting, total = [], 0
    for entry in entries:
        total += entry.bytes
        if total > budget:
            break
        fitting.append(entry)
    return fitting
