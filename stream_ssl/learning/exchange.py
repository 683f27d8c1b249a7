"""What passes between the learner and its memory.

Shapes: B samples, R slots encoded anew, D embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from memory import Admission, WorkingMemory
from stream_ssl.batch import Batch
from stream_ssl.learning.collisions import count_pairs
from stream_ssl.learning.phases import Phases
from stream_ssl.learning.updates import Outcome, Updates


class Meeting(NamedTuple):
    """A batch's keys, and how they met the memory; nothing of it with keys it cannot take.

    What was counted and measured still lies on the memory's device.
    """

    keys_BD: Tensor
    expected: Tensor | None = None  # mean collision probability, 0-dimensional
    pairs: Tensor | None = None  # what `collisions.count_pairs` counts
    admission: Admission | None = None


class Exchange:
    """Measures, admits, draws, writes back and encodes anew.

    Args:
        memory: the learner's.
        updates: who encodes.
        device: where batches lie.
        reencode: stalest slots to encode anew each time.
        write_back: give fresh keys of what was drawn back to the memory.
        draw: how training batches are drawn.
    """

    def __init__(
        self,
        memory: WorkingMemory,
        updates: Updates,
        device: torch.device,
        reencode: int,
        write_back: bool,
        draw: Literal["uniform", "inverse-count"],
    ) -> None:
        self._memory, self._updates, self._device = memory, updates, device
        self._count, self._writes_back, self._how = reencode, write_back, draw

    @property
    def can_draw(self) -> bool:
        """Whether a slot holds an image; one that lies in a file may have lost it in a crash."""
        memory = self._memory
        return len(memory) > 0 and memory.images is not None and len(memory.stalest(1)) > 0

    def draw(self, count: int, phases: Phases) -> Batch[Tensor]:
        """A training batch from the memory."""
        with phases("data"):
            return drawn_from(self._memory, count, self._device, self._how)

    def measure(self, batch: Batch[Tensor], outcome: Outcome, phases: Phases) -> Meeting:
        """Collisions of a batch with the memory as it is."""
        if not outcome.usable:
            return Meeting(outcome.keys_BD)
        with phases("memory"):
            expected = self._memory.collisions(outcome.keys_BD, batch.images_BCHW).mean()
            assert batch.labels_B is not None, "-1 where there are none"
            labels_B = batch.labels_B.to(self._memory.device)
            pairs = count_pairs(labels_B, self._memory.labels)
        return Meeting(outcome.keys_BD, expected, pairs)

    def admit(self, batch: Batch[Tensor], outcome: Outcome, phases: Phases) -> Meeting:
        """The same of a fresh batch, which then joins the memory."""
        met = self.measure(batch, outcome, phases)
        if not outcome.usable:
            return met
        with phases("memory"):
            admission = self._memory.add(
                batch.ids_B,
                outcome.keys_BD,
                images=None if self._memory.images is None else batch.images_BCHW,
                labels=batch.labels_B,
                hashes=batch.hashes_B,
            )
        return met._replace(admission=admission)

    def write_back(self, drawn: Batch[Tensor], outcome: Outcome, phases: Phases) -> Outcome:
        """Give the fresh keys of what was drawn from the memory back to its slots."""
        if not self._writes_back or not outcome.usable:
            return outcome
        assert drawn.slots_B is not None, "what is drawn from the memory has slots"
        with phases("memory"):
            drift = self._memory.refresh(drawn.slots_B, outcome.keys_BD).mean()
        return outcome._replace(unread={**outcome.unread, "written_back_cosine": drift})

    def reencode(self, phases: Phases) -> Mapping[str, Tensor]:
        """Encode the stalest slots anew; the mean cosine of their old and new embeddings."""
        if not self._count or not self.can_draw:
            return {}
        slots_R = self._memory.stalest(self._count)
        keys = self._updates.encode(self._memory.images_of(slots_R).to(self._device), phases)
        if not keys.usable:
            return {}
        with phases("memory"):
            return {"drift_cosine": self._memory.refresh(slots_R, keys.keys_BD).mean()}


def drawn_from(
    memory: WorkingMemory,
    count: int,
    device: torch.device,
    how: Literal["uniform", "inverse-count"] = "uniform",
) -> Batch[Tensor]:
    """At most `count` samples of the memory, each at most once, as `WorkingMemory.sample`."""
    count = min(count, len(memory))
    draw = memory.sample(count, how=how)
    slots_B, images_BCHW, ids_B = draw.slots, draw.images, draw.ids
    assert images_BCHW is not None, "only a memory that keeps images is drawn from"
    if _repeats(memory, slots_B):
        slots_B = torch.unique(slots_B)
        images_BCHW, ids_B = memory.images_of(slots_B), memory.ids[slots_B]
    return Batch(
        ids_B.to(device),
        memory.hashes[slots_B].to(device),
        memory.labels[slots_B].to(device),
        images_BCHW.to(device),
        slots_B=slots_B,
    )


def _repeats(memory: WorkingMemory, slots: Tensor) -> bool:
    """Whether a slot was drawn twice: the memory does so where it has lost most of its images."""
    if slots.device.type == "cpu":
        return len(torch.unique(slots)) < len(slots)
    # To look at the slots would wait for a GPU; how many could be drawn is known without.
    return len(memory.stalest(len(slots))) < len(slots)
