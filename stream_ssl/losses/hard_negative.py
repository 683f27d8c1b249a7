"""HCL: the debiased loss with larger weights for hard negatives.

Shapes: B anchors, M positives per anchor, N negatives, D dimensions.
"""

from __future__ import annotations

import math

from torch import Tensor

from stream_ssl.losses.contrastive import FalseNegatives, Terms
from stream_ssl.losses.debiased import Debiased, Floor, Prior


class HardNegative(Debiased):
    """`Debiased` with weights `w_i = e^{beta s_i} / mean_k e^{beta s_k}` in `mean_i w_i e^{s_i}`.

    Contrastive Learning with Hard Negative Samples (Robinson et al. 2021), eq. 4. The weights are
    importance weights of a sampling distribution, so they carry no gradient. In the authors' code
    the weights carry one, which multiplies the gradient of the weighted mean by about 1 + beta.
    With beta = 0 the loss is `Debiased`. The diagnostic `effective_negatives` refers to the softmax
    of (1 + beta) s, which also weights the gradient of the negatives.

    Args:
        temperature: t, the divisor of the cosines.
        prior: tau+, see `PriorCorrected`. With 0, the negatives are weighted but not debiased.
        beta: strength of the weights: 0 gives equal weights; usual values are 0.5 to 2.
        floor: see `Debiased`.
        false_negatives: see `Contrastive`, also for the diagnostics.

    Raises:
        ValueError: an argument is outside its range.
    """

    def __init__(
        self,
        temperature: float = 0.5,
        prior: Prior = 0.1,
        beta: float = 1.0,
        floor: Floor = "clamp",
        false_negatives: FalseNegatives = "keep",
    ) -> None:
        super().__init__(temperature, prior, floor, false_negatives)
        if not (math.isfinite(beta) and beta >= 0):
            raise ValueError(f"beta is {beta}: must be 0 (equal weights) or more, and finite")
        self.beta = float(beta)
        # One pass computes the logsumexp of (1 + beta) s and the logsumexp of beta s.
        self.power = 1 + self.beta
        self.beside = self.beta / self.power if self.beta else None

    def log_mean(self, terms: Terms) -> Tensor:
        """Return the logarithm of the weighted mean [B]: lse((1 + beta) s) - lse(beta s).

        The derivative of the first term by s_i is (1 + beta) p_i, where p is the softmax of
        (1 + beta) s. With constant weights the derivative must be p_i. So a share 1 / (1 + beta) of
        the first term keeps its gradient and the rest is detached.
        """
        if self.beta == 0:
            return terms.log_mean_B
        sharp_B, share = terms.logsumexp_B, 1 / self.power
        beside_B = terms.sums.beside_B
        assert beside_B is not None
        log_weights_B = beside_B.masked_fill(terms.sums.count_B == 0, 0.0)
        return sharp_B * share + (sharp_B.detach() * (1 - share) - log_weights_B)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, beta={self.beta}"
