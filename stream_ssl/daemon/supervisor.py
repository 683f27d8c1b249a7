"""Start a run's processes, restart those that die, and stop them in order."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from stream_ssl.observe.catalogue import LAST_END, RESTARTS
from stream_ssl.process.failures import USAGE
from stream_ssl.process.signals import KILLED, PARENT

log = logging.getLogger("stream_ssl.supervisor")

CRASHES, CRASH_SECONDS = 3, 300.0
"""After CRASHES crashes by one signal within CRASH_SECONDS, the log says what to change."""
NATIVE = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT)
"""Signals of faults in native code. A child writes the stacks of its threads before it ends."""
NATIVE_REMEDY = (
    "native code failed, and a restart does not repair it. If bad_alloc is above, raise the limit "
    "of memory (ulimit -v). Otherwise the stacks above name the call. For the learner, try "
    "encoder.width 16 or more, learner.threads 1, learner.device cpu, or "
    "ONEDNN_MAX_CPU_ISA=AVX2 in the environment. If nothing helps, install other versions of the "
    "libraries in the stacks"
)
KILLED_REMEDY = (
    "the system kills processes like this when memory runs out (see dmesg). Lower "
    "memory.capacity, batches.batch_size or receiver.total_credit, or raise the limit of "
    "memory"
)


def signal_of(status: int) -> signal.Signals | None:
    """Return the signal that killed a process with this exit status, or that killed its child."""
    try:
        return signal.Signals(-status if status < 0 else status - KILLED)
    except ValueError:
        return None


def ending(status: int, pid: int) -> str:
    """Return a description of how a process ended, and where its stacks are."""
    number = signal_of(status)
    if number is None:
        return f"ended with status {status}"
    how = f"was killed by {number.name} (signal {number.value})"
    if number in NATIVE:
        how += (
            '; the stacks of its threads are above, after "Fatal Python error"; if the '
            f"system keeps core dumps, coredumpctl info {pid} shows the native stack"
        )
    return how


@dataclass
class BackOff:
    """The wait before the next start, in seconds.

    It doubles from `first` to `longest`, and starts again at `first` after a process has lived for
    `healthy` seconds.
    """

    first: float = 1.0
    longest: float = 30.0
    healthy: float = 60.0
    _next: float = field(default=0.0, init=False)

    def after(self, lived: float) -> float:
        """Return the seconds to wait after a process that lived for `lived` seconds."""
        fresh = self._next == 0.0 or lived >= self.healthy
        wait = self.first if fresh else self._next
        self._next = min(2 * wait, self.longest)
        return wait


@dataclass
class Child:
    """One supervised process."""

    name: str
    command: Sequence[str]
    back_off: BackOff = field(default_factory=BackOff)
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    start_at: float = 0.0
    restarts: int = 0
    last_end: str = ""
    """A few words on how the last process ended."""
    worked: bool = False
    """True once the process has lived for `back_off.healthy` seconds."""
    may_start: Callable[[], bool] = lambda: True
    """Called before each start. If it returns False, the start is tried again later."""
    crashes: deque[tuple[float, signal.Signals | None]] = field(
        default_factory=lambda: deque(maxlen=CRASHES)
    )
    """Time and signal of each of the latest crashes."""

    def start(self) -> None:
        """Start the process. It stops by itself if this process dies."""
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.DEVNULL,
            # Without this limit, glibc's arenas of each thread grow the memory over days.
            env={
                "MALLOC_ARENA_MAX": "2",
                **os.environ,
                PARENT: str(os.getpid()),
                RESTARTS: str(self.restarts),
                LAST_END: self.last_end,
            },
            start_new_session=True,  # Ctrl-C reaches only this process, which stops all in order
        )
        self.started = time.monotonic()
        log.info("%s started, pid %d", self.name, self.process.pid)


class Supervisor:
    """A supervisor that keeps processes alive.

    Args:
        commands: command lines by name, in the order of their start. They stop in reverse order.
        stop_seconds: seconds that a process may take to stop after SIGTERM before it is killed.

    Attributes:
        fault: why no process is restarted; "" if there is no such reason.
        ended: called with the name of a process that will be restarted, and how it ended.
    """

    ended: Callable[[str, str], None] = staticmethod(lambda *_: None)

    def __init__(self, commands: dict[str, Sequence[str]], stop_seconds: float = 60.0) -> None:
        self.children = [Child(name, command) for name, command in commands.items()]
        self.fault = ""
        self.stop_seconds = stop_seconds

    def run(self, stop: threading.Event, poll: float = 0.2) -> int:
        """Watch the processes until `stop` is set, and return the exit status of the whole."""
        status = 0
        try:
            while not stop.is_set():
                if any(self._tend(child) == USAGE for child in self.children):
                    status = USAGE
                    break
                stop.wait(poll)
        finally:
            stopped = self._stop_all()
        return status or stopped

    def _tend(self, child: Child) -> int | None:
        """Start the child if it is due. Return USAGE if its configuration is wrong."""
        now = time.monotonic()
        if child.process is None:
            if now >= child.start_at and child.may_start():
                try:
                    child.start()
                except OSError as error:  # no memory, no free process, an unfinished upgrade
                    self._start_later(child, now, 0.0, f"cannot be started ({error})")
            return None
        status = child.process.poll()
        if status is None:
            return None
        pid, child.process = child.process.pid, None
        if status == USAGE and not child.worked:
            self.fault = f"{child.name}: wrong configuration"
            log.error("%s (its message is above); no process is restarted", self.fault)
            return status
        # The settings worked before: a user edited them, or a file is missing. The other processes
        # go on.
        why = ", because its configuration does not work any more" if status == USAGE else ""
        lived = now - child.started
        child.worked |= lived >= child.back_off.healthy
        self._start_later(child, now, lived, f"{ending(status, pid)}{why}")
        self._log_remedy(child, now, signal_of(status))
        return None

    def _log_remedy(self, child: Child, now: float, number: signal.Signals | None) -> None:
        """Log a remedy once a child has crashed several times by the same signal."""
        child.crashes.append((now, number))
        alike = number is not None and {other for _, other in child.crashes} == {number}
        if alike and len(child.crashes) == CRASHES and now - child.crashes[0][0] <= CRASH_SECONDS:
            assert number is not None
            remedy = NATIVE_REMEDY if number in NATIVE else KILLED_REMEDY
            if number in NATIVE or number == signal.SIGKILL:
                log.error(
                    "%s was killed by %s %d times within %.0f minutes: %s",
                    *(child.name, number.name, CRASHES, CRASH_SECONDS / 60, remedy),
                )

    def _start_later(self, child: Child, now: float, lived: float, why: str) -> None:
        wait = child.back_off.after(lived)
        child.start_at = now + wait
        child.restarts += 1
        child.last_end = why.partition(";")[0]
        self.ended(child.name, child.last_end)
        log.warning("%s %s; restart in %.1f s", child.name, why, wait)

    def _stop_all(self) -> int:
        worst = 0
        for child in reversed(self.children):
            if child.process is None:
                continue
            child.process.terminate()
            log.info("stopping %s; this may take up to %.0f s", child.name, self.stop_seconds)
            try:
                status = child.process.wait(self.stop_seconds)
            except subprocess.TimeoutExpired:
                log.error(
                    "%s did not stop within %.0f s, and was killed", child.name, self.stop_seconds
                )
                child.process.kill()
                child.process.wait()
                status = 1
            log.info("%s stopped with status %d", child.name, status)
            if status == -signal.SIGTERM:
                status = 0  # it did not handle the signal yet, so there was nothing to drain
            worst = worst or (status and 1)
        return worst


def command(*arguments: str) -> list[str]:
    """Return the command line of one of this program's commands, in this interpreter.

    With `-P`, a file in the working folder (`click.py`) does not replace a library of that name.
    """
    return [sys.executable, "-P", "-m", "stream_ssl.app.cli", *arguments]


def learner_command(ranks: int, arguments: Sequence[str]) -> list[str]:
    """Return the command line of a learner with this many ranks on this host."""
    if ranks == 1:
        return command("learner", *arguments)
    return [sys.executable, "-P", "-m", "stream_ssl.daemon.launch_ranks", str(ranks), *arguments]
