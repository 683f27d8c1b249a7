"""Processes that are forked from a process that has already imported the program's modules.

They have their own memory, signals and exit status, and SIGKILL ends them as it ends a daemon. Only
torch's import time of several seconds is saved. Use `subprocess` for tests of imports, of the
environment or of the interpreter.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import warm

MADE = (  # the first optimiser imports torch's compiler
    *("stream_ssl.app.learn", "stream_ssl.app.receive", "stream_ssl.app.commands.produce"),
    *("stream_ssl.app.commands.check", "stream_ssl.app.commands.run", "torch._dynamo"),
)
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(list(MADE))


class Forked:
    """A process that calls `main` with its arguments and exits with the returned status.

    It has the part of `subprocess.Popen` that tests use. Its output is appended to the file
    `output`.
    """

    def __init__(self, main: Callable[..., Any], *arguments: Any, output: Path) -> None:
        self.args = (main.__name__, *arguments)
        whole = (main, arguments, str(output), dict(os.environ), str(Path.cwd()))
        _start_server()
        self._process = _context.Process(target=_begin, args=whole)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (status := self._process.exitcode) is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@cache
def _start_server() -> None:
    """Start the fork server in a warm interpreter.

    Other processes that multiprocessing starts use the normal interpreter, as in the product.
    """
    if warm.PROGRAM in os.environ:
        resource_tracker.ensure_running()
        _context.set_executable(os.environ[warm.PROGRAM])
        try:
            forkserver.ensure_running()
        finally:
            _context.set_executable(sys.executable)


def run_script(script: Path, environment: dict[str, str] | None = None) -> None:
    """Run a script in its folder, with warnings as errors. Use it as a `main`."""
    os.chdir(script.parent)
    os.environ.update(environment or {})
    warnings.simplefilter("error")
    runpy.run_path(str(script), run_name="__main__")


def _begin(
    main: Callable[..., Any],
    arguments: Sequence[Any],
    output: str,
    environment: dict[str, str],
    folder: str,
) -> None:
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.exit(main(*arguments))
