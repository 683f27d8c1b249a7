"""Stop a process on signals, and when its supervisor dies."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING

from stream_ssl.process.standard_error import PATIENCE_SECONDS, STDERR, has_room

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

TOGETHER = 0.2
"""Seconds in which several signals count as one. `timeout` signals a process, then its group."""

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
        """
        self.farewell, self.last_act = farewell, last_act
        try:
            yield
        finally:
            self.farewell = None


@contextlib.contextmanager
def interrupted_by(*numbers: signal.Signals) -> Iterator[None]:
    """Let these signals end the block as Ctrl-C does. A signal that is ignored stays ignored."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    kept = [one for one in numbers if signal.getsignal(one) != signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in kept}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def stop_on_signals() -> Stop:
    """Return an event that SIGTERM, SIGINT, SIGHUP and the supervisor's death set.

    A second signal ends the process at once. A process that a supervisor or torchrun started
    ignores the second signal: systemd signals each process of a service, and then the starter
    signals it again.
    """
    stop = Stop()
    numbers = {signal.SIGTERM, signal.SIGINT}
    if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:  # nohup sets it to be ignored
        numbers.add(signal.SIGHUP)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_obey, args=(reader, numbers, stop), daemon=True).start()
    for number in numbers:
        signal.signal(number, lambda *_: None)  # without a handler, no number
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


def _obey(reader: int, numbers: Collection[int], stop: Stop) -> None:
    """Set `stop` after each signal. A second signal ends a process that has no supervisor.

    Python runs the handlers of signals in the main thread, and not while that thread waits for the
    operating system. If a signal comes just before the main thread reads from an idle pipe, its
    handler does not run until the read ends. So Python also writes the number of each signal to a
    pipe at once, and this thread reads it.
    """
    alone, first = not any(name in os.environ for name in STARTED_BY), -math.inf
    while True:
        for number in os.read(reader, 64):
            if number not in numbers:
                continue
            if stop.is_set() and time.monotonic() - first < TOGETHER:
                continue
            if alone and stop.is_set():
                _end_at_once(number, stop)
            first = time.monotonic()
            stop.set()
            if farewell := stop.farewell:
                threading.Thread(
                    target=_exit_with_farewell, args=(farewell, stop), daemon=True
                ).start()


def _exit_with_farewell(farewell: str, stop: Stop) -> None:
    """End the process with status 0 after a last text."""
    log.info("%s", farewell)
    stop.last_act()
    os._exit(0)


def _end_at_once(number: int, stop: Stop) -> None:
    """Log the second signal, and end the process as if it did not handle this signal."""
    try:
        # The log's lock may be held by the code that hangs, so only its format is used.
        text = f"ended at once by a second signal ({signal.Signals(number).name})"
        record = log.makeRecord(log.name, logging.WARNING, __file__, 0, text, (), None)
        formats = [handler.format for handler in logging.getLogger().handlers]
        if has_room(STDERR, PATIENCE_SECONDS):
            os.write(STDERR, f"{formats[0](record) if formats else text}\n".encode())
        last = threading.Thread(target=stop.interrupted, daemon=True)  # the disk may hang
        last.start()
        last.join(LAST_SECONDS)
    finally:
        os._exit(KILLED + number)


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
