"""Learning rate schedules for an endless stream. The factor depends only on the step number."""

from __future__ import annotations

import math
from typing import Any, Protocol


class Schedule(Protocol):
    """A function from the step (0 is the first) to the factor of the learning rate."""

    def __call__(self, step: int) -> float:
        """Return the factor of the learning rate at a step."""
        ...


class Constant:
    """A factor of 1 at every step, after a linear rise.

    Args:
        warmup: number of steps of the rise, 0 or more.
    """

    def __init__(self, warmup: int = 0) -> None:
        self.warmup = _not_negative("warmup", warmup)

    def __call__(self, step: int) -> float:
        return _rise(step, self.warmup)


class Cosine:
    """A factor that follows half a cosine from 1 to `floor`, again and again (SGDR, eq. 5).

    Args:
        period: number of steps from 1 to the floor, at least 1.
        warmup: number of steps of a linear rise before the first period, 0 or more.
        floor: factor at the end of a period, in [0, 1].
        repeat: whether a new period starts when one ends, as an endless stream needs; else the
            factor stays at the floor.
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


SCHEDULES: dict[str, type[Schedule]] = {"constant": Constant, "cosine": Cosine}
"""Schedules by their short name."""


def factor_at(schedule: Schedule, step: int) -> float:
    """Return the factor of the learning rate at a step.

    Raises:
        ValueError: the schedule, which may be a user's, gives a value that is no finite number of 0
            or more. The value would spoil the weights.
    """
    given: Any = schedule(step)
    try:
        factor = float(given)
    except (TypeError, ValueError):
        factor = math.nan
    if not 0 <= factor < math.inf:
        raise ValueError(
            f"schedule {type(schedule).__name__} gives {given!r} at step {step}: must be a finite "
            "number, 0 or more"
        )
    return factor


def _rise(step: int, warmup: int) -> float:
    # (step + 1) gives the first step a factor above 0.
    return min(1.0, (step + 1) / warmup) if warmup else 1.0


def _not_negative(name: str, value: int) -> int:
    if value < 0:
        raise ValueError(f"{name} is {value}: it is a number of steps, 0 or more")
    return value
