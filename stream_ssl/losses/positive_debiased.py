"""The positive-debiased loss.

Shapes: B anchors, M positives per anchor, N negatives, D dimensions, V = M + 1 views.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from stream_ssl.losses.base import LossInputs, check_choice
from stream_ssl.losses.contrastive import (
    AnchorLoss,
    FalseNegatives,
    Terms,
    log_difference,
    log_mean_exp,
    minus_log_share,
)
from stream_ssl.losses.debiased import FLOORS, Floor, Prior, PriorCorrected, negative_debiased
from stream_ssl.losses.negatives import sum_negatives
from stream_ssl.losses.schedules import bounds

Aggregation = Literal["pos-grouping", "loss-combination", "mixed"]


class PositiveDebiased(PriorCorrected):
    """`-log(R / (R + N P-))` with `P- = mean_i e^{s_i}`,
    `P = (sum_i e^{s_i} + e^{s+} + e^{1/t}) / (N + 2)` and
    `R = max((P - (1 - tau+) P-) / tau+, e^{-1/t})`.

    Mitigating Distributional Biases in Contrastive Learning, eq. 12-14, multiplied by tau+. The
    paper has no floor of R. The term e^{1/t} is the anchor compared with itself.

    The pair has weight 1 / (N + 2), so N must be about the size of a batch. At N = 65,536 the
    gradient is a thousandth of InfoNCE's, and the loss is log(N + 1) for every encoder.

    With M > 1 positives, `aggregation` selects one of three forms:
     - "pos-grouping": P contains the mean of e^{s+} over the positives.
     - "loss-combination" (eq. 16): the mean of the loss over all M (M + 1) ordered pairs of the
       sample's views, including the anchor. In each pair the first view is the anchor and the
       second its one positive. All pairs use the anchor's negatives. M = 1 gives both orders of the
       pair. Gradients reach the views that require them.
     - "mixed" (the authors' code): alpha x `Debiased` + (1 - alpha) x "pos-grouping".

    Args:
        temperature: t, the divisor of the cosines.
        prior: tau+ in (0, 1), see `PriorCorrected`.
        aggregation: form of the loss for several positives, see above.
        alpha: share of the negative-debiased loss in "mixed", in [0, 1].
        floor: floor of the negative-debiased loss in "mixed", see `Debiased`.
        most_negatives: largest N that the loss accepts, at least 1.
        false_negatives: see `Contrastive`, also for the diagnostics. The further value "split" is
            an oracle too: false negatives count in P, which is then a sample of all classes, but
            not in P-. Lemma 1 assumes this split, and with the split the loss reaches its limit.

    Raises:
        ValueError: an argument is outside its range; or a call has more negatives than
            `most_negatives`.
    """

    batch_sized = True
    oracles = ("keep", "exclude", "split")

    def __init__(
        self,
        temperature: float = 0.5,
        prior: Prior = 0.1,
        aggregation: Aggregation = "pos-grouping",
        alpha: float = 0.5,
        floor: Floor = "clamp",
        most_negatives: int = 2048,
        false_negatives: FalseNegatives | Literal["split"] = "keep",
    ) -> None:
        super().__init__(temperature, prior, false_negatives)
        if not isinstance(prior, str) and bounds(prior)[0] == 0:
            raise ValueError(
                f"prior is {prior}: this loss divides by tau+, so it must stay above 0. With C "
                "balanced classes it is 1 / C"
            )
        check_choice("aggregation", aggregation, ("pos-grouping", "loss-combination", "mixed"))
        if not 0 <= alpha <= 1:
            raise ValueError(f"alpha is {alpha}: it is a share, in [0, 1]")
        check_choice("floor", floor, FLOORS)
        if most_negatives < 1:
            raise ValueError(f"most_negatives is {most_negatives}: at least 1")
        self.aggregation, self.alpha = aggregation, float(alpha)
        self.floor: Floor = floor
        self.most_negatives = most_negatives

    def check_inputs(self, inputs: LossInputs) -> None:
        super().check_inputs(inputs)
        size = inputs.negative.shape[-2] * (1 if inputs.group is None else inputs.group.size)
        if size > self.most_negatives:
            raise ValueError(
                f"{size} negatives for PositiveDebiased, at most {self.most_negatives}: the pair "
                "weighs 1 / (N + 2) in it, and learning stops. Draw a batch-sized number from the "
                "memory (the method's negatives), or choose another loss"
            )

    def per_anchor(self, terms: Terms) -> AnchorLoss:
        tau_B = self.tau(terms)
        if self.aggregation == "loss-combination":
            loss_B, clamped_B = self._combined(terms, tau_B)
        else:
            loss_B, clamped_B = self._grouped(terms, tau_B)
        if self.aggregation == "mixed":
            other_B, below_B = negative_debiased(
                terms, terms.log_mean_B, tau_B, self.floor, self.temperature
            )
            loss_B = self.alpha * other_B + (1 - self.alpha) * loss_B
            clamped_B = clamped_B | below_B
        return AnchorLoss(loss_B, clamped_B, {"prior": terms.mean(tau_B.detach())})

    def _grouped(self, terms: Terms, tau_B: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss [B] with the positives' mean in P, and a bool [B]: R at its floor."""
        mean_B1 = log_mean_exp(terms.logit_BM)
        loss_B1, clamped_B1 = self._pairs(terms, tau_B, terms.z_BD, mean_B1, terms.logsumexp_B)
        return loss_B1.squeeze(1), clamped_B1.squeeze(1)

    def _combined(self, terms: Terms, tau_B: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean loss [B] over ordered pairs of views, and a bool [B]: R at its floor."""
        view_BVD = torch.cat([terms.z_BD.unsqueeze(1), terms.positive_BMD], 1)
        logit_BVV = view_BVD @ view_BVD.mT / self.temperature
        losses, clamped = [], []
        for view, anchor_BD in enumerate(view_BVD.unbind(1)):
            logsumexp_B = terms.logsumexp_B
            if view > 0:
                sums = sum_negatives(
                    anchor_BD,
                    terms.negative,
                    terms.mask_BN,
                    self.temperature,
                    terms.inputs.group,
                )
                logsumexp_B = sums.logsumexp_or_0_B
            logit_BM = torch.cat([logit_BVV[:, view, :view], logit_BVV[:, view, view + 1 :]], 1)
            loss_BM, clamped_BM = self._pairs(terms, tau_B, anchor_BD, logit_BM, logsumexp_B)
            losses.append(loss_BM)
            clamped.append(clamped_BM)
        return torch.cat(losses, 1).mean(1), torch.cat(clamped, 1).any(1)

    def _pairs(
        self,
        terms: Terms,
        tau_B: Tensor,
        anchor_BD: Tensor,
        logit_BM: Tensor,
        logsumexp_B: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return the loss of each pair [B, M], and a bool [B, M]: R fell to its floor.

        `logit_BM` and `logsumexp_B` (over the negatives) belong to `anchor_BD`.

        With S false negatives that stand only in P, the formula is
        `R tau+ (N + S + 2) = e^{s+} + e^{1/t} + sum_S e^{s_k} + c sum_N e^{s_i}` with
        `c = (tau+ (N + S + 2) - 2 - S) / N`. This form does not subtract two large sums from each
        other, and for c >= 0 it subtracts nothing.
        """
        own, count_B = 1 / self.temperature, terms.count_B
        sum_BM = torch.logaddexp(logit_BM, logit_BM.new_full((), own))
        others_B = torch.zeros_like(count_B)
        if (found := self._false_negatives(terms, anchor_BD)) is not None:
            log_others_B, others_B = found
            sum_BM = torch.logaddexp(sum_BM, log_others_B.unsqueeze(1))
        weight_B = tau_B * (count_B + others_B + 2)
        share_B = (weight_B - 2 - others_B) / count_B
        more_B1 = (share_B.clamp_min(0).log() + logsumexp_B).unsqueeze(1)
        less_B1 = ((-share_B).clamp_min(0).log() + logsumexp_B).unsqueeze(1)
        # At least one of the two is -inf, so it adds or subtracts nothing.
        sum_BM = log_difference(torch.logaddexp(sum_BM, more_B1), less_B1)
        log_r_BM = sum_BM - weight_B.log().unsqueeze(1)
        clamped_BM = log_r_BM <= -own
        log_r_BM = log_r_BM.masked_fill(clamped_BM, -own)
        return minus_log_share(log_r_BM, logsumexp_B.unsqueeze(1)), clamped_BM

    def _false_negatives(self, terms: Terms, anchor_BD: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return logsumexp and number of the false negatives [B] if they count in P, else None."""
        if self.false_negatives != "split" or terms.inputs.same_BN is None:
            return None
        other_BN = ~terms.inputs.same_BN
        if terms.inputs.mask_BN is not None:
            other_BN |= terms.inputs.mask_BN
        group = terms.inputs.group
        sums = sum_negatives(anchor_BD, terms.negative, other_BN, self.temperature, group)
        return sums.logsumexp_B, sums.count_B

    def extra_repr(self) -> str:
        mixed = f", alpha={self.alpha}" if self.aggregation == "mixed" else ""
        return f"{super().extra_repr()}, aggregation={self.aggregation!r}{mixed}"
