"""What the losses that compare positives with negatives share.

Each is a closed form in the logits of the positives and the logsumexp over the negatives; this
base finds both, and the diagnostics.

Shapes: B anchors, M positives per anchor, N negatives, D dimensions.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from stream_ssl.losses.base import (
    Diagnostics,
    Loss,
    LossInputs,
    LossOutput,
    check_choice,
    check_temperature,
)
from stream_ssl.losses.negatives import NegativeSums, sum_negatives
from stream_ssl.losses.scan import promote

FalseNegatives = Literal["keep", "exclude"]

LINEAR_FROM = 40.0
"""softplus(x) = x above this, exactly so in float64 as well."""


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms of a loss's formula, in float32 or float64.

    An anchor without negatives has 0 for its logsumexp, so that no formula meets infinity; its
    loss is set to 0 afterwards.
    """

    inputs: LossInputs
    z_BD: Tensor
    positive_BMD: Tensor
    negative: Tensor  # [N, D] or [B, N, D], in the caller's float type
    mask_BN: Tensor | None  # what is left out, an oracle's choice included
    cosine_BM: Tensor
    logit_BM: Tensor  # s+
    logsumexp_B: Tensor  # of s_i, or of power s_i
    count_B: Tensor  # N, at least 1
    sums: NegativeSums

    @property
    def log_mean_B(self) -> Tensor:
        """log of the mean of e^{s_i}."""
        return self.logsumexp_B - self.count_B.log()

    def mean(self, value_B: Tensor) -> Tensor:
        """Mean over the anchors that have a negative; 0 where none has."""
        has_B = self.sums.count_B > 0
        kept_B = value_B.to(self.cosine_BM).where(has_B, 0.0)
        return kept_B.sum() / has_B.sum().clamp_min(1)


class AnchorLoss(NamedTuple):
    """The loss of each anchor.

    `clamped_B`: bool, True where an estimate fell to its floor; None: the loss has no floor.
    `diagnostics`: further 0-dimensional numbers for the metrics.
    """

    loss_B: Tensor
    clamped_B: Tensor | None = None
    diagnostics: dict[str, Tensor] | None = None


class Contrastive(Loss):
    """Positives against negatives at a temperature. An anchor without any negative has loss 0 and
    no gradient.

    Diagnostics: `positive_similarity` and `negative_similarity` (mean cosine), `negatives`
    (mean number counted), `effective_negatives` (exponential of the entropy of the softmax over
    the negatives, mean), `clamp_rate` (share of anchors whose estimate fell to its floor; 0 of a
    loss that has none), and `first` (share of anchors closer to their positives than to any
    negative), which the fused pass of a GPU cannot tell. Both shares, and the mean `prior` of the
    losses that have one, are of the anchors that have a negative.

    Args:
        temperature: t; cosines are divided by it. 0.05 to 1 is usual.
        false_negatives: "keep", or "exclude" for the oracle: negatives that are known by label to
            share the anchor's class are left out of the sums and of the count.

    Raises:
        ValueError: an argument outside its range.
    """

    across_ranks = True
    oracles: tuple[str, ...] = ("keep", "exclude")
    power: float = 1.0  # by which a loss multiplies s_i in its pass over the negatives
    beside: float | None = None  # by which, from there, for a second logsumexp: `sums.beside_B`

    def __init__(self, temperature: float = 0.2, false_negatives: str = "keep") -> None:
        super().__init__()
        self.temperature = check_temperature(temperature)
        check_choice("false_negatives", false_negatives, self.oracles)
        self.false_negatives: str = false_negatives
        self.needs_labels = false_negatives != "keep"

    @abstractmethod
    def per_anchor(self, terms: Terms) -> AnchorLoss:
        """The formula, for anchors that have a negative."""

    def compute(self, inputs: LossInputs) -> LossOutput:
        terms = self._terms(inputs)
        found = self.per_anchor(terms)
        loss_B = found.loss_B.masked_fill(terms.sums.count_B == 0, 0.0)
        return LossOutput(loss_B.mean(), loss_B, self._diagnostics(terms, found))

    def _terms(self, inputs: LossInputs) -> Terms:
        mask_BN = inputs.mask_BN
        if self.false_negatives != "keep" and inputs.same_BN is not None:
            mask_BN = inputs.same_BN if mask_BN is None else mask_BN | inputs.same_BN
        z_BD = promote(inputs.z_BD)
        positive_BMD = inputs.positive_BMD.to(z_BD.dtype)
        temperature = self.temperature / self.power
        sums = sum_negatives(z_BD, inputs.negative, mask_BN, temperature, inputs.group, self.beside)
        cosine_BM = torch.einsum("bd,bmd->bm", z_BD, positive_BMD)
        return Terms(
            inputs,
            z_BD,
            positive_BMD,
            inputs.negative,
            mask_BN,
            cosine_BM,
            logit_BM=cosine_BM / self.temperature,
            logsumexp_B=sums.logsumexp_or_0_B,
            count_B=sums.count_B.clamp_min(1),
            sums=sums,
        )

    @torch.no_grad()
    def _diagnostics(self, terms: Terms, found: AnchorLoss) -> Diagnostics:
        sums, cosine_BM = terms.sums, terms.cosine_BM
        total = sums.count_B.sum().clamp_min(1)
        clamped_B, zero = found.clamped_B, cosine_BM.new_zeros(())
        temperature = self.temperature / self.power
        numbers = {
            "positive_similarity": cosine_BM.mean(),
            "negative_similarity": temperature * sums.total_B.sum() / total,
            "negatives": sums.count_B.mean(),
            "effective_negatives": sums.entropy_B.exp().where(sums.count_B > 0, 0.0).mean(),
            "clamp_rate": zero if clamped_B is None else terms.mean(clamped_B),
            **(found.diagnostics or {}),
        }
        if sums.largest_B is not None:
            nearer_B = cosine_BM.amin(1) / temperature > sums.largest_B
            numbers["first"] = terms.mean(nearer_B)
        return Diagnostics(numbers)

    def extra_repr(self) -> str:
        kept = self.false_negatives == "keep"
        oracle = "" if kept else f", false_negatives={self.false_negatives!r}"
        return f"temperature={self.temperature}{oracle}"


# Sums and differences of exponentials whose exponents do not fit into a float. The gradient of a
# branch that was not taken is exactly 0, never 0 x infinity.


def log_mean_exp(logit_BM: Tensor) -> Tensor:
    """log of the mean of e^x over the last dimension, which is kept."""
    return logit_BM.logsumexp(-1, keepdim=True) - math.log(logit_BM.shape[-1])


def log_difference(larger: Tensor, smaller: Tensor) -> Tensor:
    """log(e^larger - e^smaller); -inf, and no gradient, where that is not positive."""
    gap = larger - smaller
    not_positive = gap <= 0  # False of NaN, which so reaches the caller's check
    safe = gap.masked_fill(not_positive, 1.0)
    log = larger + torch.log(-torch.expm1(-safe))
    return log.masked_fill(not_positive, -math.inf)


def minus_log_share(part: Tensor, rest: Tensor) -> Tensor:
    """-log(e^part / (e^part + e^rest)), whichever is the larger."""
    return F.softplus(rest - part, threshold=LINEAR_FROM)
