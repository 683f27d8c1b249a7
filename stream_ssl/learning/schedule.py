"""Learning rates for a stream without an end: a factor per step, from the step number alone."""

from __future__ import annotations

import math
from typing import Protocol


class Schedule(Protocol):
    """The factor by which the learning rate is multiplied at a step (0 is the first)."""

    def __call__(self, step: int) -> float: ...


class Constant:
    """1 at every step, after a linear rise.

    Args:
        warmup: steps of the rise.
    """

    def __init__(self, warmup: int = 0) -> None:
        self.warmup = _not_negative("warmup", warmup)

    def __call__(self, step: int) -> float:
        return _rise(step, self.warmup)


class Cosine:
    """A half cosine from 1 to `floor`, again and again (SGDR, eq. 5).

    Args:
        period: steps from 1 to the floor.
        warmup: steps of a linear rise before the first period.
        floor: where a period ends, a share of the learning rate in [0, 1].
        repeat: begin a new period where one ends, as an endless stream needs; else stay there.
    """

    def __init__(
        self, period: int, warmup: int = 0, floor: float = 0.0, repeat: bool = True
    ) -> None:
        if period < 1:
            raise ValueError(f"period is {period}: the cosine needs at least 1 step")
        if not 0 <= floor <= 1:
            raise ValueError(f"floor is {floor}: it is a share of the learning rate, in [0, 1]")
        self.period, self.floor, self.repeat = period, floor, repeat
        self.warmup = _not_negative("warmup", warmup)

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return _rise(step, self.warmup)
        phase = (step - self.warmup) / self.period
        phase = phase % 1.0 if self.repeat else min(phase, 1.0)
        return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * phase)) / 2


def _rise(step: int, warmup: int) -> float:
    # The first step already moves: (step + 1), not step.
    return min(1.0, (step + 1) / warmup) if warmup else 1.0


def _not_negative(name: str, value: int) -> int:
    if value < 0:
        raise ValueError(f"{name} is {value}: it is a number of steps, 0 or more")
    return value
