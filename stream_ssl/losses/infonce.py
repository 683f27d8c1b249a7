"""InfoNCE, the biased loss. The debiased losses are compared with it.

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
    NT-Xent (SimCLR) is the same formula with every view of a batch as an anchor. The negatives of
    an NT-Xent anchor are the 2 (B - 1) views of other samples, and the anchor's own two views are
    masked.

    With M > 1 positives, the loss of an anchor is the mean over its positives. A positive never
    stands in the denominator of another positive. See `Contrastive` for the diagnostics.

    Args:
        temperature: t, the divisor of the cosines. Usual values are 0.05 to 1.
        false_negatives: see `Contrastive`.

    Raises:
        ValueError: an argument is outside its range.
    """

    def __init__(self, temperature: float = 0.2, false_negatives: FalseNegatives = "keep") -> None:
        super().__init__(temperature, false_negatives)

    def per_anchor(self, terms: Terms) -> AnchorLoss:
        loss_BM = minus_log_share(terms.logit_BM, terms.logsumexp_B.unsqueeze(1))
        return AnchorLoss(loss_BM.mean(1))
