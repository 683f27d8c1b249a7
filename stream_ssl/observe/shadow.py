"""A second memory beside the working one: what another eviction policy would have kept.

Shapes: B samples, D embedding, A descriptor, C H W image.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stream_ssl.memory.descriptors import Descriptor, images_of

if TYPE_CHECKING:
    from stream_ssl.learning.records import StepRecord
    from stream_ssl.memory import Admission, WorkingMemory


class Shadow:
    """Feeds a memory with the keys that the working memory is fed; the learner never sees it.

    Args:
        name: its label in the metrics, such as "queue".
        memory: a memory without images, with the policy to compare; its descriptor is a
            `StepDescriptor` where the working memory's reads images.
    """

    def __init__(self, name: str, memory: WorkingMemory) -> None:
        self.name = name
        self.memory = memory

    def consume(self, record: StepRecord) -> Admission | None:
        """Add the keys of one step; None for a step that added none to the working memory."""
        if record.admission is None:
            return None
        if isinstance(self.memory.descriptor, StepDescriptor):
            self.memory.descriptor.take(record)
        return self.memory.add(
            record.ids_B, record.keys_BD, labels=record.labels_B, hashes=record.hashes_B
        )


class StepDescriptor(Descriptor):
    """Describes a step's images, for memories that keep none.

    Args:
        descriptor: the working memory's. A step's rows are computed once, however many memories
            share this.
        image_shape: (C, H, W).
    """

    needs_images = False

    def __init__(self, descriptor: Descriptor, image_shape: tuple[int, int, int]) -> None:
        self.descriptor, self.moves = descriptor, descriptor.moves
        self._shape = image_shape
        self._record: StepRecord | None = None
        self._row_BA: Tensor | None = None

    def take(self, record: StepRecord) -> None:
        """Describe the images of this step from now on."""
        if record is not self._record:
            self._record, self._row_BA = record, None

    def dim(self, embedding_dim: int, image_shape: tuple[int, int, int] | None) -> int:
        del image_shape
        return self.descriptor.dim(embedding_dim, self._shape)

    def __call__(self, z_BD: Tensor, image_BCHW: Tensor | None) -> Tensor:
        del image_BCHW
        if self._row_BA is None:
            shown_BCHW = None if self._record is None else self._record.images_BCHW
            self._row_BA = self.descriptor(z_BD, images_of(self.descriptor, shown_BCHW))
        return self._row_BA

    def refreshed(self, before_RA: Tensor, z_RD: Tensor) -> Tensor:
        return self.descriptor.refreshed(before_RA, z_RD)

    def to(self, device: torch.device) -> None:
        self.descriptor.to(device)

    def __repr__(self) -> str:
        return repr(self.descriptor)
