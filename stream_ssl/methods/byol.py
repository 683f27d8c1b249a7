"""BYOL: predict the embedding that a slow average of the network gives another view.

Shapes: V views, B samples, C channels, H height, W width, D embedding, A = V B anchors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from stream_ssl.batch import Batch
from stream_ssl.losses import Loss
from stream_ssl.methods.base import MethodOutput, others, unit
from stream_ssl.methods.momentum import Momentum
from stream_ssl.methods.simsiam import Predictor

if TYPE_CHECKING:
    from stream_ssl.memory import WorkingMemory


class BYOL(Momentum):
    """Comparison of each view's prediction with a momentum network's embeddings of the other views.

    Grill et al. 2020, eq. 2. The method uses no negatives. The targets come from the momentum copy.

    The memory stores the target's embeddings of the second view, because training batches may be
    drawn from the memory.

    BatchNorm: each view passes alone, both in the target and in the trained network. Batch
    statistics could reveal the positive among negatives, but this method has no negatives. Use a
    projector with `batchnorm: hidden`.

    Args:
        encoder: see `Method`; the target has a copy.
        projector: see `Method`; the target has a copy.
        loss: NegativeCosine.
        predictor_hidden: width of the predictor's hidden layer.
        common: `momentum` and `key_statistics` of the target, see `Momentum`; and `views`: each
            view predicts the other views.

    Raises:
        ValueError: an argument is outside its range, or the loss does not fit.
    """

    contrasts = False

    def __init__(
        self,
        encoder: nn.Module,
        projector: nn.Module,
        loss: Loss,
        *,
        predictor_hidden: int = 512,
        **common: Any,
    ) -> None:
        super().__init__(encoder, projector, loss, **common)
        self.predictor = Predictor(self.dim, predictor_hidden)

    def forward(
        self, view_VBCHW: Sequence[Tensor], samples: Batch[Tensor], memory: WorkingMemory
    ) -> MethodOutput:
        del memory
        self.check_views(view_VBCHW, samples)
        guess_VBD = [self.predictor(self.projector(self.encoder(view))) for view in view_VBCHW]
        target_AD = torch.cat([self.encode_keys(view) for view in view_VBCHW])
        loss = self.loss(unit(torch.cat(guess_VBD)), others(target_AD, self.views), target_AD[:0])
        return MethodOutput(loss, target_AD[len(samples) : 2 * len(samples)])
