"""SimSiam: guess one view from another, and let only the guess learn.

Shapes: V views, B samples, C channels, H height, W width, D embedding, A = V B anchors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from stream_ssl.batch import Batch
from stream_ssl.losses import Loss
from stream_ssl.methods.against import others, unit
from stream_ssl.methods.base import Method, MethodOutput
from stream_ssl.methods.norm import Statistics, check_statistics, normalising_by
from stream_ssl.methods.predictor import Predictor

if TYPE_CHECKING:
    from memory import WorkingMemory


class SimSiam(Method):
    """Each view's guess against the other views' embeddings, whose gradient is stopped.

    Chen and He 2021, eq. 1 to 4. No negatives, no momentum encoder.

    The memory is given the second view's embeddings: training batches may be drawn from it.

    BatchNorm: each view passes alone, and the predictor's hidden layer is normalised. Without
    negatives there is nothing to pick the positive from, so that what the statistics tell is of no
    use; the method relies on them not to collapse. Use a projector with `batchnorm: all`.

    Args:
        encoder: images to features.
        projector: features to embeddings; states its `dim`.
        loss: NegativeCosine.
        views: V; each guesses the V - 1 others.
        predictor_hidden: of the predictor; null: a quarter of the dimension, as in the paper.
        key_statistics: what BatchNorm uses where images are encoded for the memory alone: the
            statistics of their "batch", or the running "average".

    Raises:
        ValueError: an argument outside its range, or a loss that does not fit.
    """

    contrasts = False

    def __init__(
        self,
        encoder: nn.Module,
        projector: nn.Module,
        loss: Loss,
        views: int = 2,
        predictor_hidden: int | None = None,
        key_statistics: Statistics = "batch",
    ) -> None:
        super().__init__(encoder, projector, loss, views)
        check_statistics(key_statistics)
        self.key_statistics: Statistics = key_statistics
        hidden = max(1, self.dim // 4) if predictor_hidden is None else predictor_hidden
        self.predictor = Predictor(self.dim, hidden)
        self.train()

    def forward(
        self, view_VBCHW: Sequence[Tensor], samples: Batch[Tensor], memory: WorkingMemory
    ) -> MethodOutput:
        del memory
        self.check_views(view_VBCHW)
        z_VBD = [self.projector(self.encoder(view)) for view in view_VBCHW]
        guess_AD = torch.cat([unit(self.predictor(z_BD)) for z_BD in z_VBD])
        target_AD = torch.cat([unit(z_BD.detach()) for z_BD in z_VBD])
        loss = self.loss(guess_AD, others(target_AD, self.views), target_AD[:0])
        return MethodOutput(loss, target_AD[len(samples) : 2 * len(samples)])

    @torch.no_grad()
    def encode_keys(self, image_BCHW: Tensor) -> Tensor:
        with normalising_by(self.key_statistics, self.encoder, self.projector):
            return unit(self.projector(self.encoder(image_BCHW)))

    @property
    def trained(self) -> Iterable[nn.Parameter]:
        return [*super().trained, *self.predictor.parameters()]
