"""What the losses that compare positives with negatives share.

Each is a closed form in the logits of the positives and the logsumexp over the negatives; this
base finds both, and the diagnostics.

Shapes: B anchors, M positives per anchor, N negatives, D dimensions.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from stream_ssl.losses.base import (
    Diagnostics,
    Loss,
    LossOutput,
    check_shapes,
    check_temperature,
)
from stream_ssl.losses.negatives import NegativeSums, sum_negatives
from stream_ssl.losses.scan import wide

FalseNegatives = Literal["keep", "exclude"]


class Given(NamedTuple):
    """The arguments of a call, see `Loss.forward`."""

    z_BD: Tensor
    positive_BMD: Tensor
    negative: Tensor
    mask_BN: Tensor | None = None
    same_BN: Tensor | None = None
    prior_B: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Terms:
    """What all losses make of a call's arguments, in the float type of the work.

    An anchor without negatives has 0 for its logsumexp, so that no formula meets infinity; its
    loss is set to 0 afterwards.
    """

    given: Given
    z_BD: Tensor
    positive_BMD: Tensor
    negative: Tensor  # [N, D] or [B, N, D], in the float type given
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


class Compared(NamedTuple):
    """`clamped_B`: bool, True where an estimate fell to its floor; None: the loss has no floor."""

    per_anchor_B: Tensor
    clamped_B: Tensor | None = None
    more: dict[str, Tensor] | None = None


class Contrastive(Loss):
    """Positives against negatives at a temperature. An anchor without any negative has loss 0 and
    no gradient.

    Diagnostics: `positive_similarity` and `negative_similarity` (mean cosine), `negatives`
    (mean number counted), `effective_negatives` (exponential of the entropy of the softmax over
    the negatives, mean), `clamp_rate` (share of anchors whose estimate fell to its floor; 0 of a
    loss that has none), and where it can be told `first` (share of anchors closer to their
    positives than to any negative).

    Args:
        temperature: t; cosines are divided by it. 0.05 to 1 is usual.
        false_negatives: "keep", or "exclude" for the oracle: negatives that are known by label to
            share the anchor's class are left out of the sums and of the count.

    Raises:
        ValueError: an argument outside its range.
    """

    oracles: tuple[str, ...] = ("keep", "exclude")
    power: float = 1.0  # by which a loss multiplies s_i in its pass over the negatives

    def __init__(self, temperature: float = 0.2, false_negatives: str = "keep") -> None:
        super().__init__()
        self.temperature = check_temperature(temperature)
        if false_negatives not in self.oracles:
            names = ", ".join(f'"{name}"' for name in self.oracles)
            raise ValueError(
                f"false_negatives is {false_negatives!r}: choose one of {names}; all but the first "
                "need labels"
            )
        self.false_negatives: str = false_negatives
        self.needs_labels = false_negatives != "keep"

    @abstractmethod
    def compare(self, terms: Terms) -> Compared:
        """The loss of each anchor that has a negative."""

    def forward(
        self,
        z_BD: Tensor,
        positive_BMD: Tensor,
        negative: Tensor,
        mask_BN: Tensor | None = None,
        *,
        same_BN: Tensor | None = None,
        prior_B: Tensor | None = None,
    ) -> LossOutput:
        given = Given(z_BD, positive_BMD, negative, mask_BN, same_BN, prior_B)
        return self.run(self.compare, given)

    def run(self, compare: Callable[[Terms], Compared], given: Given) -> LossOutput:
        """What `forward` does with what it was given; `compare` for a loss that takes more."""
        check_shapes(*given)
        self._check_needs(given)
        with torch.autocast(given.z_BD.device.type, enabled=False):
            terms = self._terms(given)
            compared = compare(terms)
            alone_B = terms.sums.count_B == 0
            per_anchor_B = compared.per_anchor_B.masked_fill(alone_B, 0.0)
            found = self._diagnostics(terms, compared)
        return LossOutput(per_anchor_B.mean(), per_anchor_B, found)

    def _check_needs(self, given: Given) -> None:
        name = type(self).__name__
        if self.needs_labels and given.same_BN is None:
            raise ValueError(
                f"{name} as configured is an oracle and needs labels, and same_BN was not given: "
                "train on a labelled stream, or choose a loss without an oracle"
            )
        if self.needs_prior and given.prior_B is None:
            raise ValueError(
                f'{name} has prior "memory", and prior_B was not given: pass each anchor\'s '
                "measured tau+ (WorkingMemory.collisions), or set the prior to a number"
            )

    def _terms(self, given: Given) -> Terms:
        mask_BN = given.mask_BN
        if self.false_negatives != "keep" and given.same_BN is not None:
            mask_BN = given.same_BN if mask_BN is None else mask_BN | given.same_BN
        z_BD = wide(given.z_BD)
        positive_BMD = given.positive_BMD.to(z_BD.dtype)
        sums = sum_negatives(z_BD, given.negative, mask_BN, self.temperature / self.power)
        cosine_BM = torch.einsum("bd,bmd->bm", z_BD, positive_BMD)
        return Terms(
            given,
            z_BD,
            positive_BMD,
            given.negative,
            mask_BN,
            cosine_BM,
            logit_BM=cosine_BM / self.temperature,
            logsumexp_B=sums.logsumexp_B.masked_fill(sums.count_B == 0, 0.0),
            count_B=sums.count_B.clamp_min(1),
            sums=sums,
        )

    @torch.no_grad()
    def _diagnostics(self, terms: Terms, compared: Compared) -> Diagnostics:
        sums, cosine_BM = terms.sums, terms.cosine_BM
        counted = sums.count_B.sum().clamp_min(1)
        clamped_B, zero = compared.clamped_B, cosine_BM.new_zeros(())
        at = self.temperature / self.power
        found = {
            "positive_similarity": cosine_BM.mean(),
            "negative_similarity": at * sums.total_B.sum() / counted,
            "negatives": sums.count_B.mean(),
            "effective_negatives": sums.entropy_B.exp().where(sums.count_B > 0, 0.0).mean(),
            "clamp_rate": zero if clamped_B is None else clamped_B.to(cosine_BM).mean(),
            **(compared.more or {}),
        }
        if sums.largest_B is not None:
            nearer_B = cosine_BM.amin(1) / at > sums.largest_B
            found["first"] = nearer_B.to(cosine_BM).mean()
        return Diagnostics(found)

    def extra_repr(self) -> str:
        kept = self.false_negatives == "keep"
        oracle = "" if kept else f", false_negatives={self.false_negatives!r}"
        return f"temperature={self.temperature}{oracle}"
