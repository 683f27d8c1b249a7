"""Numbers that are given as arguments: errors that name the value, the rule and the remedy."""

from __future__ import annotations

import math
import operator
from typing import Any


def check_count(name: str, value: Any, least: int | None = None, what: str = "") -> int:
    """A whole number, of at least `least` where given.

    >>> check_count("n", 3, least=0)
    3
    """
    try:
        count = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        count = None
    if count is None:
        raise ValueError(f"{name} is {value!r}: must be a whole number (int)")
    if least is not None and count < least:
        raise ValueError(f"{name} is {count}: must be at least {least}{what and f' {what}'}")
    return count


def check_number(name: str, value: Any, rule: str = "a finite number") -> float:
    """A finite number; `rule` is what the error says of it."""
    try:
        if math.isfinite(value):
            return float(value)
    except (TypeError, OverflowError, RuntimeError):
        pass
    raise ValueError(f"{name} is {value!r}: must be {rule}")
