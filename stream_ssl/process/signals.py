"""Stop a process on signals, and when its supervisor dies."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stream_ssl.producers.sources import Source

log = logging.getLogger(__name__)

PARENT = "STREAM_SSL_PARENT"
"""Environment variable: the process id of the supervisor that started this process."""

SUPERVISOR = "STREAM_SSL_SUPERVISOR"
"""Environment variable: the process id of the supervisor that started torchrun for this rank."""

PARSED = "STREAM_SSL_PARSED"
"""Environment variable: the file that the learner creates once it has parsed its settings."""

KILLED = 128
"""The exit status of a process that ends because of signal N is KILLED + N."""

LAST_SECONDS = 0.5
"""Seconds for `Stop.interrupted`, before a second signal ends the process."""

STARTED_BY = (PARENT, "TORCHELASTIC_RUN_ID")
"""Environment variables of a process whose starter stops it, and kills it if it takes too long."""


class Stop(threading.Event):
    """The event that ends a process.

    Attributes:
        farewell: if this is a text, a signal logs it and ends the process at once, with status 0.
        last_act: called before that end.
        interrupted: called before a second signal ends the process at once.
    """

    farewell: str | None = None
    last_act: Callable[[], None] = staticmethod(lambda: None)
    interrupted: Callable[[], None] = staticmethod(lambda: None)

    @contextlib.contextmanager
    def at_once(self, farewell: str, last_act: Callable[[], None]) -> Iterator[None]:
        """Let a signal in the block end the process at once.

        This is for a start that may take long and has nothing to save yet. No resource is closed,
        as after a kill.

        Args:
            farewell: the text to log.
            last_act: called before the end.
        """
        self.farewell, self.last_act = farewell, last_act
        try:
            yield
        finally:
            self.farewell = None


def stop_on_signals() -> Stop:
    """Return an event that SIGTERM, SIGINT, SIGHUP and the supervisor's death set.

    A second signal ends the process at once. A process that a supervisor or torchrun started
    ignores the second signal: systemd signals each process of a service, and then the starter
    signals it again.
    """
    stop = Stop()
    alone = not any(name in os.environ for name in STARTED_BY)
    came = queue.SimpleQueue[int]()
    threading.Thread(target=_obey, args=(came, stop), daemon=True).start()

    def handle(number: int, _frame: object) -> None:
        if alone and stop.is_set():
            try:
                name = signal.Signals(
                    number
                ).name  # the log may be in use by the code that it stops
                os.write(2, f"ended at once by a second signal ({name})\n".encode())
                last = threading.Thread(target=stop.interrupted, daemon=True)  # the disk may hang
                last.start()
                last.join(LAST_SECONDS)
            finally:
                os._exit(KILLED + number)
        came.put(number)

    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGINT, handle)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:  # nohup sets it to be ignored
        signal.signal(signal.SIGHUP, handle)
    if parent := os.environ.get(PARENT):
        threading.Thread(target=watch_parent, args=(int(parent), stop), daemon=True).start()
    return stop


def stop_source_on_signals(source: Source) -> Stop:
    """Return the event of `stop_on_signals`, which also stops a source that waits for samples."""
    from stream_ssl.producers.sources.base import stop_source

    stop = stop_on_signals()

    def wait() -> None:
        stop.wait()
        stop_source(source)

    threading.Thread(target=wait, daemon=True).start()
    return stop


def _obey(came: queue.SimpleQueue[int], stop: Stop) -> None:
    """Set `stop` after each signal.

    The handler must not set the event itself. It runs in the main thread, perhaps in the middle of
    `stop.wait()`, which holds the event's lock. Setting it there would wait for that lock for ever.
    `SimpleQueue.put` may interrupt anything.
    """
    while True:
        came.get()
        stop.set()
        if farewell := stop.farewell:
            log.info("%s", farewell)
            stop.last_act()
            os._exit(0)


def watch_parent(parent: int, stop: threading.Event) -> None:
    """Set `stop` once the parent is gone.

    An orphan would keep its port and its lock, which the next supervisor's processes need.
    """
    while not stop.wait(1.0):
        if os.getppid() != parent:
            log.warning(
                "the supervisor (process %d) has ended, so this process stops; "
                "`stream-ssl run` continues the run",
                parent,
            )
            stop.set()
