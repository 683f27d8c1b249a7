"""The supervised contrastive loss, an oracle that gives an upper bound for comparisons.

Shapes: B anchors, M positives per anchor, N negatives, C of one chunk, D dimensions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stream_ssl.losses.contrastive import AnchorLoss, Contrastive, Terms
from stream_ssl.losses.negatives import sum_weighted
from stream_ssl.losses.scan import count_same, same_and_kept


class SupervisedContrastive(Contrastive):
    """`-mean_{p in P} log(e^{s_p} / sum_{a in A} e^{s_a})`, with the mean outside the logarithm.

    Supervised Contrastive Learning (Khosla et al. 2020), eq. 2. A contains the anchor's M positives
    and all negatives that are not masked. P contains the positives and those negatives of A whose
    label is the anchor's class (`same_BN`). The loss needs labels, so it is for experiments and
    cannot learn from an unlabelled stream. See `Contrastive` for the diagnostics.

    Args:
        temperature: t, the divisor of the cosines.

    Raises:
        ValueError: the temperature is not positive and finite; or, in a call, labels are missing.
    """

    across_ranks = False  # `sum_same` reads only the negatives of this process

    def __init__(self, temperature: float = 0.2) -> None:
        super().__init__(temperature)
        self.needs_labels = True

    def per_anchor(self, terms: Terms) -> AnchorLoss:
        all_B = torch.logaddexp(terms.logit_BM.logsumexp(1), terms.logsumexp_B)
        same_BD, same_B = sum_same(terms)
        total_B = terms.logit_BM.sum(1) + (terms.z_BD * same_BD).sum(1) / self.temperature
        return AnchorLoss(all_B - total_B / (terms.logit_BM.shape[1] + same_B))


def sum_same(terms: Terms) -> tuple[Tensor, Tensor]:
    """Return the sum [B, D] and the number [B] of the negatives of the anchor's class."""
    same_BN, mask_BN = terms.inputs.same_BN, terms.mask_BN
    assert same_BN is not None

    def weight(chunk: slice) -> Tensor:
        return same_and_kept(same_BN, mask_BN, chunk).to(terms.z_BD.dtype)

    sum_BD = sum_weighted(terms.negative, terms.z_BD, weight)
    return sum_BD, count_same(terms.z_BD, same_BN, mask_BN)
