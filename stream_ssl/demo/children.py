"""Start and stop the demo's processes, and keep their logs."""

from __future__ import annotations

import os
import subprocess
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from stream_ssl.process.failures import Failure
from stream_ssl.process.signals import PARENT

LINES = 15


class DemoProcess:
    """One process whose output goes to a file."""

    def __init__(self, name: str, command: Sequence[str], log: Path) -> None:
        self.name, self.command, self.log = name, list(command), log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, PARENT: str(os.getpid())},  # it stops if this process dies
                start_new_session=True,  # Ctrl-C reaches only this process, which stops all
            )

    @property
    def status(self) -> int | None:
        """The exit status; None while the process runs."""
        return self._process.poll()

    def check(self) -> None:
        """Raise Failure if the process has ended."""
        if self.status is not None:
            raise self.failed(f"ended with status {self.status}")

    def stop(self, seconds: float) -> None:
        """Send SIGTERM and wait for the end of the process.

        Raises:
            Failure: the process failed, or did not end within `seconds` and was killed.
        """
        if not self.end(seconds):
            raise self.failed(f"did not stop within {seconds:.0f} s of SIGTERM")
        if self.status:
            raise self.failed(f"ended with status {self.status}")

    def end(self, seconds: float = 30.0) -> bool:
        """Send SIGTERM, then SIGKILL after `seconds`; return whether SIGTERM was enough.

        Do nothing if the process has ended.
        """
        self._process.terminate()
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()  # its own children notice, and end
            self._process.wait()
            return False
        return True

    def failed(self, how: str) -> Failure:
        """Return the error, with the last lines of the log."""
        with self.log.open(errors="replace") as file:
            tail = "".join(f"  {line}" for line in deque(file, LINES))
        return Failure(f"the {self.name} {how}; its log {self.log} ends with:\n{tail}".rstrip())
