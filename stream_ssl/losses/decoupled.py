"""DCL and DCLW: the positive taken out of the denominator.

Shapes: B anchors, M positives per anchor, N negatives, D dimensions.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from stream_ssl.losses.contrastive import AnchorLoss, Contrastive, FalseNegatives, Terms
from stream_ssl.losses.group import of_all


class Decoupled(Contrastive):
    """`-w s+ + logsumexp_i(s_i)`: one logsumexp over all negatives. It may be negative.

    Decoupled Contrastive Learning (slides, eq. 4), where w = 1. DCLW has the von Mises-Fisher
    weight `w = 2 - e^{cos / sigma} / mean e^{cos / sigma}`, the mean over all pairs of the batch:
    pairs that differ more count more. The weight carries no gradient: with one, a pair nearer than
    the others would be pushed apart. With M > 1 the mean over the positives.

    Args:
        temperature: t; cosines are divided by it.
        sigma: null: DCL; a number: DCLW with this width (the paper has 0.5).
        false_negatives: see `Contrastive`, also for the diagnostics.

    Raises:
        ValueError: an argument outside its range.
    """

    def __init__(
        self,
        temperature: float = 0.2,
        sigma: float | None = None,
        false_negatives: FalseNegatives = "keep",
    ) -> None:
        super().__init__(temperature, false_negatives)
        if sigma is not None and not (math.isfinite(sigma) and sigma > 0):
            raise ValueError(
                f"sigma is {sigma}: the width of the weight is positive and finite, 0.5 in the "
                "paper; null for no weight"
            )
        self.sigma = sigma

    def per_anchor(self, terms: Terms) -> AnchorLoss:
        logit_BM = terms.logit_BM
        if self.sigma is not None:
            logit_BM = self._weight(terms) * logit_BM
        return AnchorLoss(terms.logsumexp_B - logit_BM.mean(1))

    def _weight(self, terms: Terms) -> Tensor:
        """w of each pair [B, M]; the mean is over the pairs of all ranks."""
        assert self.sigma is not None
        group, batch = terms.inputs.group, len(terms.z_BD)
        weight_AM = von_mises_fisher_weight(of_all(terms.cosine_BM, group), self.sigma)
        return weight_AM if group is None else weight_AM[group.rank * batch :][:batch]

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, sigma={self.sigma}"


@torch.no_grad()
def von_mises_fisher_weight(cosine_BM: Tensor, sigma: float) -> Tensor:
    """w of each pair [B, M]."""
    # e^x / mean(e^x) is the softmax over all pairs, times their number.
    share_BM = (cosine_BM / sigma).flatten().softmax(0).view_as(cosine_BM)
    return 2 - share_BM * cosine_BM.numel()
