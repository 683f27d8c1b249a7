"""When a run saves its state, and how it returns to an earlier one after its weights diverged."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from stream_ssl.daemon.learner_server import LearnerServer
from stream_ssl.daemon.receiver_link import ReceiverLink
from stream_ssl.feed.originals import KeptOriginals
from stream_ssl.learning.capture import Capture
from stream_ssl.learning.checkpoint import Checkpointer, CheckpointRecord
from stream_ssl.learning.learner import Learner
from stream_ssl.learning.records import Idle, StepRecord

log = logging.getLogger("stream_ssl.learner")


class Saver:
    """The checkpoints of a run: begins them, reports them, and reloads one after a divergence.

    Args:
        config: the run's configuration, which each checkpoint stores.
        first: the state before the first step; None: the run has a checkpoint.
        originals: keeps the files of the samples that a checkpoint holds; None: no files are kept.
        receiver: learns which records no checkpoint needs.
        server: exports the checkpoints, and the state of divergence.
    """

    def __init__(
        self,
        learner: Learner,
        checkpointer: Checkpointer,
        config: Mapping[str, Any],
        first: Capture | None,
        originals: KeptOriginals | None,
        receiver: ReceiverLink,
        server: LearnerServer,
    ) -> None:
        self._learner, self._checkpointer, self._config = learner, checkpointer, config
        self._first, self._originals, self._receiver = first, originals, receiver
        self._metrics, self._health = server.metrics, server.health
        self._healthy = True  # whether training was healthy at the last look
        self._failed_step = 0  # step of the last divergence

    def save_first(self, record: StepRecord | Idle) -> None:
        """Save the state from before the first step, so that a run can always go back to it.

        The first samples have then shown that the settings fit.
        """
        if self._first is not None and isinstance(record, StepRecord):
            first, self._first = self._first, None
            self._record(lambda: self._checkpointer.save(first, self._config))

    def save_if_due(self, record: StepRecord | Idle) -> None:
        """Begin a checkpoint if the settings or the state of training ask for one."""
        due = self._checkpointer.due(record) and self._learner.divergence.savable
        if due and not self._learner.ranks.group.rank:
            self.save_soon()  # rank 0 decides when all ranks save

    def save_soon(self) -> None:
        """Save now. With several ranks, all save before their next step."""
        if self._learner.ranks.alone:
            self.begin()
        else:
            self._learner.ranks.save_asked = True

    def begin(self) -> None:
        """Begin a checkpoint that is written while training goes on."""
        self.conclude(wait=True)  # on all ranks, before they meet for the next checkpoint
        if self._originals is not None:
            self._originals.saving(self._learner.originals())
        self._record(lambda: self._checkpointer.begin(self._learner, self._config))

    def conclude(self, wait: bool = False) -> None:
        """Record a checkpoint that is now durable; with `wait`, wait until it is."""
        self._record(lambda: self._checkpointer.finished(wait))

    def save_last(self) -> None:
        """Write a last checkpoint before the process ends."""
        self.conclude(wait=True)
        if not self._learner.divergence.savable:
            log.warning("no final checkpoint is written, because the last updates were skipped")
        elif self._learner.step:
            if self._originals is not None:
                self._originals.saving(self._learner.originals())
            then = f"the next start repeats the steps after {self._checkpointer.durable_step}"
            self._record(lambda: self._checkpointer.save(self._learner, self._config), then)

    def _record(
        self, work: Callable[[], CheckpointRecord | None], then: str = "training continues"
    ) -> None:
        """Run `work`, and record its checkpoint. Log a failed write, and how the run continues."""
        try:
            record = work()
        except OSError as error:
            self._metrics.of_checkpoints.failed()
            self._health.set("checkpoint", False, str(error))
            log.error("checkpoint not written, %s: %s", then, error)
            return
        if record is None:
            return
        self._health.set("checkpoint", True)
        self._metrics.consume(record)
        if self._originals is not None:
            self._originals.saved(self._learner.originals())
            self._metrics.observe_originals(self._originals.bytes, self._originals.unkept)
        self._receiver.consume(record)
        log.info(
            "checkpoint at step %d: %.1f MB in %.2f s; training waited for %.2f s",
            record.step,
            record.bytes / 1e6,
            record.seconds,
            record.stalled,
        )

    def reload(self) -> None:
        """Load good weights again after training has diverged."""
        divergence, group = self._learner.divergence, self._learner.ranks.group
        self.conclude(wait=True)
        saved = self._checkpointer.before(divergence.limit)
        if saved is None:  # there is no earlier one: load the last reloaded one again
            saved = self._checkpointer.before(divergence.reloaded_from + 1)
        if saved is None:
            divergence.halt()
            log.error("no checkpoint is older than the fault: %s", divergence)
        else:
            self._failed_step, before = self._learner.step, self._learner.originals()
            self._learner.reload(saved.capture(group.rank, group.size, self._learner.offset))
            if self._originals is not None:
                self._originals.reloaded(before, self._learner.originals())
            log.warning("reloaded %s; training continues with the next samples", saved.path.name)
            if divergence.halted:
                log.error("%s", divergence)
        self.watch_divergence()

    def watch_divergence(self) -> None:
        """Export the state of divergence. Log when training diverges and when it has recovered."""
        divergence = self._learner.divergence
        self._metrics.observe_divergence(divergence)
        if not divergence.healthy and self._healthy:
            log.warning("%s", divergence)
        if divergence.healthy and not self._healthy:
            log.info("training has recovered: updates succeed again after the reload")
            self._checkpointer.discard_between(divergence.reloaded_from, self._failed_step)
            if not self._learner.ranks.group.rank:
                self.save_soon()
        self._healthy = divergence.healthy
        self._health.set("divergence", self._healthy, str(divergence))
