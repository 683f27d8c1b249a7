"""The base of methods whose keys come from a slow average of the trained network.

Shapes: B samples, C channels, H height, W width, D embedding.
"""

from __future__ import annotations

import copy
from typing import Any, Self

import torch
from torch import Tensor, nn

from stream_ssl.losses import Loss
from stream_ssl.methods.base import Method
from stream_ssl.methods.norm import Statistics, forget_statistics


class Momentum(Method):
    """A method whose keys come from slow moving averages of the encoder and the projector.

    BatchNorm: the trained encoder uses the statistics of its batch. `key_statistics` selects the
    statistics of the key encoder:
     - "batch": the key encoder uses the statistics of the batch of keys and keeps none. Keys are
       sound from the first step. Batch statistics can leak information from a key to its anchor.
     - "average": the key encoder uses buffers that follow the trained encoder's buffers with the
       same momentum as the weights (as in EMAN, Cai et al. 2021). A key depends only on its own
       image, so nothing leaks. But the buffers start far from good values, so use this only for
       runs of many times 1 / (1 - momentum) updates.

    Args:
        encoder, projector, loss: see `Method`; encoder and projector are copied.
        momentum: share of the key encoder's weights that each update keeps, in [0, 1).
        key_statistics: statistics of the key encoder's BatchNorm, "batch" or "average".
        common: `views`, see `Method`.

    Raises:
        ValueError: an argument is outside its range, or the loss does not fit.
    """

    def __init__(
        self,
        encoder: nn.Module,
        projector: nn.Module,
        loss: Loss,
        *,
        momentum: float = 0.99,
        key_statistics: Statistics = "batch",
        **common: Any,
    ) -> None:
        super().__init__(encoder, projector, loss, key_statistics=key_statistics, **common)
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum is {momentum}: the key encoder follows only within [0, 1)")
        self.momentum = momentum
        self.key_encoder = copy.deepcopy(encoder).requires_grad_(False)
        self.key_projector = copy.deepcopy(projector).requires_grad_(False)
        if key_statistics == "batch":
            forget_statistics(self.key_encoder)
            forget_statistics(self.key_projector)
        self.train()

    @property
    def key_networks(self) -> tuple[nn.Module, nn.Module]:
        return self.key_encoder, self.key_projector

    @torch.no_grad()
    def after_update(self) -> None:
        move_towards(self.encoder, self.key_encoder, 1 - self.momentum)
        move_towards(self.projector, self.key_projector, 1 - self.momentum)

    def train(self, mode: bool = True) -> Self:
        """Set the training mode, as for any module, but keep the key encoder in evaluation mode."""
        super().train(mode)
        self.key_encoder.eval()
        self.key_projector.eval()
        return self


def move_towards(target: nn.Module, moved: nn.Module, share: float) -> None:
    """Move the weights and floating-point buffers of `moved` towards `target`.

    Args:
        target: the module to follow.
        moved: the module to change. Its integer buffers are copied from `target`.
        share: share of the distance to move, in (0, 1].
    """
    weights: list[Tensor] = list(moved.parameters())
    if weights:
        torch._foreach_lerp_(weights, list(target.parameters()), share)
    target_buffers = dict(target.named_buffers())
    for name, buffer in moved.named_buffers():
        if buffer.is_floating_point():
            buffer.lerp_(target_buffers[name], share)
        else:
            buffer.copy_(target_buffers[name])
