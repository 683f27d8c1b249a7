"""Self-labeling refinement on MoCo, with mixed images and mixed labels.

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

if TYPE_CHECKING:
    from stream_ssl.memory import WorkingMemory


class SelfLabelingMoCo(MoCo):
    """MoCo with soft labels and momentum mixup.

    The anchors are `x'_i = theta_i x_i + (1 - theta_i) x~_k`, where x~_k is the positive view of a
    random sample (self-labeling refinement, poster). The loss defines the soft labels and the rise
    of alpha and beta. Without mixup the method is MoCo.

    BatchNorm: as in MoCo.

    Args:
        encoder: see `Method`.
        projector: see `Method`.
        loss: SelfLabeling.
        mixup: parameter of the distribution Beta(mixup, mixup) of theta, drawn with torch's global
            generator; 0 for no mixup.
        common: see `MoCo`. With several positives, the first positive is mixed and stored.

    Raises:
        ValueError: an argument is outside its range, or the loss does not fit.
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
        self.check_views(view_VBCHW, samples)
        mix = self.draw(len(samples), view_VBCHW[0].device)
        share_B111 = mix.theta_B.to(view_VBCHW[0])[:, None, None, None]
        mixed_BCHW = torch.lerp(view_VBCHW[1][mix.permutation_B], view_VBCHW[0], share_B111)
        z_BD = unit(self.projector(self.encoder(mixed_BCHW)))
        return self.contrasted(z_BD, view_VBCHW, samples, memory, mix)

    def draw(self, count: int, device: torch.device) -> Mix:
        """Draw the mixture of each anchor.

        The numbers are drawn on the CPU, so that they do not depend on the device.
        """
        theta_B = Beta(self.mixup, self.mixup).sample((count,))
        return Mix(to_device(torch.randperm(count), device), to_device(theta_B, device))
