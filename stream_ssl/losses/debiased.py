"""The negative-debiased loss.

Shapes: B anchors, M positives per anchor, N negatives, D dimensions.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from stream_ssl.losses.contrastive import Compared, FalseNegatives, Terms
from stream_ssl.losses.logspace import log_difference, log_mean_exp, minus_log_share
from stream_ssl.losses.prior import Corrected, Prior

Floor = Literal["clamp", "biased"]


class Debiased(Corrected):
    """`-log(e^{s+} / (e^{s+} + N g))` with
    `g = max((mean_i e^{s_i} - tau+ mean_j e^{s+_j}) / (1 - tau+), e^{-1/t})`.

    Mitigating Distributional Biases in Contrastive Learning, eq. 6-7; slides, eq. 11-12. All M
    positives enter g; the loss of an anchor is the mean over its positives in the place of s+.
    With tau+ = 0 it is InfoNCE.

    At low temperature the estimate is often below its floor (`clamp_rate`). With floor "clamp" such
    an anchor's negatives get no gradient; with "biased" it is compared with the mean of all
    negatives instead, as InfoNCE does (appendix B).

    Args:
        temperature: t; cosines are divided by it.
        prior: tau+, see `Corrected`.
        floor: what becomes of an anchor whose estimate falls to its floor: "clamp" or "biased".
        false_negatives: see `Contrastive`, also for the diagnostics.

    Raises:
        ValueError: an argument outside its range.
    """

    def __init__(
        self,
        temperature: float = 0.5,
        prior: Prior = 0.1,
        floor: Floor = "clamp",
        false_negatives: FalseNegatives = "keep",
    ) -> None:
        super().__init__(temperature, prior, false_negatives)
        if floor not in ("clamp", "biased"):
            raise ValueError(f'floor is {floor!r}: choose "clamp" or "biased"')
        self.floor: Floor = floor

    def compare(self, terms: Terms) -> Compared:
        tau_B = self.tau(terms)
        loss_B, clamped_B = negative_debiased(
            terms, self.log_mean(terms), tau_B, self.floor, self.temperature
        )
        return Compared(loss_B, clamped_B, {"prior": tau_B.mean()})

    def log_mean(self, terms: Terms) -> Tensor:
        """log of the mean of e^{s_i} [B]."""
        return terms.log_mean_B

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, floor={self.floor!r}"


def negative_debiased(
    terms: Terms, log_mean_B: Tensor, tau_B: Tensor, floor: Floor, temperature: float
) -> tuple[Tensor, Tensor]:
    """The loss [B], and where its estimate fell to its floor [B]."""
    log_false_B = tau_B.log() + log_mean_exp(terms.logit_BM).squeeze(1)
    log_g_B = log_difference(log_mean_B, log_false_B) - torch.log1p(-tau_B)
    least = -1 / temperature
    clamped_B = log_g_B <= least
    log_g_B = (
        log_g_B.masked_fill(clamped_B, least)
        if floor == "clamp"
        else torch.where(clamped_B, log_mean_B, log_g_B)
    )
    log_rest_B = terms.count_B.log() + log_g_B
    return minus_log_share(terms.logit_BM, log_rest_B.unsqueeze(1)).mean(1), clamped_B
