"""The learner's position, as its receiver learns it: how far it has read, and what to keep."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

from stream_ssl.batch import START
from stream_ssl.daemon.learner_server import LearnerServer
from stream_ssl.daemon.ranks import Part
from stream_ssl.feed.batches import Batches
from stream_ssl.journal.consumer_offsets import ConsumerOffsets
from stream_ssl.learning.checkpoint import Checkpointer, CheckpointRecord
from stream_ssl.learning.learner import Learner
from stream_ssl.rate_limited_logger import RateLimitedLogger

log = logging.getLogger("stream_ssl.learner")

TELL_SECONDS = 0.5
"""Seconds between two messages to the receiver."""
FREE_SPACE_SECONDS = 3.0
"""Seconds between two attempts to make room in the journal. The receiver trims in the meantime."""


class ReceiverLink:
    """The messages of a learner to its receiver, through a file in the receiver's run folder.

    Args:
        batches: the reader of this rank's journal.
        checkpointer: knows the records that checkpoints would replay.
        part: the journal of this rank. Only its first reader writes to the receiver.
        server: publishes the state of the link, and this process's addresses.
    """

    def __init__(
        self,
        learner: Learner,
        batches: Batches,
        checkpointer: Checkpointer,
        part: Part,
        server: LearnerServer,
    ) -> None:
        self._learner, self._batches = learner, batches
        self._checkpointer, self._part = checkpointer, part
        self._health, self._announcements = server.health, server.announcements
        self._offsets = ConsumerOffsets(part.folder)
        self._checkpointed = (checkpointer.needed() or START).record
        self._checkpoint_bytes = expected_bytes(learner)
        self._tell_at = self._free_space_at = 0.0
        self._limited_log = RateLimitedLogger(log, seconds=60.0)

    @property
    def due(self) -> bool:
        """Whether it is time for the next message."""
        return time.monotonic() >= self._tell_at

    def tell(self) -> None:
        """Tell the receiver how far the learner has read (credit) and what to keep (trimming).

        Training needs no disk. If the write fails, the receiver gets them later.
        """
        if not self._part.number:
            self._publish()
        for announcement in self._announcements:
            announcement.write()
        self._tell_at = time.monotonic() + TELL_SECONDS

    def _publish(self) -> None:
        offsets, ranks = self._learner.ranks.last.offsets, self._learner.ranks
        read = self._learner.offset.record
        if ranks.alone:  # a batch may be larger than the lag that is allowed
            read = self._batches.unread
        elif self._learner.step and len(offsets) == ranks.group.size:  # the ranks have met
            read = min(offsets[rank] for rank in self._part.readers).record
        read = max(read, self._checkpointed)
        try:
            size = self._checkpoint_bytes if self._one_disk() else 0
            journal, step = self._checkpointer.positions.journal, self._checkpointer.durable_step
            self._offsets.publish(read, self._checkpointed, journal, size, step)
        except OSError as error:
            self._health.set("cursor", False, str(error))
            self._limited_log.warning(
                "cursor",
                "the learner's position cannot be sent to the receiver, training "
                f"continues: {error}",
            )
        else:
            self._health.set("cursor", True)

    def _one_disk(self) -> bool:
        """Return whether checkpoints and this learner's journal share a disk."""
        folders = self._checkpointer.folder, self._part.folder / "journal"
        try:
            return len({folder.stat().st_dev for folder in folders}) == 1
        except OSError:
            return True  # one of the folders does not exist yet

    def consume(self, checkpoint: CheckpointRecord) -> None:
        """Tell the receiver that it may trim the records before this checkpoint."""
        self._checkpoint_bytes = max(self._checkpoint_bytes, checkpoint.bytes)
        self._checkpointed = max(self._checkpointed, checkpoint.needed.record)
        self.tell()

    def follow(self, journal: str | None) -> None:
        """Let the receiver trim nothing when the learner reads another journal than before.

        Older checkpoints do not say what the receiver of another journal may trim.
        """
        if self._checkpointer.positions.follow(journal):
            self._checkpointed = START.record

    def samples_came(self) -> None:
        """Note that the receiver has trimmed, because it sends samples again."""
        self._free_space_at = 0.0

    def make_room(self, save: Callable[[], None]) -> None:
        """Make room if the journal is full of samples that checkpoints would replay.

        Call this after the learner has read the whole journal. Without another checkpoint the
        receiver trims nothing. Without new samples no checkpoint is due.
        """
        if self._part.number or self._learner.divergence.halted or not self._offsets.journal_full:
            return
        if time.monotonic() < self._free_space_at:
            return  # the receiver may not have trimmed yet
        self._free_space_at = time.monotonic() + FREE_SPACE_SECONDS
        if self._checkpointer.busy:
            return  # how much that checkpoint frees is not known yet
        if self._checkpointer.dirty:
            log.info("the journal is full: writing a checkpoint, so that it can be trimmed")
            save()
            return
        needed = self._checkpointer.needed(beyond=self._checkpointed)
        if needed is None and self._free_rejected():
            return
        if needed is None:
            self._limited_log.warning(
                "small",
                "the receiver takes no more samples, because the disk is full or the budget of "
                "its journal is used up, and the new samples in it do not fill a batch: free "
                "space on the disk or raise journal.budget",
            )
            return
        log.warning(
            "the journal is full of records that only older checkpoints need: records "
            "before %d may now be trimmed, so the oldest checkpoint can only be "
            "evaluated. Free space on the disk, raise journal.budget, or lower checkpoints.keep",
            needed.record,
        )
        self._checkpointed = needed.record
        self.tell()

    def _free_rejected(self) -> bool:
        """Let the receiver trim samples that could not be decoded; return whether there are any.

        Without a step there is no new checkpoint, so only this frees the journal of a stream of
        nothing else. All samples before them must be in a checkpoint.
        """
        ranks, reached = self._learner.ranks, self._batches.offset.record
        if not (ranks.alone and self._learner.offset.record <= self._checkpointed < reached):
            return False
        self._limited_log.warning(
            "rejected",
            f"the journal is full of samples that cannot be decoded: records before {reached} may "
            "now be trimmed. Their reasons are in the quarantine. After a restart before the next "
            "checkpoint, they count as lost",
        )
        self._checkpointed = reached
        self.tell()
        return True


def expected_bytes(learner: Learner) -> int:
    """Estimate the bytes of a checkpoint with a full memory, before one has been written."""
    weights = sum(value.nbytes for value in learner.method.state_dict().values())
    moments = sum(2 * value.nbytes for value in learner.method.parameters() if value.requires_grad)
    columns = learner.memory.state_dict(keep_vars=True)
    slot = sum(
        math.prod(column.shape[1:]) * column.element_size()
        for name, column in columns.items()
        if name.startswith("columns.")
    )
    return int(weights + moments + learner.memory.capacity * slot) + (1 << 20)
