"""Self-labeling refinement on MoCo: images are mixed, and so are their labels.

Shapes: V views, B samples, C channels, H height, W width, M positives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributions import Beta

from memory.compute import to_device
from stream_ssl.batch import Batch
from stream_ssl.losses import Loss, Mix, SelfLabeling
from stream_ssl.methods import against
from stream_ssl.methods.against import How, unit
from stream_ssl.methods.base import MethodOutput
from stream_ssl.methods.moco import MoCo
from stream_ssl.methods.norm import Statistics

if TYPE_CHECKING:
    from memory import WorkingMemory


class SelfLabelingMoCo(MoCo):
    """MoCo with soft labels and momentum mixup.

    Anchors are `x'_i = theta_i x_i + (1 - theta_i) x~_k` with x~_k the positive view of a random
    sample (self-labeling refinement, poster). The soft labels, and how alpha and beta rise, are the
    loss's. Without mixup this is MoCo.

    BatchNorm: as MoCo.

    Args:
        encoder: images to features; copied for the keys.
        projector: features to embeddings; states its `dim`.
        loss: SelfLabeling.
        momentum: share of the key encoder that each update keeps, in [0, 1).
        views: an anchor, and views - 1 positives; the first of these is mixed and remembered.
        key_statistics: what the key encoder's BatchNorm uses, "batch" or "average", see MoCo.
        negatives: n, slots of the memory that an anchor is compared with; null: all.
        negatives_by: how n are chosen: "uniform", "hardest" for each anchor, or "stratified".
        mixup: theta is drawn from Beta(mixup, mixup), by torch's global generator; 0: no mixup.

    Raises:
        ValueError: an argument outside its range, or a loss that does not fit.
    """

    def __init__(
        self,
        encoder: nn.Module,
        projector: nn.Module,
        loss: Loss,
        momentum: float = 0.99,
        views: int = 2,
        key_statistics: Statistics = "batch",
        negatives: int | None = None,
        negatives_by: How = "uniform",
        mixup: float = 1.0,
    ) -> None:
        if not isinstance(loss, SelfLabeling):
            raise ValueError(
                f"{type(loss).__name__} labels no mixed images: choose SelfLabeling, or the method "
                "MoCo, which takes any contrastive loss"
            )
        if not (math.isfinite(mixup) and mixup >= 0):
            raise ValueError(f"mixup is {mixup}: Beta's parameter is positive, or 0 for no mixup")
        super().__init__(
            encoder, projector, loss, momentum, views, key_statistics, negatives, negatives_by
        )
        self.mixup = mixup

    def forward(
        self, view_VBCHW: Sequence[Tensor], samples: Batch[Tensor], memory: WorkingMemory
    ) -> MethodOutput:
        if not self.mixup:
            return super().forward(view_VBCHW, samples, memory)
        self.check_views(view_VBCHW)
        mix = self.draw(len(samples), view_VBCHW[0].device)
        share_B111 = mix.theta_B.to(view_VBCHW[0])[:, None, None, None]
        mixed_BCHW = torch.lerp(view_VBCHW[1][mix.permutation_B], view_VBCHW[0], share_B111)
        z_BD = unit(self.projector(self.encoder(mixed_BCHW)))
        positive_BMD = self.positives(view_VBCHW)
        key_BD = positive_BMD[:, 0]
        compared = self.compared(z_BD, key_BD, samples, memory)
        loss = against.apply(self.loss, z_BD, positive_BMD, compared, memory, mix=mix)
        return MethodOutput(loss, key_BD)

    def draw(self, count: int, device: torch.device) -> Mix:
        """Who is mixed with whom, and by how much; on the CPU, so that every device draws the
        same."""
        theta_B = Beta(self.mixup, self.mixup).sample((count,))
        return Mix(to_device(torch.randperm(count), device), to_device(theta_B, device))
