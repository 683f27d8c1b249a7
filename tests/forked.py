"""Processes that are forked from a process that has already imported the program's modules.

They have their own memory, signals and exit status, and SIGKILL ends them as it ends a daemon. Only
torch's import time of several seconds is saved. Use `subprocess` for tests of imports, of the
environment or of the interpreter.

A daemon starts the receiver and the learner itself. `daemon` is a main whose roles are forked too.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import chdir
from functools import cache
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import warm

MADE = (  # the first optimiser imports torch's compiler
    *("stream_ssl.daemon.learn", "stream_ssl.daemon.receive", "stream_ssl.app.commands.produce"),
    *("stream_ssl.app.commands.check", "stream_ssl.app.commands.run", "torch._dynamo"),
    "prebuilt",
)
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(list(MADE))


class _Child:
    """A forked process, with the part of `subprocess.Popen` that both kinds of processes need."""

    args: Any
    pid: int
    _process: Any

    def _start(self) -> None:
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (status := self._process.exitcode) is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return status


class Forked(_Child):
    """A process that calls `main` with its arguments and exits with the returned status.

    It has the part of `subprocess.Popen` that tests use. Its output is appended to the file
    `output`.
    """

    def __init__(self, main: Callable[..., Any], *arguments: Any, output: Path) -> None:
        self.args = (main.__name__, *arguments)
        whole = (main, arguments, str(output), dict(os.environ), str(Path.cwd()))
        _start_server()
        self._process = _context.Process(target=_begin, args=whole)
        self._start()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@cache
def _start_server() -> None:
    """Start the fork server in a warm interpreter, in this folder, where it finds `prebuilt`.

    Other processes that multiprocessing starts use the normal interpreter, as in the product.
    """
    resource_tracker.ensure_running()
    _context.set_executable(os.environ.get(warm.PROGRAM, sys.executable))
    try:
        with chdir(Path(__file__).parent):
            forkserver.ensure_running()
    finally:
        _context.set_executable(sys.executable)


def fork_workers(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
    """Let the pool of processes of this module fork its workers, which then import nothing."""
    _start_server()
    monkeypatch.setattr(module, "get_context", lambda how: _context)


class ForkedCommand(_Child):
    """A child of this process that runs one of the program's commands.

    It has the part of `subprocess.Popen` that the supervisor and the demo use. A command line of
    another program starts that program.
    """

    def __new__(cls, words: Sequence[str], **options: Any) -> Any:
        from stream_ssl.daemon.supervisor import command

        ours = command()
        if list(words[: len(ours)]) != ours:
            return subprocess.Popen(words, **options)
        return super().__new__(cls)

    def __init__(
        self,
        words: Sequence[str],
        env: dict[str, str],
        stdout: Any = None,
        **expected: Any,
    ) -> None:
        expected.pop("stderr", None)  # goes where stdout goes
        assert expected == {"stdin": subprocess.DEVNULL, "start_new_session": True}
        from stream_ssl.daemon.supervisor import command

        sys.stdout.flush()
        output = None if stdout is None else stdout.fileno()
        whole = (list(words[len(command()) :]), env, output)
        self.args = words
        fork = multiprocessing.get_context("fork")  # this process has no threads of libraries
        self._process = fork.Process(target=_begin_command, args=whole)
        self._start()

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()


def fork_commands(*modules: ModuleType) -> None:
    """Let these modules fork the program's commands in place of starting interpreters."""
    for module in modules:
        module.subprocess = SimpleNamespace(  # type: ignore[attr-defined]
            Popen=ForkedCommand,
            DEVNULL=subprocess.DEVNULL,
            STDOUT=subprocess.STDOUT,
            TimeoutExpired=subprocess.TimeoutExpired,
        )


def daemon(arguments: Sequence[str]) -> int:
    """Run `stream-ssl` with these arguments. The roles that it starts are forked."""
    from stream_ssl.app import cli
    from stream_ssl.daemon import supervisor

    fork_commands(supervisor)
    sys.argv[:] = ["stream-ssl", *arguments]
    return cli.main(arguments)


def run_script(script: Path, environment: dict[str, str] | None = None) -> None:
    """Run a script in its folder, with warnings as errors. Use it as a `main`."""
    os.chdir(script.parent)
    os.environ.update(environment or {})
    warnings.simplefilter("error")
    runpy.run_path(str(script), run_name="__main__")


def _begin_command(
    arguments: Sequence[str], environment: dict[str, str], output: int | None
) -> None:
    from stream_ssl.app import cli

    os.setsid()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if output is not None:
        os.dup2(output, 1)
        os.dup2(output, 2)
    logging.getLogger().handlers.clear()  # the command configures its own
    os.environ.clear()
    os.environ.update(environment)
    sys.exit(cli.main(arguments))


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
