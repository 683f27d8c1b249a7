"""SimSiam's and BYOL's loss, which knows no negatives.

Shapes: B anchors, M positives per anchor, N negatives, D dimensions.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from stream_ssl.losses.base import Diagnostics, Loss, LossOutput, check_shapes
from stream_ssl.losses.scan import wide


class NegativeCosine(Loss):
    """The mean over the positives of `-cos` (SimSiam, eq. 1) or `2 - 2 cos` (BYOL, eq. 2).

    Anchors are the predictor's unit rows; that the positives carry no gradient is the method's
    affair. Negatives and masks are taken and not looked at.

    Diagnostics: `positive_similarity` (mean cosine).

    Args:
        form: "simsiam" or "byol"; the gradient of the second is twice that of the first.

    Raises:
        ValueError: another form.
    """

    uses_negatives = False

    def __init__(self, form: Literal["simsiam", "byol"] = "simsiam") -> None:
        super().__init__()
        if form not in ("simsiam", "byol"):
            raise ValueError(f'form is {form!r}: choose "simsiam" or "byol"')
        self.form = form

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
        with torch.autocast(z_BD.device.type, enabled=False):
            work_BD = wide(z_BD)
            cosine_BM = torch.einsum("bd,bmd->bm", work_BD, positive_BMD.to(work_BD.dtype))
            cosine_B = cosine_BM.mean(1)
            loss_B = -cosine_B if self.form == "simsiam" else 2 - 2 * cosine_B
        found = Diagnostics({"positive_similarity": cosine_B.mean()})
        return LossOutput(loss_B.mean(), loss_B, found)

    def extra_repr(self) -> str:
        return f"form={self.form!r}"
