"""Detection of divergence from skipped updates, and the state of the recovery."""

from __future__ import annotations

from collections import deque

from stream_ssl.learning.records import NOT_FINITE, StepRecord

ROW = 20
"""The weights count as diverged after this number of skipped updates in a row.

After a reload, the same number of updates without a skip proves that the reload helped.
"""
FAULTS = 3
"""The learner stops reading samples after this number of reloads within `WITHIN` updates."""
WITHIN = 1000
"""The number of updates within which `FAULTS` reloads stop the learner."""


class Divergence:
    """A counter of skipped updates that tells when to reload and when to stop.

    Every rank of a run consumes the same records, so all ranks count alike.

    Attributes:
        skipped_in_a_row: updates skipped since the last update that was made, or since a reload.
        reloads: number of checkpoints reloaded since the process started.
        halted: the learner reads no more samples from the journal.
        recovering: a checkpoint was reloaded, and fewer than `ROW` updates followed without a skip.
        reloaded_from: the step that made the weights of the last reload.
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
        self._faults: deque[int] = deque(maxlen=FAULTS)  # number of updates tried at each reload

    def consume(self, record: StepRecord) -> None:
        """Count one record."""
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
        """The step before which weights to reload must have been made.

        The present weights give no finite update. Weights that were reloaded and failed within
        `ROW` updates are not tried again.
        """
        return self.reloaded_from if self.recovering else self.updated

    def restored(self, updated: int) -> None:
        """Record that the weights are now those that step `updated` made."""
        self.updated = updated

    def reloaded(self, updated: int) -> None:
        """Record that a checkpoint was reloaded after a fault.

        Args:
            updated: the step that made the checkpoint's weights.
        """
        self.reloads += 1
        self.recovering = True
        self.updated = self.reloaded_from = updated
        self.skipped_in_a_row = self._made_in_a_row = 0
        self._faults.append(self._attempts)
        if len(self._faults) == FAULTS and self._attempts - self._faults[0] <= WITHIN:
            self.halted = True

    def halt(self) -> None:
        """Stop the learner, because there is no checkpoint to reload."""
        self.halted = True

    @property
    def savable(self) -> bool:
        """Whether a checkpoint of the present weights may be written."""
        return self.healthy and not self.skipped_in_a_row

    @property
    def healthy(self) -> bool:
        """Whether training works normally: not halted, not recovering and not diverged."""
        return not (self.halted or self.recovering or self.skipped_in_a_row >= ROW)

    def __str__(self) -> str:
        """Return one sentence for operators; empty while all is well."""
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
