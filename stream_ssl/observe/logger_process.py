"""The learner's side of a logger whose library runs in a process of its own.

Libraries of loggers start processes and threads, handle signals, and wait at the exit of their
process. In a process of its own, none of this can delay or stop the learner.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgpack

from stream_ssl.observe.logger_child import LAST
from stream_ssl.observe.loggers import ShownSlots

OPEN = 90.0
"""Seconds in which a logger must open. A busy machine needs 20 s to load a library."""
ANSWER = 30.0
"""Seconds in which a logger must take a row or a picture."""


class Deadline:
    """The latest time at which loggers may still run. There is no limit before `start`."""

    def __init__(self) -> None:
        self.at = math.inf

    def start(self) -> None:
        """Give all loggers LAST seconds from now on."""
        self.at = time.monotonic() + LAST


class LoggerProcess:
    """A process that owns a logger's library (`logger_child`). It ends with the learner.

    Args:
        name: wandb or mlflow.
        run: the folder of the run.
        config: the resolved configuration, as plain values.
        deadline: the latest time at which the process may still run.

    Raises:
        OSError: the logger could not be opened in time, or at all.
    """

    def __init__(self, name: str, run: Path, config: Mapping[str, Any], deadline: Deadline) -> None:
        self._deadline = deadline
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "stream_ssl.observe.logger_child", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,  # so that its own processes end with it
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._answers = self._process.stdin, self._process.stdout
        os.set_blocking(self._requests.fileno(), False)
        try:
            self._ask(OPEN, kind="open", run=str(run.absolute()), config=dict(config))
        except BaseException:
            self.abandon()
            raise

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Write values by name."""
        self._ask(ANSWER, kind="scalars", values=dict(values), step=step)

    def memory(self, shown: ShownSlots, step: int) -> None:
        """Write a mosaic."""
        pixels = shown.mosaic()
        message = {
            "name": "memory",
            "shape": pixels.shape,
            "pixels": pixels.tobytes(),
            "step": step,
        }
        self._ask(ANSWER, kind="picture", **message)

    def close(self) -> None:
        """Write the rest, and end the process."""
        try:
            self._ask(LAST, kind="close")
        finally:
            self.abandon()

    def abandon(self) -> None:
        """End the process at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._requests.close()
        self._answers.close()

    def _ask(self, seconds: float, **request: Any) -> None:
        """Send a request, and wait for its answer."""
        left, answer = memoryview(msgpack.packb(request)), msgpack.Unpacker()
        ends = time.monotonic() + seconds
        while (now := time.monotonic()) < (end := min(ends, self._deadline.at)):
            wait = min(0.5, end - now)  # the deadline may come nearer meanwhile
            readable, writable, _ = select.select(
                [self._answers], [self._requests] if left else [], [], wait
            )
            if writable:
                try:
                    left = left[os.write(self._requests.fileno(), left) :]
                except BrokenPipeError:
                    left = left[:0]  # the process's end is read below
            if readable:
                answer.feed(read := os.read(self._answers.fileno(), 1 << 16))
                if not read:
                    raise OSError(f"its process ended with status {self._process.wait()}")
                for failure in answer:
                    if failure:
                        raise OSError(failure)
                    return
        raise TimeoutError(f"no answer in {seconds:.0f} s to {request['kind']!r}")
