"""Self-labeling refinement: soft labels that the positive derives from its similarity to the keys.

Shapes: B anchors, M positives per anchor, N negatives, D dimensions.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from stream_ssl.losses.contrastive import AnchorLoss, Contrastive, FalseNegatives, Terms
from stream_ssl.losses.negatives import softmax_of, sum_negatives, sum_weighted
from stream_ssl.losses.schedules import OverSteps, Ramp, bounds, value_at


class SelfLabeling(Contrastive):
    """Cross-entropy with soft labels, `-sum_k y_k log softmax_k(s(x, b_k))`.

    A Theory-Driven Self-Labeling Refinement Method (poster). The keys b of an anchor are its
    positive x~ and the unmasked negatives, from the batch and the memory. The anchor's label is
    `y = (1 - alpha - beta) onehot + alpha p + beta q`. Here p is the softmax over the keys of
    `s(x~, b_k) / sharpening`, and q is the same softmax without x~ itself. No gradient flows
    through y. Keys that require a gradient get the gradient of their own logits. With alpha = beta
    = 0 the loss is InfoNCE. With M > 1 positives, the loss is the mean over the positives, each
    with its own label.

    Since y sums to 1, the loss is `logsumexp_k s_k - x . (sum_k y_k b_k) / t`. It needs M + 1
    passes over the negatives, and one more pass with mixup, but keeps no [B, N] tensor.

    With momentum mixup (`mix`) the method mixes the anchors' images:
    `x'_i = theta_i x_i + (1 - theta_i) x~_k`. The loss is then theta_i times the cross-entropy of
    x'_i as sample i, plus (1 - theta_i) times that of x'_i as sample k. Each cross-entropy uses the
    keys of its own sample. If i and k have the same keys, as in the poster, this equals the
    poster's `y'_i = theta_i y_i + (1 - theta_i) y_k`. The diagnostics describe x'_i as sample i.

    Args:
        temperature: t, the divisor of the cosines.
        alpha: weight of p, a number or a schedule.
        beta: weight of q, a number or a schedule; alpha + beta is at most 1.
        sharpening: tau' in (0, 1], a second divisor of the label's logits.
        rise: number of steps over which numbers alpha and beta rise linearly from 0; 0 for no rise.
            Schedules are not changed.
        false_negatives: see `Contrastive`, also for the diagnostics.

    Raises:
        ValueError: an argument is outside its range.
    """

    takes_mix = True

    across_ranks = False  # the labels read only the negatives of this process

    def __init__(
        self,
        temperature: float = 0.2,
        alpha: float | OverSteps = 0.2,
        beta: float | OverSteps = 0.2,
        sharpening: float = 0.8,
        rise: int = 10_000,
        false_negatives: FalseNegatives = "keep",
    ) -> None:
        super().__init__(temperature, false_negatives)
        least = min(bounds(alpha)[0], bounds(beta)[0])
        most = bounds(alpha)[1] + bounds(beta)[1]
        if not (least >= 0 and most <= 1):
            raise ValueError(
                f"alpha is {alpha} and beta {beta}: they are shares of a label, at least 0 and "
                "together at most 1"
            )
        if not (math.isfinite(sharpening) and 0 < sharpening <= 1):
            raise ValueError(
                f"sharpening is {sharpening}: it divides the label's logits, in (0, 1]"
            )
        if rise < 0:
            raise ValueError(f"rise is {rise}: a number of steps, 0 for none")
        self.alpha, self.beta = _rising(alpha, rise), _rising(beta, rise)
        self.sharpening = float(sharpening)
        self._step = 0

    def begin(self, step: int) -> None:
        self._step = step

    def per_anchor(self, terms: Terms) -> AnchorLoss:
        target_BMD = self._targets(terms)
        own_B = self._cross_entropy(terms, terms.z_BD, terms.logsumexp_B, target_BMD)
        mix = terms.inputs.mix
        if mix is None:
            return AnchorLoss(own_B)
        # Row k of keys and mask is paired with the anchor that shows sample k. Permuting the
        # anchors avoids permuting a [B, N] or [B, N, D] tensor.
        shown_BD = terms.z_BD[torch.argsort(mix.permutation_B)]
        sums = sum_negatives(shown_BD, terms.negative, terms.mask_BN, self.temperature)
        shown_B = self._cross_entropy(terms, shown_BD, sums.logsumexp_or_0_B, target_BMD)
        other_B = shown_B[mix.permutation_B]
        theta_B = mix.theta_B.to(own_B)
        return AnchorLoss(theta_B * own_B + (1 - theta_B) * other_B)

    def _cross_entropy(
        self, terms: Terms, x_BD: Tensor, logsumexp_B: Tensor, target_BMD: Tensor
    ) -> Tensor:
        """Return the cross-entropy [B] of rows x against their keys.

        `logsumexp_B` is over the negatives.
        """
        logit_BM = torch.einsum("bd,bmd->bm", x_BD, terms.positive_BMD) / self.temperature
        all_BM = torch.logaddexp(logit_BM, logsumexp_B.unsqueeze(1))
        meant_BM = torch.einsum("bd,bmd->bm", x_BD, target_BMD) / self.temperature
        return (all_BM - meant_BM).mean(1)

    def _targets(self, terms: Terms) -> Tensor:
        """Return sum_k y_k b_k for each positive's label [B, M, D]."""
        alpha, beta = value_at(self.alpha, self._step), value_at(self.beta, self._step)
        if alpha == beta == 0:
            return terms.positive_BMD
        found = []
        for positive_BD in terms.positive_BMD.unbind(1):
            own_B, others_BD = self._own_and_others(terms, positive_BD)
            own_B1 = (1 - alpha - beta + alpha * own_B).unsqueeze(1)
            found.append(own_B1 * positive_BD + (1 - own_B1) * others_BD)
        return torch.stack(found, 1)

    def _own_and_others(self, terms: Terms, positive_BD: Tensor) -> tuple[Tensor, Tensor]:
        """Return p of the positive itself [B] and the q-weighted mean of the negatives [B, D]."""
        at_label = self.temperature * self.sharpening
        label_BD, fixed = positive_BD.detach(), terms.negative.detach()
        sums = sum_negatives(label_BD, fixed, terms.mask_BN, at_label)
        own_B = torch.sigmoid((label_BD * label_BD).sum(1) / at_label - sums.logsumexp_B)
        if not terms.negative.requires_grad:
            return own_B, sums.mean_BD
        share = softmax_of(label_BD / at_label, fixed, terms.mask_BN, sums.logsumexp_B)
        return own_B, sum_weighted(terms.negative, positive_BD, share)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, alpha={self.alpha}, beta={self.beta}"


def _rising(value: float | OverSteps, rise: int) -> float | OverSteps:
    return value if isinstance(value, OverSteps) or not rise else Ramp(value, rise)
