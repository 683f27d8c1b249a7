"""SimCLR: all views of a batch against each other.

Shapes: V views, B samples, C channels, H height, W width, D embedding, A = V B anchors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from stream_ssl.batch import Batch
from stream_ssl.losses import Loss
from stream_ssl.methods import against
from stream_ssl.methods.against import Against, others, unit
from stream_ssl.methods.base import Method, MethodOutput, repeated
from stream_ssl.methods.norm import Statistics, check_statistics, normalising_by

if TYPE_CHECKING:
    from memory import WorkingMemory


class SimCLR(Method):
    """All views of a batch against each other.

    Each view is an anchor; its positives are the other views of its sample, its negatives the views
    of the other samples: 2 (B - 1) of them with two views (Chen et al. 2020, eq. 1).

    There is no second encoder; gradients reach anchors, positives and negatives. The memory is
    given the second view's embeddings, detached. It is no source of negatives here, but measures
    the prior, and training batches may be drawn from it. Of the same sample id or content hash
    nothing is a negative.

    BatchNorm: all views pass as one batch. Anchor, positive and negatives share their statistics,
    so that these tell nothing of who is whose positive.

    Args:
        encoder: images to features.
        projector: features to embeddings; states its `dim`.
        loss: of anchors, positives and negatives.
        views: V; each is an anchor with V - 1 positives.
        key_statistics: what BatchNorm uses where images are encoded for the memory alone: the
            statistics of their "batch", as anchors have them, or the running "average".

    Raises:
        ValueError: an argument outside its range, or a loss that does not fit.
    """

    def __init__(
        self,
        encoder: nn.Module,
        projector: nn.Module,
        loss: Loss,
        views: int = 2,
        key_statistics: Statistics = "batch",
    ) -> None:
        super().__init__(encoder, projector, loss, views)
        check_statistics(key_statistics)
        self.key_statistics: Statistics = key_statistics
        self.train()

    def forward(
        self, view_VBCHW: Sequence[Tensor], samples: Batch[Tensor], memory: WorkingMemory
    ) -> MethodOutput:
        self.check_views(view_VBCHW)
        z_AD = unit(self.projector(self.encoder(torch.cat(list(view_VBCHW)))))
        anchors = repeated(samples, self.views)
        compared = self.compared(z_AD, anchors, memory)
        loss = against.apply(self.loss, z_AD, others(z_AD, self.views), compared, memory)
        return MethodOutput(loss, z_AD.detach()[len(samples) : 2 * len(samples)])

    def compared(self, z_AD: Tensor, anchors: Batch[Tensor], memory: WorkingMemory) -> Against:
        """All views of the other samples."""
        del memory
        return against.batch(z_AD, anchors, anchors)

    def check(self, memory: WorkingMemory, batch: int | None = None) -> None:
        super().check(memory, batch)
        if batch is not None:
            against.check_size(self.loss, batch, self.views, drawn=0)

    @torch.no_grad()
    def encode_keys(self, image_BCHW: Tensor) -> Tensor:
        with normalising_by(self.key_statistics, self.encoder, self.projector):
            return unit(self.projector(self.encoder(image_BCHW)))
