"""The C allocator of a process that frees and allocates the same large blocks in each step."""

from __future__ import annotations

import ctypes
import os

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # numbers of the options in malloc.h
KEPT = {MMAP_THRESHOLD: 32 << 20, TRIM_THRESHOLD: 1 << 30}
"""Bytes: the largest block that is kept, as large as glibc allows, and the most that is kept."""
SET_BY_USERS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Let glibc keep freed blocks for the next step, and return whether it does.

    By default a step on a CPU returns its activations to the system, which clears the same 15,000
    pages again in the next step. Values that the user has set are kept, and other C libraries
    stay as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(name in os.environ for name in SET_BY_USERS):
        return False
    return all(mallopt(option, size) for option, size in KEPT.items())
