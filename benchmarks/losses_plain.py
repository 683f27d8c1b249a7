"""The losses in their usual form: all logits at once, and autograd.

Shapes: B anchors, N negatives, D dimensions; one positive per anchor.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

T, TAU, BETA = 0.5, 0.1, 1.0
ALPHA, SHARP = 0.2, 0.8

Plain = Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor], Tensor]


def infonce(z_BD: Tensor, p_BD: Tensor, n_ND: Tensor, mask_BN: Tensor | None, _: Tensor) -> Tensor:
    """Return the InfoNCE loss, as cross-entropy."""
    own_B1, logit_BN = _logits(z_BD, p_BD, n_ND, mask_BN)
    target_B = torch.zeros(len(z_BD), dtype=torch.int64)
    return F.cross_entropy(torch.cat([own_B1, logit_BN], 1), target_B)


def decoupled(
    z_BD: Tensor, p_BD: Tensor, n_ND: Tensor, mask_BN: Tensor | None, _: Tensor
) -> Tensor:
    """Return the decoupled loss, whose denominator has no positive."""
    own_B1, logit_BN = _logits(z_BD, p_BD, n_ND, mask_BN)
    return (logit_BN.logsumexp(1) - own_B1.squeeze(1)).mean()


def debiased(z_BD: Tensor, p_BD: Tensor, n_ND: Tensor, mask_BN: Tensor | None, _: Tensor) -> Tensor:
    """Return the debiased loss for the prior TAU."""
    own_B1, logit_BN = _logits(z_BD, p_BD, n_ND, mask_BN)
    return _debiased(own_B1.squeeze(1).exp(), logit_BN.exp(), 0.0, _count(logit_BN, mask_BN))


def hard_negative(
    z_BD: Tensor, p_BD: Tensor, n_ND: Tensor, mask_BN: Tensor | None, _: Tensor
) -> Tensor:
    """Return the debiased loss with negatives weighted by their exponential to the power BETA."""
    own_B1, logit_BN = _logits(z_BD, p_BD, n_ND, mask_BN)
    return _debiased(own_B1.squeeze(1).exp(), logit_BN.exp(), BETA, _count(logit_BN, mask_BN))


def self_labeling(
    z_BD: Tensor, p_BD: Tensor, n_ND: Tensor, mask_BN: Tensor | None, _: Tensor
) -> Tensor:
    """Return the cross-entropy with refined soft labels."""
    own_B1, logit_BN = _logits(z_BD, p_BD, n_ND, mask_BN)
    with torch.no_grad():
        label_B1, label_BN = _logits(p_BD, p_BD, n_ND, mask_BN)
        every_BK = torch.cat([label_B1, label_BN], 1) / SHARP
        y_BK = ALPHA * every_BK.softmax(1)
        y_BK[:, 1:] += ALPHA * (label_BN / SHARP).softmax(1)
        y_BK[:, 0] += 1 - 2 * ALPHA
    share_BK = torch.cat([own_B1, logit_BN], 1).log_softmax(1)
    return -(y_BK * share_BK).masked_fill(y_BK == 0, 0.0).sum(1).mean()


def supervised(
    z_BD: Tensor, p_BD: Tensor, n_ND: Tensor, mask_BN: Tensor | None, same_BN: Tensor
) -> Tensor:
    """Return the supervised contrastive loss, with samples of the anchor's class as positives."""
    own_B1, logit_BN = _logits(z_BD, p_BD, n_ND, mask_BN)
    kept_BN = same_BN if mask_BN is None else same_BN & ~mask_BN
    share_BK = torch.cat([own_B1, logit_BN], 1).log_softmax(1)
    total_B = share_BK[:, 0] + share_BK[:, 1:].masked_fill(~kept_BN, 0.0).sum(1)
    return -(total_B / (1 + kept_BN.sum(1))).mean()


def _logits(
    z_BD: Tensor, p_BD: Tensor, n_ND: Tensor, mask_BN: Tensor | None
) -> tuple[Tensor, Tensor]:
    logit_BN = z_BD @ n_ND.T / T
    if mask_BN is not None:
        logit_BN = logit_BN.masked_fill(mask_BN, -math.inf)
    return (z_BD * p_BD).sum(1, keepdim=True) / T, logit_BN


def _count(logit_BN: Tensor, mask_BN: Tensor | None) -> Tensor:
    size = logit_BN.new_full((len(logit_BN),), float(logit_BN.shape[1]))
    return size if mask_BN is None else size - mask_BN.sum(1)


def _debiased(own_B: Tensor, e_BN: Tensor, beta: float, count_B: Tensor) -> Tensor:
    weight_BN = e_BN.detach() ** beta
    mean_B = (weight_BN * e_BN).sum(1) / weight_BN.sum(1) if beta else e_BN.sum(1) / count_B
    g_B = ((mean_B - TAU * own_B) / (1 - TAU)).clamp_min(math.exp(-1 / T))
    return -torch.log(own_B / (own_B + count_B * g_B)).mean()
