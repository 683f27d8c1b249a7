"""How many updates a received sample is worth."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, Literal


class Pace:
    """Counts samples and updates, and says whether an update is due or allowed.

    It knows no clock: a faster device changes when updates happen, never how many a sample is
    worth. Between two batches `updates == floor(target)`.

    Args:
        updates_per_sample: updates that a received sample is worth; 1 / batch size is one update a
            batch, and null the same whatever the batch size. Beyond that, updates are made on
            images of the memory.
        counts: what a sample is: each one "received", or only those that are "new", so that
            updates slow down while `Learner(novelty=...)` turns samples away.

    Raises:
        ValueError: an argument outside its range.
    """

    def __init__(
        self,
        updates_per_sample: float | None = None,
        counts: Literal["received", "new"] = "received",
    ) -> None:
        if updates_per_sample is not None and not (
            math.isfinite(updates_per_sample) and updates_per_sample > 0
        ):
            raise ValueError(
                f"updates_per_sample is {updates_per_sample}: it must be positive and finite, "
                "1 / batch size for one update a batch"
            )
        if counts not in ("received", "new"):
            raise ValueError(f'counts is {counts!r}: choose "received" or "new"')
        self.counts = counts
        # A fraction, for 0.01 added up as floats drifts off the whole numbers.
        self._worth = (
            None
            if updates_per_sample is None
            else Fraction(updates_per_sample).limit_denominator(10**9)
        )
        self._target = Fraction(0)
        self._samples = 0
        self._updates = 0

    @property
    def samples(self) -> int:
        """Samples counted."""
        return self._samples

    @property
    def updates(self) -> int:
        """Updates made."""
        return self._updates

    @property
    def target(self) -> Fraction:
        """Updates that the samples counted are worth."""
        return self._target

    def received(self, count: int) -> None:
        """A batch of `count` samples came, of those that are counted."""
        if count < 1:
            raise ValueError(f"received {count} samples: a batch has at least 1")
        self._samples += count
        self._target += 1 if self._worth is None else count * self._worth

    def updated(self) -> None:
        """An update was made."""
        self._updates += 1

    def must_update(self) -> bool:
        """True while at least one whole update is due."""
        return self._target - self._updates >= 1

    def replays(self, batch: int) -> bool:
        """Return whether a batch of this size is worth more than the one update on itself, which
        needs images to train on again."""
        return self._worth is not None and self._worth * batch > 1

    def state_dict(self) -> dict[str, int]:
        """Counts as JSON can hold them."""
        return {
            "samples": self._samples,
            "updates": self._updates,
            "target_numerator": self._target.numerator,
            "target_denominator": self._target.denominator,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from counts that `state_dict` gave."""
        self._samples = int(state["samples"])
        self._updates = int(state["updates"])
        self._target = Fraction(int(state["target_numerator"]), int(state["target_denominator"]))
