"""tau+: the probability that a negative shares the anchor's class.

It belongs to the distribution that the negatives come from: with a working memory that is the
memory, not the stream.

Shapes: B anchors, N negatives.
"""

from __future__ import annotations

import math
from typing import Literal

from torch import Tensor

from stream_ssl.losses.contrastive import Contrastive, Terms
from stream_ssl.losses.scan import count_left, counted
from stream_ssl.losses.schedules import OverSteps, at, bounds

Prior = float | OverSteps | Literal["memory", "labels"]


class Corrected(Contrastive):
    """A loss that corrects for false negatives, or false positives, by tau+.

    Diagnostics, besides those of every contrastive loss: `prior` (mean tau+ used).

    Args:
        temperature: see `Contrastive`.
        prior: tau+. A number in [0, 1); a schedule, such as `Ramp`; "memory": each anchor's own,
            which the memory measures (`prior_B`); "labels": each anchor's true share among the
            negatives (`same_BN`), an oracle, kept away from 0 and 1 by 1 / (N + 1).
        false_negatives: see `Contrastive`.

    Raises:
        ValueError: an argument outside its range.
    """

    def __init__(
        self,
        temperature: float = 0.5,
        prior: Prior = 0.1,
        false_negatives: str = "keep",
    ) -> None:
        super().__init__(temperature, false_negatives)
        if isinstance(prior, str):
            if prior not in ("memory", "labels"):
                raise ValueError(
                    f'prior is {prior!r}: choose a number, a schedule, "memory" or "labels"'
                )
        else:
            least, most = bounds(prior)
            if not (math.isfinite(least) and 0 <= least <= most < 1):
                raise ValueError(
                    f"prior is {prior}: tau+ is a probability in [0, 1). With C balanced classes "
                    "it is 1 / C"
                )
        self.prior = prior
        self.needs_prior = prior == "memory"
        self.needs_labels = self.needs_labels or prior == "labels"
        self._step = 0

    def begin(self, step: int) -> None:
        self._step = step

    def tau(self, terms: Terms) -> Tensor:
        """tau+ of each anchor [B]."""
        if self.prior == "labels":
            return _true_share(terms)
        if self.prior == "memory":
            assert terms.given.prior_B is not None
            return terms.given.prior_B.to(terms.logsumexp_B)
        assert not isinstance(self.prior, str)
        return terms.logsumexp_B.new_full(terms.logsumexp_B.shape, at(self.prior, self._step))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, prior={self.prior!r}"


def _true_share(terms: Terms) -> Tensor:
    """Of the negatives as they were handed over, also where an oracle then leaves some out."""
    same_BN, mask_BN = terms.given.same_BN, terms.given.mask_BN
    assert same_BN is not None
    count_B = counted(terms.z_BD, same_BN.shape[1], mask_BN).clamp_min(1)
    same_B = count_left(terms.z_BD, same_BN, mask_BN)
    least_B = 1 / (count_B + 1)
    return (same_B / count_B).clamp(least_B, 1 - least_B)
