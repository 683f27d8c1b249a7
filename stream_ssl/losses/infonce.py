"""InfoNCE: the biased loss that the debiased ones are measured against.

Shapes: B anchors, M positives per anchor, N negatives, D dimensions.
"""

from __future__ import annotations

from stream_ssl.losses.contrastive import (
    AnchorLoss,
    Contrastive,
    FalseNegatives,
    Terms,
    minus_log_share,
)


class InfoNCE(Contrastive):
    """`-log(e^{s+} / (e^{s+} + sum_i e^{s_i}))` with `s = z . n / temperature`.

    Mitigating Distributional Biases in Contrastive Learning, eq. 1 and 3 (multi-class N-pair).
    NT-Xent (SimCLR) is the same where every view of a batch is an anchor, its negatives are the
    2 (B - 1) views of other samples, and its own two views are masked.

    With M > 1 positives the loss of an anchor is the mean over its positives; no positive is in
    the denominator of another. See `Contrastive` for the diagnostics.

    Args:
        temperature: t; cosines are divided by it. 0.05 to 1 is usual.
        false_negatives: see `Contrastive`.

    Raises:
        ValueError: an argument outside its range.
    """

    def __init__(self, temperature: float = 0.2, false_negatives: FalseNegatives = "keep") -> None:
        super().__init__(temperature, false_negatives)

    def per_anchor(self, terms: Terms) -> AnchorLoss:
        loss_BM = minus_log_share(terms.logit_BM, terms.logsumexp_B.unsqueeze(1))
        return AnchorLoss(loss_BM.mean(1))
