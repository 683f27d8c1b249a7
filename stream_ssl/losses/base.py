"""What every loss takes and returns.

Shapes: B anchors, M positives per anchor, N negatives, D dimensions.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class LossOutput:
    """`loss` is the mean of `per_anchor` [B]; `diagnostics` are plain numbers for the metrics."""

    loss: Tensor
    per_anchor: Tensor
    diagnostics: Mapping[str, float] = field(default_factory=dict)


class Loss(nn.Module, ABC):
    """A contrastive loss on unit rows. It owns no memory: negatives are handed to it.

    `negative` is [N, D], shared by all anchors, or [B, N, D], one set per anchor. `mask_BN` is
    True where an entry must be left out, of the sums and of the count N. Gradients reach the
    anchors, and positives and negatives where these ask for one. float64 in gives float64
    arithmetic; everything else is computed in float32, under autocast too.
    """

    @abstractmethod
    def forward(
        self,
        z_BD: Tensor,
        positive_BMD: Tensor,
        negative: Tensor,
        mask_BN: Tensor | None = None,
    ) -> LossOutput:
        """Losses of the anchors. ValueError names the argument whose shape does not fit."""


def check_temperature(temperature: float) -> float:
    """The temperature itself; ValueError unless it is a positive, finite number."""
    if not (math.isfinite(temperature) and temperature > 0):
        raise ValueError(
            f"temperature is {temperature}: cosines are divided by it, so it must be positive "
            "and finite. Choose 0.05 to 1"
        )
    return float(temperature)


def check_shapes(
    z_BD: Tensor, positive_BMD: Tensor, negative: Tensor, mask_BN: Tensor | None
) -> None:
    """ValueError unless the four fit together as `Loss` says."""
    if z_BD.ndim != 2 or z_BD.shape[0] == 0:
        raise ValueError(f"anchors have shape {tuple(z_BD.shape)}: expected [B, D] with B >= 1")
    batch, dim = z_BD.shape
    if positive_BMD.ndim != 3 or positive_BMD.shape[::2] != (batch, dim):
        raise ValueError(
            f"positives have shape {tuple(positive_BMD.shape)}: expected [{batch}, M, {dim}]. "
            "For one positive per anchor add a dimension: positive.unsqueeze(1)"
        )
    if positive_BMD.shape[1] == 0:
        raise ValueError("positives have M = 0: every anchor needs at least one positive")
    if negative.shape not in ((negative.shape[-2], dim), (batch, negative.shape[-2], dim)):
        raise ValueError(
            f"negatives have shape {tuple(negative.shape)}: expected [N, {dim}] for all anchors "
            f"or [{batch}, N, {dim}] for each"
        )
    if mask_BN is not None and mask_BN.shape != (batch, negative.shape[-2]):
        raise ValueError(
            f"mask has shape {tuple(mask_BN.shape)}: expected [{batch}, {negative.shape[-2]}], "
            "True where a negative is left out"
        )
