"""The error of approximate duplicate counts. Shapes: k occupied slots, N rows, A descriptor."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stream_ssl.memory.columns import Columns
from stream_ssl.memory.scores import Score

WRONG = 0.25
"""The share of slots, and the share of their counts, above which `check` reports an error."""


@dataclass(frozen=True, slots=True)
class Error:
    """The error of approximate counts against exact counts of the same rows.

    Attributes:
        mean: the mean of |approximate - exact| / exact over the sampled slots.
        worst: the largest of these values.
        bias: the mean of (approximate - exact) / exact. A common error of all slots causes no wrong
            eviction.
        wrong: the share of sampled slots that are off by more than WRONG.
        sampled: the number of sampled slots.
    """

    mean: float
    worst: float
    bias: float
    wrong: float
    sampled: int

    @classmethod
    def of(cls, count_N: Tensor, exact_N: Tensor) -> Error:
        """Return the error of these counts of slots, 0 without slots."""
        if not len(count_N):
            return cls(0.0, 0.0, 0.0, 0.0, 0)
        off_N = (count_N - exact_N) / exact_N.clamp(min=1.0)
        mean, worst = float(off_N.abs().mean()), float(off_N.abs().max())
        wrong = float((off_N.abs() > WRONG).double().mean())
        return cls(mean, worst, float(off_N.mean()), wrong, len(off_N))

    def reason(self) -> str:
        """Return why the counts are too inaccurate, or "" if they are not."""
        if self.wrong <= WRONG:
            return ""
        return (
            f"counts of {self.wrong:.0%} of {self.sampled} slots are off by more than {WRONG:.0%}, "
            f"on average by {self.mean:.3g} and at most by {self.worst:.3g} of the exact count; if "
            'this continues, for example with few slots or few duplicates, use index="exact"'
        )

    @classmethod
    def measured(
        cls, columns: Columns, score: Score, count_k: Tensor, sample: int, seed: int
    ) -> Error:
        """Count a random selection of the occupied slots exactly and compare.

        Args:
            columns: the rows.
            score: h.
            count_k: the approximate counts.
            sample: the number of slots. The cost is `sample` x K similarities.
            seed: the seed of the selection.
        """
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randperm(columns.occupied, generator=generator)[:sample].to(columns.device)
        row_NA = columns.descriptors[drawn]
        exact_N = score.total(row_NA, columns.descriptor_kA) - score.own(row_NA)
        return cls.of(count_k[drawn], exact_N)
