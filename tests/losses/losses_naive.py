"""Losses as loops over plain numbers, for anyone to check by eye."""

from __future__ import annotations

import math

from torch import Tensor


def infonce(
    z_BD: Tensor, positive_BMD: Tensor, negative: Tensor, mask_BN: Tensor | None, t: float
) -> list[float]:
    """InfoNCE of each anchor: -log(e^{s+} / (e^{s+} + sum_i e^{s_i})), mean over positives."""
    losses = []
    for b, z_D in enumerate(z_BD):
        negatives_ND = negative if negative.ndim == 2 else negative[b]
        total = 0.0
        for n, negative_D in enumerate(negatives_ND):
            if mask_BN is None or not mask_BN[b, n]:
                total += math.exp(float(z_D @ negative_D) / t)
        of_anchor = []
        for positive_D in positive_BMD[b]:
            top = math.exp(float(z_D @ positive_D) / t)
            of_anchor.append(-math.log(top / (top + total)))
        losses.append(sum(of_anchor) / len(of_anchor))
    return losses
