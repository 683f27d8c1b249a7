"""Shadow memories, which show what another eviction policy would have kept.

Shapes: B samples, D embedding, A descriptor, C H W image.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stream_ssl.memory.descriptors import Descriptor, check_features, images_of

if TYPE_CHECKING:
    from stream_ssl.learning.records import StepRecord
    from stream_ssl.memory import Admission, WorkingMemory


class Shadow:
    """A memory that gets the same keys as the working memory. The learner does not use it.

    Args:
        name: the label in the metrics, such as "queue".
        memory: a memory without images, with the policy to compare. Its descriptor must be a
            `StepDescriptor` if the descriptor of the working memory reads images or features.
    """

    def __init__(self, name: str, memory: WorkingMemory) -> None:
        self.name = name
        self.memory = memory

    def consume(self, record: StepRecord) -> Admission | None:
        """Add the keys of one step.

        Return None if the step offered no keys to the working memory.
        """
        if record.admission is None:
            return None
        if isinstance(self.memory.descriptor, StepDescriptor):
            self.memory.descriptor.take(record)
        return self.memory.add(
            record.ids_B, record.keys_BD, labels=record.labels_B, hashes=record.hashes_B
        )


class StepDescriptor(Descriptor):
    """A descriptor of a step's images and features, for memories that keep no images.

    Several memories can share it: it computes the rows of a step only once. Such a memory cannot
    describe its slots again, so its slots keep the features that they came with.

    Args:
        descriptor: the descriptor of the working memory.
        image_shape: the shape (C, H, W) of the images.
    """

    needs_images = False

    def __init__(self, descriptor: Descriptor, image_shape: tuple[int, int, int]) -> None:
        self.descriptor, self.moves = descriptor, descriptor.moves
        self._shape = image_shape
        self._record: StepRecord | None = None
        self._row_BA: Tensor | None = None

    def take(self, record: StepRecord) -> None:
        """Use the images and the features of this step from now on."""
        if record is not self._record:
            self._record, self._row_BA = record, None

    def dim(self, embedding_dim: int, image_shape: tuple[int, int, int] | None) -> int:
        del image_shape
        return self.descriptor.dim(embedding_dim, self._shape)

    def __call__(self, z_BD: Tensor, image_BCHW: Tensor | None) -> Tensor:
        del image_BCHW
        if self._row_BA is None:
            record = self._record
            shown_BCHW = None if record is None else record.images_BCHW
            shown_BCHW = images_of(self.descriptor, shown_BCHW)
            seen_BF = None if record is None else record.features_BF
            if self.descriptor.needs_features:  # a rank without samples has none
                seen_BF = check_features(seen_BF, len(z_BD), z_BD.device)
            self._row_BA = self.descriptor.describe(z_BD, shown_BCHW, seen_BF)
        return self._row_BA

    def refreshed(self, before_RA: Tensor, z_RD: Tensor) -> Tensor:
        return self.descriptor.refreshed(before_RA, z_RD)

    def to(self, device: torch.device) -> None:
        self.descriptor.to(device)

    def __repr__(self) -> str:
        return repr(self.descriptor)
