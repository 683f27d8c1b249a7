"""Processes that begin where a program's imports end: forked from one that has made them.

They are processes like any other, with their own memory, signals and exit status, and SIGKILL ends
them as it ends a daemon; only the seconds that importing torch takes are spent once. What a test
says of imports, of the environment or of the interpreter needs `subprocess` instead.
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

MADE = (  # torch's compiler is what a first optimiser imports
    *("stream_ssl.app.learn", "stream_ssl.app.receive", "stream_ssl.app.commands.produce"),
    *("stream_ssl.app.commands.check", "stream_ssl.app.commands.run", "torch._dynamo"),
)
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(list(MADE))


class Forked:
    """A process that calls `main` with its arguments and exits with what that returns.

    As much of `subprocess.Popen` as tests use. What it prints goes to the end of `output`.
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
    """Beginning warm. What else multiprocessing starts, as the product has it, are whole ones."""
    if warm.PROGRAM in os.environ:
        resource_tracker.ensure_running()
        _context.set_executable(os.environ[warm.PROGRAM])
        try:
            forkserver.ensure_running()
        finally:
            _context.set_executable(sys.executable)


def run_script(script: Path, environment: dict[str, str] | None = None) -> None:
    """A main: runs a script in its folder as a reader would, who takes warnings for errors."""
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
