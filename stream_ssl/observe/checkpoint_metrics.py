"""The metrics of a learner's checkpoints: their age, the steps they lack, and their copies."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from stream_ssl.learning.checkpoint_layout import DAMAGED
from stream_ssl.observe.families import Families

if TYPE_CHECKING:
    from stream_ssl.learning.checkpoint import CheckpointRecord


def set_aside(checkpoints: Path) -> float:
    """Return the number of damaged checkpoints in a folder; NaN if the folder is unreadable."""
    try:
        return float(sum(path.name.startswith(DAMAGED) for path in checkpoints.iterdir()))
    except OSError:
        return math.nan


class CheckpointMetrics:
    """The metrics of the checkpoints of a learner.

    Args:
        folder: the folder of the checkpoints; None if it is unknown.
        clock: returns seconds since the Unix epoch, for the age of a checkpoint.
    """

    def __init__(
        self,
        families: Families,
        folder: Path | None,
        clock: Callable[[], float],
        monotonic: Callable[[], float],
    ) -> None:
        self._families, self._monotonic = families, monotonic
        self._created = clock()  # without a checkpoint, its age counts from the start
        self._unsaved_since = math.inf  # time of the first step that no checkpoint holds
        self._step = 0
        compute = families.compute
        compute("checkpoint_age_seconds", lambda: max(0.0, clock() - self._created))
        compute("checkpoint_lag_seconds", lambda: max(0.0, monotonic() - self._unsaved_since))
        if folder is not None:
            compute("checkpoints_damaged", lambda: set_aside(folder))

    def stepped(self, step: int) -> None:
        """Report a step of the learner, which no checkpoint holds yet."""
        self._unsaved_since = min(self._unsaved_since, self._monotonic())
        self._step = step

    def saved(self, record: CheckpointRecord) -> None:
        """Report a written checkpoint."""
        unsaved = self._unsaved_since
        self.resumed(record.step, record.created)
        if record.step < self._step:  # steps during the writing of the checkpoint
            self._unsaved_since = max(unsaved, self._monotonic() - record.seconds)
        self._families.fill(record)

    def resumed(self, step: int, created: float) -> None:
        """Report the newest checkpoint: its step, and the Unix time of its creation."""
        self._created, self._unsaved_since = created, math.inf
        self._families.set("checkpoint_timestamp_seconds", created)
        self._families.set("checkpoint_step", step)
        self._families.set("step", max(step, self._step))

    def failed(self) -> None:
        """Count a checkpoint that could not be written."""
        self._families.add("checkpoint_failures_total")

    def watch_copies(self, late: Callable[[], float]) -> None:
        """Export for how many seconds a checkpoint waits to be copied to a bucket."""
        self._families.compute("checkpoint_copy_late_seconds", late)

    def copied(self, step: int) -> None:
        """Report that the checkpoint of a step was copied to a bucket."""
        self._families.add("checkpoint_copies_total")
        self._families.set("checkpoint_copy_step", step)

    def copy_failed(self) -> None:
        """Count a checkpoint that could not be copied to a bucket."""
        self._families.add("checkpoint_copy_failures_total")
