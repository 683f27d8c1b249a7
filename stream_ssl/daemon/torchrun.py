"""The numbers that torchrun gives to a rank, in environment variables.

WORLD_SIZE is the number of ranks of the group. A process reads the other variables only if the
group has two ranks or more, because a shell, a notebook or a container may have some of them, too.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from stream_ssl.process.failures import Misconfigured

REMEDY = (
    "start ranks with torchrun or `stream-ssl run --ranks`, and remove the variable (unset {}) "
    "for a run in one process"
)


def ranks() -> int:
    """Return the number of ranks of the group; 1 for a process without a group."""
    return max(1, _number("WORLD_SIZE", 1))


def rank() -> int:
    """Return the rank of this process, 0 for a process without a group."""
    return _number("RANK", 0) if ranks() > 1 else 0


def local_rank() -> int:
    """Return the rank of this process among those of its host."""
    return _number("LOCAL_RANK", 0) if ranks() > 1 else 0


def local_ranks() -> int:
    """Return the number of ranks of this host, 0 if it is unknown."""
    return _number("LOCAL_WORLD_SIZE", 0) if ranks() > 1 else 0


def role() -> str:
    """Return this process's role in the run's folder: "learner", "learner-1", "learner-2", ..."""
    return f"learner-{rank()}" if rank() else "learner"


def check_complete(names: Iterable[str]) -> None:
    """Raise Misconfigured if a rank lacks one of these variables, which torchrun always sets."""
    if missing := [name for name in names if not os.environ.get(name)]:
        raise Misconfigured(
            f"the environment variable WORLD_SIZE is {os.environ.get('WORLD_SIZE')!r}, and "
            f"{', '.join(missing)} are missing: " + REMEDY.format("WORLD_SIZE")
        )


def _number(name: str, default: int) -> int:
    """Return the number in a variable, or `default` if the variable is empty or missing.

    Raises:
        Misconfigured: the variable holds no whole number.
    """
    value = os.environ.get(name) or str(default)
    if not (value.isascii() and value.isdigit()):
        raise Misconfigured(
            f"the environment variable {name} is {value!r}, and must be a whole number: "
            + REMEDY.format(name)
        )
    return int(value)
