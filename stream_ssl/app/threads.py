"""Settings of the numeric libraries' threads; they are read once, when the library is loaded."""

from __future__ import annotations

import os


def share_cores() -> None:
    """Let idle worker threads sleep. Call before torch or numpy is imported.

    By default OpenMP's threads spin while they wait for each other. Beside another busy process on
    the same cores that turns a parallel region of 1 ms into one of 100: whoever spins holds the
    core that the other thread needs. OpenBLAS is asked only for small products here, which a
    second thread slows down. What the user has set is left alone.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
