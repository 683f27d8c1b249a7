"""When a process is asked to stop."""

from __future__ import annotations

import os
import signal
import threading

PARENT = "STREAM_SSL_PARENT"
"""Environment: the process id of the supervisor that started this one."""


def stop_on_signals() -> threading.Event:
    """An event that SIGTERM, SIGINT and the supervisor's death set.

    A second signal ends the process at once, for whoever cannot wait.
    """
    stop = threading.Event()

    def handle(number: int, _frame: object) -> None:
        if stop.is_set():
            os._exit(128 + number)
        stop.set()

    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGINT, handle)
    if parent := os.environ.get(PARENT):
        threading.Thread(target=watch_parent, args=(int(parent), stop), daemon=True).start()
    return stop


def watch_parent(parent: int, stop: threading.Event) -> None:
    """Set `stop` once this is no more the parent: an orphan would hold its port and its lock
    against the supervisor's successor."""
    while not stop.wait(1.0):
        if os.getppid() != parent:
            stop.set()
