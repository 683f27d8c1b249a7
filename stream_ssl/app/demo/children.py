"""The processes that the demo starts: their logs, their end."""

from __future__ import annotations

import os
import signal
import subprocess
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from stream_ssl.app.signals import PARENT

LINES = 15


class ChildFailed(RuntimeError):
    """A process of the demo ended, or did not come up; the message ends with its log's tail."""


class Child:
    """One process, with all that it prints in a file.

    Args:
        name: what a message calls it.
        command: the command line.
        log: the file.
    """

    def __init__(self, name: str, command: Sequence[str], log: Path) -> None:
        self.name, self.command, self.log = name, list(command), log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, PARENT: str(os.getpid())},  # it ends should we be killed
                start_new_session=True,  # Ctrl-C comes to us alone; we stop the others in order
            )

    @property
    def status(self) -> int | None:
        """Exit status, None while it runs."""
        return self._process.poll()

    def check(self) -> None:
        """Raises ChildFailed if it no longer runs."""
        if self.status is not None:
            raise self.failed(f"ended with status {self.status}")

    def stop(self, seconds: float) -> None:
        """SIGTERM, and wait until it has ended.

        Raises:
            ChildFailed: it did not in so many seconds, and was killed; or it failed.
        """
        if self.status is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise self.failed(f"did not stop within {seconds:.0f} s of SIGTERM") from None
        if self.status:
            raise self.failed(f"ended with status {self.status}")

    def end(self, seconds: float = 30.0) -> None:
        """SIGTERM, then SIGKILL if that is not enough; nothing if it has ended."""
        if self.status is not None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()  # what it has started itself sees that, and ends
            self._process.wait()

    def failed(self, how: str) -> ChildFailed:
        """The error, with the last lines of the log."""
        with self.log.open(errors="replace") as file:
            tail = "".join(f"  {line}" for line in deque(file, LINES))
        return ChildFailed(f"the {self.name} {how}; its log {self.log} ends with:\n{tail}".rstrip())
