"""BYOL: guess what a slow average of oneself makes of another view.

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
from stream_ssl.methods.base import MethodOutput
from stream_ssl.methods.momentum import Momentum
from stream_ssl.methods.norm import Statistics
from stream_ssl.methods.predictor import Predictor

if TYPE_CHECKING:
    from memory import WorkingMemory


class BYOL(Momentum):
    """Each view's guess against a momentum network's embeddings of the other views.

    Grill et al. 2020, eq. 2. No negatives; the target is the momentum copy.

    The memory is given the target's embeddings of the second view: training batches may be drawn
    from it.

    BatchNorm: each view passes alone, in target and trained network. Without negatives there is
    nothing to pick the positive from, so that what the statistics tell is of no use. For the
    target's see `key_statistics`. Use a projector with `batchnorm: hidden`.

    Args:
        encoder: images to features; copied for the target.
        projector: features to embeddings; states its `dim`.
        loss: NegativeCosine.
        momentum: share of the target that each update keeps, in [0, 1).
        views: V; each guesses the V - 1 others.
        predictor_hidden: of the predictor.
        key_statistics: what the target's BatchNorm uses: the statistics of its "batch", as in the
            paper, or the "average", as MoCo's.

    Raises:
        ValueError: an argument outside its range, or a loss that does not fit.
    """

    contrasts = False

    def __init__(
        self,
        encoder: nn.Module,
        projector: nn.Module,
        loss: Loss,
        momentum: float = 0.99,
        views: int = 2,
        predictor_hidden: int = 512,
        key_statistics: Statistics = "batch",
    ) -> None:
        super().__init__(encoder, projector, loss, views, momentum, key_statistics)
        self.predictor = Predictor(self.dim, predictor_hidden)
        self.train()

    def forward(
        self, view_VBCHW: Sequence[Tensor], samples: Batch[Tensor], memory: WorkingMemory
    ) -> MethodOutput:
        del memory
        self.check_views(view_VBCHW)
        guess_VBD = [self.predictor(self.projector(self.encoder(view))) for view in view_VBCHW]
        target_AD = torch.cat([self.encode_keys(view) for view in view_VBCHW])
        loss = self.loss(unit(torch.cat(guess_VBD)), others(target_AD, self.views), target_AD[:0])
        return MethodOutput(loss, target_AD[len(samples) : 2 * len(samples)])

    @property
    def trained(self) -> Iterable[nn.Parameter]:
        return [*super().trained, *self.predictor.parameters()]
