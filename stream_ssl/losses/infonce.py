"""InfoNCE: the biased loss that the debiased ones are measured against.

Shapes: B anchors, M positives per anchor, N negatives, D dimensions.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from stream_ssl.losses.base import Loss, LossOutput, check_shapes, check_temperature
from stream_ssl.losses.negatives import NegativeSums, sum_negatives

# softplus(x) = x beyond this, exactly so in float64 as well.
LINEAR_FROM = 40.0


class InfoNCE(Loss):
    """`-log(e^{s+} / (e^{s+} + sum_i e^{s_i}))` with `s = z . n / temperature`.

    Debiased Contrastive Learning with positives, eq. 1 and 3 (multi-class N-pair). With M > 1
    positives the loss of an anchor is the mean over its positives, none of which stands in the
    denominator of another. An anchor without any negative has loss 0 and no gradient.

    Diagnostics: `positive_similarity` and `negative_similarity` (mean cosine), `negatives`
    (mean number counted), `effective_negatives` (exponential of the entropy of the softmax over
    the negatives, mean), `first` (share of anchors closer to their positives than to any
    negative).

    Args:
        temperature: t; cosines are divided by it. 0.05 to 1 is usual.

    Raises:
        ValueError: t is not positive and finite.
    """

    def __init__(self, temperature: float = 0.2) -> None:
        super().__init__()
        self.temperature = check_temperature(temperature)

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
        check_shapes(z_BD, positive_BMD, negative, mask_BN, same_BN, prior_B)
        sums = sum_negatives(z_BD, negative, mask_BN, self.temperature)
        with torch.autocast(z_BD.device.type, enabled=False):
            work = sums.logsumexp_B.dtype
            cosine_BM = torch.einsum("bd,bmd->bm", z_BD.to(work), positive_BMD.to(work))
            logit_BM = cosine_BM / self.temperature
            # softplus(L - s+) is the loss, and does not overflow whichever is the larger.
            loss_BM = F.softplus(sums.logsumexp_B.unsqueeze(1) - logit_BM, threshold=LINEAR_FROM)
            per_anchor_B = loss_BM.mean(1)
        return LossOutput(
            loss=per_anchor_B.mean(),
            per_anchor=per_anchor_B,
            diagnostics=self._diagnostics(cosine_BM.detach(), sums),
        )

    @torch.no_grad()
    def _diagnostics(self, cosine_BM: Tensor, sums: NegativeSums) -> dict[str, float]:
        counted = sums.count_B.sum()
        found = {
            "positive_similarity": cosine_BM.mean(),
            "negative_similarity": self.temperature * sums.total_B.sum() / counted.clamp_min(1),
            "negatives": sums.count_B.mean(),
            "effective_negatives": sums.entropy_B.exp().where(sums.count_B > 0, 0.0).mean(),
            "first": (cosine_BM.amin(1) / self.temperature > sums.largest_B).to(cosine_BM).mean(),
        }
        # One transfer for all: each float() of a GPU tensor would wait for the device.
        values = torch.stack(list(found.values())).tolist()
        return dict(zip(found, values, strict=True))

    def extra_repr(self) -> str:
        return f"temperature={self.temperature}"
