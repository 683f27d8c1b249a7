"""Self-labeling refinement on MoCo: images are mixed, and so are their labels.

Shapes: V views, B samples, C channels, H height, W width, M positives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributions import Beta

from stream_ssl.batch import Batch
from stream_ssl.losses import Loss, Mix, SelfLabeling
from stream_ssl.memory.compute import to_device
from stream_ssl.methods.base import MethodOutput, unit
from stream_ssl.methods.moco import MoCo
from stream_ssl.methods.negatives import contrast

if TYPE_CHECKING:
    from stream_ssl.memory import WorkingMemory


class SelfLabelingMoCo(MoCo):
    """MoCo with soft labels and momentum mixup.

    Anchors are `x'_i = theta_i x_i + (1 - theta_i) x~_k` with x~_k the positive view of a random
    sample (self-labeling refinement, poster). The soft labels, and how alpha and beta rise, are the
    loss's. Without mixup this is MoCo.

    BatchNorm: as MoCo.

    Args:
        encoder, projector: see `Method`.
        loss: SelfLabeling.
        mixup: theta is drawn from Beta(mixup, mixup), by torch's global generator; 0: no mixup.
        common: see `MoCo`; of several positives the first is mixed and remembered.

    Raises:
        ValueError: an argument outside its range, or a loss that does not fit.
    """

    def __init__(
        self,
        encoder: nn.Module,
        projector: nn.Module,
        loss: Loss,
        *,
        mixup: float = 1.0,
        **common: Any,
    ) -> None:
        if not isinstance(loss, SelfLabeling):
            raise ValueError(
                f"{type(loss).__name__} labels no mixed images: choose SelfLabeling, or the method "
                "MoCo, which takes any contrastive loss"
            )
        if not (math.isfinite(mixup) and mixup >= 0):
            raise ValueError(f"mixup is {mixup}: Beta's parameter is positive, or 0 for no mixup")
        super().__init__(encoder, projector, loss, **common)
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
        negatives = self.negatives(z_BD, key_BD, samples, memory)
        loss = contrast(self.loss, z_BD, positive_BMD, negatives, memory, mix)
        return MethodOutput(loss, key_BD)

    def draw(self, count: int, device: torch.device) -> Mix:
        """Which samples are mixed, and by how much; drawn on the CPU, so that every device draws
        the same."""
        theta_B = Beta(self.mixup, self.mixup).sample((count,))
        return Mix(to_device(torch.randperm(count), device), to_device(theta_B, device))
