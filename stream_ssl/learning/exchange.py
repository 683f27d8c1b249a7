"""What passes between the learner and its memory.

Shapes: B samples, R slots encoded anew, D embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from memory import Admission, WorkingMemory
from stream_ssl.learning.collisions import count_pairs
from stream_ssl.learning.inputs import Inputs
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

    def draw(self, count: int, phases: Phases) -> Inputs:
        """A training batch from the memory."""
        with phases("data"):
            return Inputs.of_memory(self._memory, count, self._device, self._how)

    def measure(self, inputs: Inputs, outcome: Outcome, phases: Phases) -> Meeting:
        """Collisions of a batch with the memory as it is."""
        if not outcome.usable:
            return Meeting(outcome.keys_BD)
        with phases("memory"):
            expected = self._memory.collisions(outcome.keys_BD, inputs.image_BCHW).mean()
            labels_B = inputs.labels_B.to(self._memory.device)
            pairs = count_pairs(labels_B, self._memory.labels)
        return Meeting(outcome.keys_BD, expected, pairs)

    def admit(self, inputs: Inputs, outcome: Outcome, phases: Phases) -> Meeting:
        """The same of a fresh batch, which then joins the memory."""
        met = self.measure(inputs, outcome, phases)
        if not outcome.usable:
            return met
        with phases("memory"):
            admission = self._memory.add(
                inputs.ids_B,
                outcome.keys_BD,
                images=None if self._memory.images is None else inputs.image_BCHW,
                labels=inputs.labels_B,
                hashes=inputs.hashes_B,
            )
        return met._replace(admission=admission)

    def write_back(self, drawn: Inputs, outcome: Outcome, phases: Phases) -> Outcome:
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
