"""Numbers that change over training, from the step alone, so that a resumed run repeats."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Literal


class OverSteps(ABC):
    """A number at every step of the learner; 0 is the first."""

    @abstractmethod
    def at(self, step: int) -> float: ...

    @abstractmethod
    def bounds(self) -> tuple[float, float]:
        """The least and the largest value of `at`, for checks beforehand."""


class Ramp(OverSteps):
    """From one number to another, constant before and after.

    Args:
        last: the number after the ramp.
        steps: its length.
        first: the number before it.
        begin: the step at which it leaves `first`.
        shape: "linear", or "cosine", which leaves and arrives slowly.

    Raises:
        ValueError: a number is not finite, or a step out of range.
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
    """The number itself, or what it is at the step."""
    return value.at(step) if isinstance(value, OverSteps) else float(value)


def bounds(value: float | OverSteps) -> tuple[float, float]:
    """The least and the largest value that a number or schedule has."""
    return value.bounds() if isinstance(value, OverSteps) else (float(value), float(value))
