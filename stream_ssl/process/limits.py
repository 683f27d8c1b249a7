"""Limits that a container or a unit of systemd sets for this process, by control groups version 2.

The numbers of cores and bytes that the operating system reports are those of the machine. A process
that uses more than its own limit is slowed down, or killed when its memory is full.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

GROUPS = Path("/proc/self/cgroup")
MOUNTED = Path("/sys/fs/cgroup")


def cpu_quota() -> float:
    """Return the number of cores whose time this process may use; infinity without a limit."""
    quotas = [float("inf")]
    for text in _values("cpu.max"):
        quota, period = text.split()
        if quota != "max":
            quotas.append(int(quota) / int(period))
    return min(quotas)


def memory_limit() -> int | None:
    """Return the bytes that this process's group may use; None without a limit."""
    limits = [int(text) for text in _values("memory.max") if text != "max"]
    return min(limits, default=None)


def main_memory() -> tuple[int, str]:
    """Return the bytes that this process may use at most, and words to say who sets this limit."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = memory_limit()
    if limit is None or limit >= whole:
        return whole, "this machine has"
    return limit, "this container or unit may use"


def _values(name: str) -> Iterator[str]:
    """Yield the contents of a file of this process's group and of all groups around it."""
    try:
        lines = GROUPS.read_text().splitlines()
    except OSError:  # no Linux
        return
    own = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), None)
    if own is None:
        return
    inner = MOUNTED / own
    for folder in (inner, *inner.parents):
        if folder.is_relative_to(MOUNTED):
            try:
                yield (folder / name).read_text().strip()
            except OSError:  # the outermost group has no limits
                continue
