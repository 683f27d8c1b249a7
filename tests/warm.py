"""Interpreters that begin with imports made: forked from one that has made them, once for all.

torch and what comes with it take ten seconds of a core. Each of xdist's processes would take
them, and each of these again for its server of forked processes (tests/forked.py). `interpreter`
gives a program to start in the place of Python, with `-c` as they do. What it runs is forked from
the one process that imports; the program itself hands over its open files, and waits for the end.

Nothing of ours is imported there, nor what pytest's plugins are made of.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import importlib
import json
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MADE = (
    *("torchvision.models.resnet", "torch._dynamo", "kornia.augmentation", "river.drift"),
    *("matplotlib.figure", "matplotlib.backends.backend_svg", "rich.console", "jsonargparse"),
    *("jinja2", "nats"),
)
PROGRAM = "STREAM_SSL_TESTS_PYTHON"  # where the program is, in the environment of xdist's processes
FILES = 250  # as many as one message may carry


@contextmanager
def interpreter(folder: Path) -> Iterator[Path]:
    """The program, in this folder; what it has started is ended with the block."""
    address, program = folder / "forks", folder / "python"
    ours = [sys.executable, "-SE", __file__, str(address)]
    program.write_text(f'#!/bin/sh\nexec {shlex.join(ours)} "$@"\n')
    program.chmod(0o700)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(address))
        listener.listen()
        code = f"import warm; exec(warm.serve({listener.fileno()}), vars(warm.main()))"
        server = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,  # closed, at the latest, when this process ends
            cwd=Path(__file__).parent,
            pass_fds=[listener.fileno()],
        )
    try:
        yield program
    finally:
        assert server.stdin is not None
        server.stdin.close()
        server.wait()


def serve(number: int) -> str:
    """Forks whenever the program is started; returns, in the forked process, the code to run."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # as while tests are collected
        for name in MADE:
            importlib.import_module(name)
    gc.freeze()
    listener = socket.socket(fileno=number)
    running: dict[socket.socket, int] = {}
    while True:
        ready = select.select([0, listener, *running], [], [])[0]
        if listener in ready:
            connection, _ = listener.accept()
            message, files, _, _ = socket.recv_fds(connection, 1 << 20, FILES)
            while not message.endswith(b"\n"):
                message += connection.recv(1 << 20)
            if (process := os.fork()) == 0:
                for one in (listener, connection, *running):
                    one.close()
                return _become(files, **json.loads(message))
            running[connection] = process
            for file in files:
                os.close(file)
        for connection in running.keys() & set(ready):  # the program has ended, or was killed
            process = running.pop(connection)
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            connection.close()
        if 0 in ready:
            for process in running.values():
                os.kill(process, signal.SIGKILL)
            os._exit(0)


def main() -> types.ModuleType:
    """A `__main__` of its own, as code has that follows -c."""
    sys.modules["__main__"] = types.ModuleType("__main__")
    return sys.modules["__main__"]


def _become(
    files: list[int],
    numbers: list[int],
    code: str,
    arguments: list[str],
    environment: dict[str, str],
    folder: str,
) -> str:
    """Takes the program's files, by their numbers there, and all else that it was started with."""
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, max(numbers) + 1) for file in files]
    for file in files:
        os.close(file)
    for file, wanted in zip(moved[:-1], numbers, strict=True):
        os.dup2(file, wanted, inheritable=wanted < 3)
        os.close(file)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    atexit.register(gc.unfreeze)  # nanobind complains of what stays behind
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path[0] = ""
    sys.argv[:] = ["-c", *arguments]
    return code


def _ask(address: str, *arguments: str) -> None:
    """The program: the last file it sends is the end of a pipe that nobody else holds."""
    numbers = [number for path in Path("/dev/fd").iterdir() if _is_open(number := int(path.name))]
    ended, held = os.pipe()
    place = arguments.index("-c") + 1
    asked = {
        "numbers": numbers,
        "code": arguments[place],
        "arguments": arguments[place + 1 :],
        "environment": dict(os.environ),
        "folder": str(Path.cwd()),
    }
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        socket.send_fds(connection, [json.dumps(asked).encode() + b"\n"], [*numbers, held])
        for number in (*numbers, held):
            os.close(number)
        os.read(ended, 1)


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    _ask(*sys.argv[1:])
