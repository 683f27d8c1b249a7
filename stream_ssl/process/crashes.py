"""Stacks of a process that crashes natively, or that SIGUSR1 asks for them."""

from __future__ import annotations

import faulthandler
import signal

from stream_ssl.process.standard_error import STDERR


def trace_crashes() -> None:
    """Write the stacks of all threads to standard error on a native crash, and on SIGUSR1."""
    if not faulthandler.is_enabled():
        faulthandler.enable(STDERR)
        faulthandler.register(signal.SIGUSR1, STDERR)
