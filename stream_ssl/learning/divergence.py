"""Divergence: updates that are skipped in a row, and what the learner does about them."""

from __future__ import annotations

from collections import deque

from stream_ssl.learning.records import NOT_FINITE, StepRecord

ROW = 20
"""After so many skipped updates in a row the weights count as diverged. After a reload, so many
updates without a skipped one prove that the reload helped."""
FAULTS = 3
"""The learner stops taking samples at so many faults ..."""
WITHIN = 1000
"""... within so many updates."""


class Divergence:
    """Counts skipped updates, and tells when to reload and when to stop.

    Every rank of a run consumes the same records, so all ranks count alike.

    Attributes:
        skipped_in_a_row: updates skipped since the last one that was made, or since a reload.
        reloads: checkpoints reloaded since the process started.
        halted: the learner takes no more samples from the journal.
        recovering: a checkpoint was reloaded, and fewer than `ROW` updates followed without a skip.
        reloaded_from: the step that made the weights that were reloaded last.
        updated: the step that made the present weights. Checkpoints store it, so two checkpoints
            with the same value hold the same weights.
    """

    def __init__(self) -> None:
        self.skipped_in_a_row = 0
        self.reloads = 0
        self.halted = False
        self.recovering = False
        self.updated = 0
        self.reloaded_from = 0
        self._made_in_a_row = 0
        self._attempts = 0
        self._faults: deque[int] = deque(maxlen=FAULTS)  # number of the attempt at each

    def consume(self, record: StepRecord) -> None:
        """Take one record."""
        if record.skipped in NOT_FINITE:
            self._attempts += 1
            self._made_in_a_row = 0
            self.skipped_in_a_row += 1
        elif record.skipped is None:
            self._attempts += 1
            self._made_in_a_row += 1
            self.skipped_in_a_row = 0
            self.updated = record.step
            self.recovering &= self._made_in_a_row < ROW

    @property
    def due(self) -> bool:
        """Whether the weights have diverged and must be reloaded."""
        return not self.halted and self.skipped_in_a_row >= ROW

    @property
    def limit(self) -> int:
        """Weights to reload were made before this step.

        The present weights give no finite update. Weights that were reloaded and failed within
        `ROW` updates are not tried again.
        """
        return self.reloaded_from if self.recovering else self.updated

    def restored(self, updated: int) -> None:
        """The weights are now those that step `updated` made."""
        self.updated = updated

    def reloaded(self, updated: int) -> None:
        """A checkpoint was reloaded after a fault, with the weights that step `updated` made."""
        self.reloads += 1
        self.recovering = True
        self.updated = self.reloaded_from = updated
        self.skipped_in_a_row = self._made_in_a_row = 0
        self._faults.append(self._attempts)
        if len(self._faults) == FAULTS and self._attempts - self._faults[0] <= WITHIN:
            self.halted = True

    def halt(self) -> None:
        """There is nothing to reload."""
        self.halted = True

    @property
    def savable(self) -> bool:
        """Whether a checkpoint of the present weights may be written."""
        return self.healthy and not self.skipped_in_a_row

    @property
    def healthy(self) -> bool:
        """Whether updates are made as they should be."""
        return not (self.halted or self.recovering or self.skipped_in_a_row >= ROW)

    def __str__(self) -> str:
        """One sentence for operators; empty while all is well."""
        if self.halted:
            return (
                "training has diverged and stopped: lower optimiser.learning_rate or set "
                "optimiser.clip, then restart the learner; it goes on from the last good checkpoint"
            )
        if self.recovering:
            return (
                "training has diverged; the learner reloaded an earlier checkpoint and has made "
                f"{self._made_in_a_row} of {ROW} good updates since"
            )
        if self.skipped_in_a_row >= ROW:
            return (
                f"{self.skipped_in_a_row} updates in a row were skipped, because loss, gradient or "
                "keys were not finite"
            )
        return ""
