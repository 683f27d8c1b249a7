"""Numbers that depend only on the training step, so that a resumed run repeats them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Literal


class OverSteps(ABC):
    """A number for every step of the learner; the first step is 0."""

    @abstractmethod
    def at(self, step: int) -> float:
        """Return the number at a step."""
        ...

    @abstractmethod
    def bounds(self) -> tuple[float, float]:
        """Return the smallest and the largest value of `at`, for checks before training."""


class Ramp(OverSteps):
    """A number that changes from `first` to `last` over `steps` steps and is constant otherwise.

    Args:
        last: the number after the ramp.
        steps: length of the ramp in steps, at least 1.
        first: the number before the ramp.
        begin: the step at which the ramp starts, at least 0.
        shape: "linear", or "cosine", which starts and ends slowly.

    Raises:
        ValueError: a number is not finite, or an argument is outside its range.
    """

    def __init__(
        self,
        last: float,
        steps: int,
        first: float = 0.0,
        begin: int = 0,
        shape: Literal["linear", "cosine"] = "linear",
    ) -> None:
        if not (math.isfinite(first) and math.isfinite(last)):
            raise ValueError(f"a ramp from {first} to {last}: both must be finite")
        if steps < 1 or begin < 0:
            raise ValueError(
                f"a ramp of {steps} steps from step {begin}: steps is at least 1, begin at least 0"
            )
        if shape not in ("linear", "cosine"):
            raise ValueError(f'shape is {shape!r}: choose "linear" or "cosine"')
        self.first, self.last = float(first), float(last)
        self.steps, self.begin, self.shape = steps, begin, shape

    def at(self, step: int) -> float:
        progress = min(1.0, max(0.0, (step - self.begin) / self.steps))
        if self.shape == "cosine":
            progress = (1 - math.cos(math.pi * progress)) / 2
        return self.first + (self.last - self.first) * progress

    def bounds(self) -> tuple[float, float]:
        return min(self.first, self.last), max(self.first, self.last)

    def __repr__(self) -> str:
        return f"Ramp({self.last}, {self.steps}, {self.first}, {self.begin}, {self.shape!r})"


def value_at(value: float | OverSteps, step: int) -> float:
    """Return the number, or the schedule's value at the step."""
    return value.at(step) if isinstance(value, OverSteps) else float(value)


def bounds(value: float | OverSteps) -> tuple[float, float]:
    """Return the smallest and the largest value of a number or schedule."""
    return value.bounds() if isinstance(value, OverSteps) else (float(value), float(value))
