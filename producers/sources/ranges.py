"""Checks of options against ranges."""

from __future__ import annotations

import math

DAY = 86_400.0
"""The longest pause that a source accepts, in seconds; clocks of sockets do not take infinity."""


def check_above_0(**values: float | None) -> None:
    """Raise ValueError if a value is 0 or less. A value may be None."""
    for what, value in values.items():
        if value is not None and not value > 0:
            raise ValueError(f"{what} {value}: must be above 0")


def check_ranges(*rules: tuple[str, float | None, float, float]) -> None:
    """Check values against ranges. A rule is (name, value, lowest, highest); a value may be None.

    Raises:
        ValueError: a value is outside its range. The message names the first such value.
    """
    for what, value, low, high in rules:
        if value is not None and not low <= value <= high:  # NaN lies in no range
            rule = f"be {low:g} or more" if high == math.inf else f"lie in [{low:g}, {high:g}]"
            raise ValueError(f"{what} {value}: must {rule}")
