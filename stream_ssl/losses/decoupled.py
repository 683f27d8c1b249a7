"""DCL and DCLW: InfoNCE without the positive in the denominator.

Shapes: B anchors, M positives per anchor, N negatives, D dimensions.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from stream_ssl.losses.contrastive import AnchorLoss, Contrastive, FalseNegatives, Terms
from stream_ssl.losses.group import of_all


class Decoupled(Contrastive):
    """`-w s+ + logsumexp_i(s_i)`, with one logsumexp over all negatives. The loss may be negative.

    Decoupled Contrastive Learning (slides, eq. 4) has w = 1. DCLW has the von Mises-Fisher weight
    `w = 2 - e^{cos / sigma} / mean e^{cos / sigma}`, with the mean over all pairs of the batch.
    Pairs that are less similar get a larger weight. The weight carries no gradient, because its
    gradient would push apart the pairs that are closest. With M > 1 positives, the loss is the mean
    over the positives.

    Args:
        temperature: t, the divisor of the cosines.
        sigma: width of the weight of DCLW (0.5 in the paper); null selects DCL.
        false_negatives: see `Contrastive`, also for the diagnostics.

    Raises:
        ValueError: an argument is outside its range.
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
        """Return w of each pair [B, M]. The mean in w is over the pairs of all ranks."""
        assert self.sigma is not None
        group, batch = terms.inputs.group, len(terms.z_BD)
        weight_AM = von_mises_fisher_weight(of_all(terms.cosine_BM, group), self.sigma)
        return weight_AM if group is None else weight_AM[group.rank * batch :][:batch]

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, sigma={self.sigma}"


@torch.no_grad()
def von_mises_fisher_weight(cosine_BM: Tensor, sigma: float) -> Tensor:
    """Return w of each pair [B, M], see `Decoupled`."""
    # e^x / mean(e^x) is the softmax over all pairs, times their number.
    share_BM = (cosine_BM / sigma).flatten().softmax(0).view_as(cosine_BM)
    return 2 - share_BM * cosine_BM.numel()
