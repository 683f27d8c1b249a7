"""Settings for the threads of numeric libraries, which read them once, when they are loaded."""

from __future__ import annotations

import math
import os

from stream_ssl.process.limits import cpu_quota


def share_cores() -> None:
    """Let idle worker threads sleep. Call this before torch or numpy is imported.

    By default OpenMP's threads spin while they wait for each other. A spinning thread holds a core
    that another thread needs: beside another busy process, a parallel region of 1 ms takes 100 ms.
    OpenBLAS computes only small products here, which a second thread slows down. Threads beyond a
    container's quota would use it up early in each period, and then all wait for the next. Values
    that the user has set are kept.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if cores() < _allowed():
        os.environ.setdefault("OMP_NUM_THREADS", str(cores()))


def cores() -> int:
    """Return the number of cores that this process may use, which a container can limit."""
    return max(1, math.ceil(min(_allowed(), cpu_quota())))


def _allowed() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
