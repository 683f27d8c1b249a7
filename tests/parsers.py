"""Parsers of options that are built once: to build one takes 30 times as long as to copy it."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import cache
from types import ModuleType

OF_ROLES = ("receiver_parser", "learner_parser", "run_parser")


def share(module: ModuleType, *names: str) -> None:
    """Let these functions of a module build each parser once, and return copies."""
    for name in names:
        setattr(module, name, _copies(cache(getattr(module, name))))


def _copies(build: Callable[..., object]) -> Callable[..., object]:
    return lambda *words: deepcopy(build(*words))
