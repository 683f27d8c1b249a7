"""A second memory beside the working one: what another eviction policy would have kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memory import Admission, WorkingMemory
    from stream_ssl.learning.records import StepRecord


class Shadow:
    """Feeds a memory with the keys that the working memory is fed; the learner never sees it.

    Args:
        name: its label in the metrics, such as "queue".
        memory: a memory without images, with the policy to compare.
    """

    def __init__(self, name: str, memory: WorkingMemory) -> None:
        self.name = name
        self.memory = memory

    def consume(self, record: StepRecord) -> Admission | None:
        """Add the keys of one step; None for a step that added none to the working memory."""
        if record.admission is None:
            return None
        return self.memory.add(
            record.ids_B, record.keys_BD, labels=record.labels_B, hashes=record.hashes_B
        )
