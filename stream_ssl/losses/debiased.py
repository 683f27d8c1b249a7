"""The negative-debiased loss, and the prior tau+ of the debiased losses.

Shapes: B anchors, M positives per anchor, N negatives, D dimensions.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from stream_ssl.losses.base import check_choice
from stream_ssl.losses.contrastive import (
    AnchorLoss,
    Contrastive,
    FalseNegatives,
    Terms,
    log_difference,
    log_mean_exp,
    minus_log_share,
)
from stream_ssl.losses.group import summed
from stream_ssl.losses.scan import count_negatives, count_same
from stream_ssl.losses.schedules import OverSteps, bounds, value_at

Floor = Literal["clamp", "biased"]
FLOORS = ("clamp", "biased")
MOST_PRIOR = 1 - 2**-24
"""The largest tau+: float32 rounds larger ones to 1."""
Prior = float | OverSteps | Literal["memory", "labels"]


class PriorCorrected(Contrastive):
    """A base for losses that use tau+ to correct for false negatives or false positives.

    tau+ is the probability that a negative shares the anchor's class. It describes the distribution
    from which the negatives are drawn. With a working memory, this is the distribution of the
    memory, not of the stream.

    Diagnostics, in addition to those of `Contrastive`: `prior` (the mean tau+ used).

    Args:
        temperature: see `Contrastive`.
        prior: tau+. A number in [0, 1), at most 1 - 2**-24; or a schedule, such as `Ramp`; or
            "memory": the value that the memory measures for each anchor (`prior_B`); or "labels",
            an oracle: each anchor's true share among the negatives (`same_BN`), kept at least
            1 / (N + 1) away from 0 and 1.
        false_negatives: see `Contrastive`.

    Raises:
        ValueError: an argument is outside its range.
    """

    def __init__(
        self,
        temperature: float = 0.5,
        prior: Prior = 0.1,
        false_negatives: str = "keep",
    ) -> None:
        super().__init__(temperature, false_negatives)
        if isinstance(prior, str):
            if prior not in ("memory", "labels"):
                raise ValueError(
                    f'prior is {prior!r}: choose a number, a schedule, "memory" or "labels"'
                )
        else:
            least, most = bounds(prior)
            if not (math.isfinite(least) and 0 <= least <= most <= MOST_PRIOR):
                raise ValueError(
                    f"prior is {prior}: tau+ is a probability in [0, 1), at most 1 - 2**-24. With "
                    "C balanced classes it is 1 / C"
                )
        self.prior = prior
        self.needs_prior = prior == "memory"
        self.needs_labels = self.needs_labels or prior == "labels"
        self._step = 0

    def begin(self, step: int) -> None:
        self._step = step

    def tau(self, terms: Terms) -> Tensor:
        """Return tau+ of each anchor [B]."""
        if self.prior == "labels":
            return true_share(terms)
        if self.prior == "memory":
            assert terms.inputs.prior_B is not None
            return terms.inputs.prior_B.to(terms.logsumexp_B)
        assert not isinstance(self.prior, str)
        return terms.logsumexp_B.new_full(terms.logsumexp_B.shape, value_at(self.prior, self._step))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, prior={self.prior!r}"


class Debiased(PriorCorrected):
    """`-log(e^{s+} / (e^{s+} + N g))` with
    `g = max((mean_i e^{s_i} - tau+ mean_j e^{s+_j}) / (1 - tau+), e^{-1/t})`.

    Mitigating Distributional Biases in Contrastive Learning, eq. 6-7; slides, eq. 11-12. All M
    positives enter g. The loss of an anchor is the mean of the formula over its positives as s+.
    With tau+ = 0 the loss is InfoNCE.

    At low temperature the estimate g is often below its floor (see the diagnostic `clamp_rate`).
    With floor "clamp", the negatives of such an anchor get no gradient. With floor "biased", such
    an anchor uses the mean of all negatives instead, as InfoNCE does (appendix B).

    Args:
        temperature: t, the divisor of the cosines.
        prior: tau+, see `PriorCorrected`.
        floor: treatment of an anchor whose estimate falls to its floor: "clamp" or "biased".
        false_negatives: see `Contrastive`, also for the diagnostics.

    Raises:
        ValueError: an argument is outside its range.
    """

    def __init__(
        self,
        temperature: float = 0.5,
        prior: Prior = 0.1,
        floor: Floor = "clamp",
        false_negatives: FalseNegatives = "keep",
    ) -> None:
        super().__init__(temperature, prior, false_negatives)
        check_choice("floor", floor, FLOORS)
        self.floor: Floor = floor

    def per_anchor(self, terms: Terms) -> AnchorLoss:
        tau_B = self.tau(terms)
        loss_B, clamped_B = negative_debiased(
            terms, self.log_mean(terms), tau_B, self.floor, self.temperature
        )
        return AnchorLoss(loss_B, clamped_B, {"prior": terms.mean(tau_B.detach())})

    def log_mean(self, terms: Terms) -> Tensor:
        """Return the logarithm of the mean of e^{s_i} [B]."""
        return terms.log_mean_B

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, floor={self.floor!r}"


def negative_debiased(
    terms: Terms, log_mean_B: Tensor, tau_B: Tensor, floor: Floor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return the loss [B], and a bool [B] that is True if the estimate fell to its floor."""
    log_false_B = tau_B.log() + log_mean_exp(terms.logit_BM).squeeze(1)
    log_g_B = log_difference(log_mean_B, log_false_B) - torch.log1p(-tau_B)
    least = -1 / temperature
    # With tau+ = 0 the loss is InfoNCE, which has no floor.
    clamped_B = (log_g_B <= least) & (tau_B > 0)
    log_g_B = (
        log_g_B.masked_fill(clamped_B, least)
        if floor == "clamp"
        else torch.where(clamped_B, log_mean_B, log_g_B)
    )
    log_rest_B = terms.count_B.log() + log_g_B
    return minus_log_share(terms.logit_BM, log_rest_B.unsqueeze(1)).mean(1), clamped_B


def true_share(terms: Terms) -> Tensor:
    """Return the share of negatives of the anchor's class [B], in [1 / (N + 1), 1 - 1 / (N + 1)].

    The share also counts negatives that an oracle leaves out of the loss.
    """
    same_BN, mask_BN = terms.inputs.same_BN, terms.inputs.mask_BN
    assert same_BN is not None
    # `same_BN` has a row for each anchor of all ranks, so the counts need as many rows.
    like_AD = terms.z_BD.detach().new_empty(len(same_BN), 0)
    count_A = count_negatives(like_AD, same_BN.shape[1], mask_BN)
    both_A2 = torch.stack([count_A, count_same(like_AD, same_BN, mask_BN)], dim=1)
    count_B, same_B = summed(both_A2, terms.inputs.group).unbind(1)
    count_B = count_B.clamp_min(1)
    least_B = 1 / (count_B + 1)
    return (same_B / count_B).clamp(least_B, 1 - least_B)
