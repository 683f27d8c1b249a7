"""The number of updates for each received sample."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, Literal

FINEST = 10**9
"""The largest denominator of `updates_per_sample`. Smaller numbers would become 0."""


class Pace:
    """A counter of samples and updates that tells whether an update is due.

    The pace does not depend on time. A faster device changes when updates happen, but not how many
    updates a sample gets. Between two batches `updates == floor(target)`.

    Args:
        updates_per_sample: number of updates per received sample, at least 1e-9. 1 / batch size
            gives one update per batch; null does so for every batch size. Larger values make
            additional updates on images of the memory.
        counts: samples that count: every "received" sample, or only "new" samples, so that updates
            slow down while `Learner(novelty=...)` drops near-duplicates.

    Raises:
        ValueError: an argument is outside its range.

    Attributes:
        samples: number of samples counted.
        updates: number of updates made.
        target: number of updates due for these samples.
    """

    def __init__(
        self,
        updates_per_sample: float | None = None,
        counts: Literal["received", "new"] = "received",
    ) -> None:
        if updates_per_sample is not None and not (
            math.isfinite(updates_per_sample) and updates_per_sample >= 1 / FINEST
        ):
            raise ValueError(
                f"updates_per_sample is {updates_per_sample}: must be finite and at least "
                f"{1 / FINEST:g}; 1 / batch size makes one update per batch"
            )
        if counts not in ("received", "new"):
            raise ValueError(f'counts is {counts!r}: choose "received" or "new"')
        self.counts = counts
        # A sum of floats such as 0.01 drifts away from whole numbers; a sum of fractions does not.
        self._worth = (
            None
            if updates_per_sample is None
            else Fraction(updates_per_sample).limit_denominator(FINEST)
        )
        self.target = Fraction(0)
        self.samples = 0
        self.updates = 0

    def received(self, count: int) -> None:
        """Count a batch with `count` samples that count."""
        if count < 1:
            raise ValueError(f"received {count} samples: a batch has at least 1")
        self.samples += count
        self.target += 1 if self._worth is None else count * self._worth

    def updated(self) -> None:
        """Count one update."""
        self.updates += 1

    def must_update(self) -> bool:
        """Return whether at least one whole update is due."""
        return self.target - self.updates >= 1

    def replays(self, batch: int) -> bool:
        """Return whether a batch of this size gets more than one update.

        The further updates need images of the memory.
        """
        return self._worth is not None and self._worth * batch > 1

    def state_dict(self) -> dict[str, int]:
        """Return the counts, as values that JSON can store."""
        return {
            "samples": self.samples,
            "updates": self.updates,
            "target_numerator": self.target.numerator,
            "target_denominator": self.target.denominator,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from counts that `state_dict` returned."""
        self.samples = int(state["samples"])
        self.updates = int(state["updates"])
        self.target = Fraction(int(state["target_numerator"]), int(state["target_denominator"]))
