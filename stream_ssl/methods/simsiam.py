"""SimSiam: predict one view's embedding from another view, with the target's gradient stopped.

Shapes: V views, B samples, C channels, H height, W width, D embedding, A = V B anchors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from stream_ssl.batch import Batch
from stream_ssl.losses import Loss
from stream_ssl.methods.base import Method, MethodOutput, others, unit
from stream_ssl.methods.norm import BatchNorm1d

if TYPE_CHECKING:
    from stream_ssl.memory import WorkingMemory


class SimSiam(Method):
    """Comparison of each view's prediction with the detached embeddings of the other views.

    Chen and He 2021, eq. 1 to 4. The method uses no negatives and no momentum encoder.

    The memory stores the second view's embeddings, because training batches may be drawn from the
    memory.

    BatchNorm: each view passes alone, and the predictor's hidden layer is normalised. Batch
    statistics could reveal the positive among negatives, but this method has no negatives. The
    method needs batch statistics to avoid collapse. Use a projector with `batchnorm: all`.

    Args:
        encoder: see `Method`.
        projector: see `Method`.
        loss: NegativeCosine.
        predictor_hidden: width of the predictor's hidden layer; null: a quarter of the dimension,
            as in the paper.
        common: `views`, each of which predicts the other views; and `key_statistics`, see `Method`.

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
        predictor_hidden: int | None = None,
        **common: Any,
    ) -> None:
        super().__init__(encoder, projector, loss, **common)
        hidden = max(1, self.dim // 4) if predictor_hidden is None else predictor_hidden
        self.predictor = Predictor(self.dim, hidden)

    def forward(
        self, view_VBCHW: Sequence[Tensor], samples: Batch[Tensor], memory: WorkingMemory
    ) -> MethodOutput:
        del memory
        self.check_views(view_VBCHW, samples)
        z_VBD = [self.projector(self.encoder(view)) for view in view_VBCHW]
        guess_AD = torch.cat([unit(self.predictor(z_BD)) for z_BD in z_VBD])
        target_AD = torch.cat([unit(z_BD.detach()) for z_BD in z_VBD])
        loss = self.loss(guess_AD, others(target_AD, self.views), target_AD[:0])
        return MethodOutput(loss, target_AD[len(samples) : 2 * len(samples)])


class Predictor(nn.Module):
    """A network that predicts one view's embedding [B, D] from another's.

    It has one hidden layer, with BatchNorm and ReLU.

    Args:
        dim: D.
        hidden: width of the hidden layer, at least 1.

    Raises:
        ValueError: `hidden` is less than 1.
    """

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        if hidden < 1:
            raise ValueError(f"predictor_hidden is {hidden}: the hidden layer needs at least 1")
        self.layers = nn.Sequential(
            nn.Linear(dim, hidden, bias=False),
            BatchNorm1d(hidden),
            nn.ReLU(inplace=True),
            nn.Linear(hidden, dim),
        )

    def forward(self, z_BD: Tensor) -> Tensor:
        guess_BD: Tensor = self.layers(z_BD)
        return guess_BD
