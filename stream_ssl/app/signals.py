"""When a process is asked to stop."""

from __future__ import annotations

import logging
import os
import queue
import signal
import threading

log = logging.getLogger(__name__)

PARENT = "STREAM_SSL_PARENT"
"""Environment: the process id of the supervisor that started this one."""

PARSED = "STREAM_SSL_PARSED"
"""Environment: the file that the supervisor's learner creates once it has parsed its settings."""

KILLED = 128
"""Exit status of a process that stands for one that signal N killed: 128 + N."""

STARTED_BY = (PARENT, "TORCHELASTIC_RUN_ID")
"""Environment of a process that our supervisor, or torchrun, asks to stop, and kills where it takes
too long."""


def stop_on_signals() -> threading.Event:
    """An event that SIGTERM, SIGINT, the end of the terminal and the supervisor's death set.

    A second signal ends the process at once, for whoever cannot wait. Not where another process
    sees to that: systemd asks each process of a service to stop, and then that one does.
    """
    stop = threading.Event()
    alone = not any(name in os.environ for name in STARTED_BY)
    came = queue.SimpleQueue[int]()
    threading.Thread(target=_obey, args=(came, stop), daemon=True).start()

    def handle(number: int, _frame: object) -> None:
        if alone and stop.is_set():
            os._exit(KILLED + number)
        came.put(number)

    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGINT, handle)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:  # nohup ignores it
        signal.signal(signal.SIGHUP, handle)
    if parent := os.environ.get(PARENT):
        threading.Thread(target=watch_parent, args=(int(parent), stop), daemon=True).start()
    return stop


def _obey(came: queue.SimpleQueue[int], stop: threading.Event) -> None:
    """Set `stop` whenever a signal came.

    The handler must not set the event itself. It runs in the main thread, perhaps in the middle of
    `stop.wait()`, which holds the event's lock. Setting it there would wait for that lock for ever.
    `SimpleQueue.put` may interrupt anything.
    """
    while True:
        came.get()
        stop.set()


def watch_parent(parent: int, stop: threading.Event) -> None:
    """Set `stop` once this is no more the parent: an orphan would hold its port and its lock
    against the supervisor's successor."""
    while not stop.wait(1.0):
        if os.getppid() != parent:
            log.warning(
                "the supervisor (process %d) is gone, so this process stops; `stream-ssl run` "
                "continues the run",
                parent,
            )
            stop.set()
