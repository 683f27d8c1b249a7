"""The loss of SimSiam and BYOL, which uses no negatives.

Shapes: B anchors, M positives per anchor, N negatives, D dimensions.
"""

from __future__ import annotations

from typing import Literal

import torch

from stream_ssl.losses.base import Diagnostics, Loss, LossInputs, LossOutput, check_choice
from stream_ssl.losses.scan import promote


class NegativeCosine(Loss):
    """The mean over the positives of `-cos` (SimSiam, eq. 1) or `2 - 2 cos` (BYOL, eq. 2).

    The anchors are the predictor's unit rows. The method stops the gradient of the positives. The
    loss accepts negatives and masks but ignores them.

    Diagnostics: `positive_similarity` (mean cosine).

    Args:
        form: "simsiam" or "byol"; the gradient of "byol" is twice the gradient of "simsiam".

    Raises:
        ValueError: `form` is not one of the two.
    """

    uses_negatives = False

    def __init__(self, form: Literal["simsiam", "byol"] = "simsiam") -> None:
        super().__init__()
        check_choice("form", form, ("simsiam", "byol"))
        self.form = form

    def compute(self, inputs: LossInputs) -> LossOutput:
        z_BD = promote(inputs.z_BD)
        cosine_BM = torch.einsum("bd,bmd->bm", z_BD, inputs.positive_BMD.to(z_BD.dtype))
        cosine_B = cosine_BM.mean(1)
        loss_B = -cosine_B if self.form == "simsiam" else 2 - 2 * cosine_B
        diagnostics = Diagnostics({"positive_similarity": cosine_B.mean()})
        return LossOutput(loss_B.mean(), loss_B, diagnostics)

    def extra_repr(self) -> str:
        return f"form={self.form!r}"
