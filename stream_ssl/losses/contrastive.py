"""The base class of the losses that compare positives with negatives.

Each of these losses is a closed form of the positives' logits and the logsumexp over the negatives.
The base class computes both, and the diagnostics.

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
"""Above this value softplus(x) equals x exactly, also in float64."""


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms of a loss's formula, in float32 or float64.

    An anchor without negatives has logsumexp 0, so that no formula meets infinity. Its loss is set
    to 0 afterwards.
    """

    inputs: LossInputs
    z_BD: Tensor
    positive_BMD: Tensor
    negative: Tensor  # [N, D] or [B, N, D], in the caller's float type
    mask_BN: Tensor | None  # True: left out, by the caller or by an oracle
    cosine_BM: Tensor
    logit_BM: Tensor  # s+
    logsumexp_B: Tensor  # logsumexp of s_i times `Contrastive.power`
    count_B: Tensor  # N, at least 1
    sums: NegativeSums

    @property
    def log_mean_B(self) -> Tensor:
        """The logarithm of the mean of e^{s_i}."""
        return self.logsumexp_B - self.count_B.log()

    def mean(self, value_B: Tensor) -> Tensor:
        """Return the mean over the anchors that have a negative, or 0 if no anchor has any."""
        has_B = self.sums.count_B > 0
        kept_B = value_B.to(self.cosine_BM).where(has_B, 0.0)
        return kept_B.sum() / has_B.sum().clamp_min(1)


class AnchorLoss(NamedTuple):
    """The loss of each anchor.

    Attributes:
        loss_B: the losses.
        clamped_B: bool, True if an estimate fell to its floor; None for a loss without a floor.
        diagnostics: more 0-dimensional numbers for the metrics.
    """

    loss_B: Tensor
    clamped_B: Tensor | None = None
    diagnostics: dict[str, Tensor] | None = None


class Contrastive(Loss):
    """A loss that compares positives with negatives at a temperature.

    An anchor without negatives has loss 0 and no gradient.

    Diagnostics:
     - `positive_similarity` and `negative_similarity`: mean cosines.
     - `negatives`: mean number of unmasked negatives.
     - `effective_negatives`: mean exponential of the entropy of the softmax over the negatives.
     - `clamp_rate`: share of anchors whose estimate fell to its floor; 0 for a loss without a
       floor.
     - `first`: share of anchors that are closer to their positives than to any negative. The fused
       pass on a GPU does not provide it.

    `clamp_rate`, `first` and the mean `prior` of the losses with a prior refer only to anchors that
    have a negative.

    Args:
        temperature: t, the divisor of the cosines. Usual values are 0.05 to 1.
        false_negatives: "keep"; or "exclude", an oracle that leaves out negatives whose label is
            the anchor's class, both of the sums and of the count.

    Raises:
        ValueError: an argument is outside its range.
    """

    across_ranks = True
    oracles: tuple[str, ...] = ("keep", "exclude")
    power: float = 1.0  # factor of s_i in the pass over the negatives
    beside: float | None = None  # factor on top of `power` for a second logsumexp, `sums.beside_B`

    def __init__(self, temperature: float = 0.2, false_negatives: str = "keep") -> None:
        super().__init__()
        self.temperature = check_temperature(temperature)
        check_choice("false_negatives", false_negatives, self.oracles)
        self.false_negatives: str = false_negatives
        self.needs_labels = false_negatives != "keep"

    @abstractmethod
    def per_anchor(self, terms: Terms) -> AnchorLoss:
        """Return the loss by the formula; anchors without negatives are set to 0 afterwards."""

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


# The functions below work with logarithms, because the exponentials would overflow a float. The
# gradient of a branch that was not taken is exactly 0, never 0 x infinity.


def log_mean_exp(logit_BM: Tensor) -> Tensor:
    """Return the logarithm of the mean of e^x over the last dimension, which is kept."""
    return logit_BM.logsumexp(-1, keepdim=True) - math.log(logit_BM.shape[-1])


def log_difference(larger: Tensor, smaller: Tensor) -> Tensor:
    """Return log(e^larger - e^smaller); -inf without gradient if the difference is not positive."""
    gap = larger - smaller
    not_positive = gap <= 0  # False for NaN, so that a NaN reaches the caller's check
    safe = gap.masked_fill(not_positive, 1.0)
    log = larger + torch.log(-torch.expm1(-safe))
    return log.masked_fill(not_positive, -math.inf)


def minus_log_share(part: Tensor, rest: Tensor) -> Tensor:
    """Return -log(e^part / (e^part + e^rest)), accurate for any order of the two."""
    return F.softplus(rest - part, threshold=LINEAR_FROM)
