"""What is not new is turned away before it costs an encoding or an update.

Shapes: B samples of a batch, W that wait, A descriptor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from memory import Duplicates, WorkingMemory
from memory.compute import to_device
from stream_ssl.batch import Batch
from stream_ssl.learning.step import joined


class Novelty:
    """Turns away near-copies of what the memory holds; the others wait until they fill a batch.

    A sample is a near-copy if its descriptor has a cosine of `threshold` or more with a slot, with
    a sample that waits, or with an earlier one of its batch that was not turned away. So the
    learner trains as often as the stream brings something new. What waits is part of the learner's
    state: it was read from the stream, and is trained on later.

    Args:
        memory: its descriptor must be one that training does not move, and read images.
        threshold: a cosine in (-1, 1]; None: nothing is turned away, and batches pass as they are.

    Raises:
        ValueError: the threshold lies outside its range, or the memory's descriptor is made of
            embeddings.

    Attributes:
        turned_away: near-copies of the last batch.
    """

    def __init__(self, memory: WorkingMemory, threshold: float | None) -> None:
        self._memory, self._test = memory, None
        if threshold is not None:
            if memory.descriptor.moves or not memory.descriptor.needs_images:
                raise ValueError(
                    f"novelty is {threshold} and memory.descriptor {memory.descriptor!r}: samples "
                    "are compared before they are encoded, which takes a descriptor of images "
                    "alone. Choose memory.descriptor: Thumbnail, or novelty: null"
                )
            self._test = Duplicates(threshold, "refuse")
        self._waiting: Batch[Tensor] | None = None
        self.turned_away = 0

    def __len__(self) -> int:
        """W"""
        return 0 if self._waiting is None else len(self._waiting)

    def __call__(self, batch: Batch[Tensor]) -> Batch[Tensor] | None:
        """As many new samples as the batch has, the oldest first; None while there are fewer."""
        self.turned_away = 0
        if self._test is None and self._waiting is None:
            return batch
        size, waiting = len(batch), self._waiting
        if self._test is not None:
            found = self._test.find(self._describe(batch), self._known())
            self.turned_away = size - int(found.let_in_B.sum())
            new = torch.from_numpy(found.let_in_B.nonzero()[0])
            batch = batch[to_device(new, batch.ids_B.device)]
        together = batch if waiting is None else joined(waiting, batch)
        full = len(together) >= size
        rest = together[size if full else 0 :]
        self._waiting = rest if len(rest) else None
        return together[:size] if full else None

    def state(self) -> dict[str, Tensor]:
        """The samples that wait, by column; empty where there are none."""
        return {} if self._waiting is None else self._waiting.columns()

    def load(self, state: Mapping[str, Tensor], device: torch.device) -> None:
        """Go on from what `state` gave."""
        columns: dict[str, Any] = {name: column.to(device) for name, column in state.items()}
        self._waiting = Batch(**columns) if columns else None

    def _describe(self, batch: Batch[Tensor]) -> Tensor:
        # A descriptor of images reads of the embeddings only their dtype and device.
        nothing_B0 = self._memory.embeddings.new_empty(len(batch), 0)
        return self._memory.descriptor(nothing_B0, batch.images_BCHW)

    def _known(self) -> Tensor:
        """Descriptors of all slots and of what waits."""
        held_kA = self._memory.descriptors
        if self._waiting is None:
            return held_kA
        return torch.cat([held_kA, self._describe(self._waiting).to(held_kA.dtype)])
