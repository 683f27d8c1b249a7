"""Interpreters that start with modules already imported, because they are forked from one process.

Importing torch and its dependencies takes ten seconds of a core. Without this module, each xdist
worker would import them, and so would each worker's fork server (tests/forked.py). `interpreter`
creates a program that replaces Python and is started with `-c`. The program sends its open files to
the process that has made the imports. That process forks, and the fork runs the code. The program
waits until the fork ends.

The process imports neither the project's modules nor the dependencies of pytest's plugins.
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
    *("torchvision.models.resnet", "torch._dynamo", "river.drift", "faiss"),
    *("matplotlib.figure", "matplotlib.backends.backend_svg", "rich.console", "jsonargparse"),
    *("docstring_parser", "jinja2", "nats"),
)
PROGRAM = "STREAM_SSL_TESTS_PYTHON"  # path of the program, in the environment of xdist's workers
FILES = 250  # the most that one message can carry


@contextmanager
def interpreter(folder: Path) -> Iterator[Path]:
    """Yield the program, created in this folder. At the end, kill all processes that it started."""
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
            stdin=subprocess.PIPE,  # closes at the latest when this process ends
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
    """Fork whenever the program is started. Return, in the forked process, the code to run."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # as during test collection
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
        for connection in running.keys() & set(ready):  # the program has ended or was killed
            process = running.pop(connection)
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            connection.close()
        if 0 in ready:
            for process in running.values():
                os.kill(process, signal.SIGKILL)
            os._exit(0)


def main() -> types.ModuleType:
    """Return a new `__main__` module, for code that follows -c."""
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
    """Take over the program's files, under their numbers, its environment and its folder."""
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, max(numbers) + 1) for file in files]
    for file in files:
        os.close(file)
    for file, wanted in zip(moved[:-1], numbers, strict=True):
        os.dup2(file, wanted, inheritable=wanted < 3)
        os.close(file)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    atexit.register(gc.unfreeze)  # without this, nanobind warns about leaked objects
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path[0] = ""
    sys.argv[:] = ["-c", *arguments]
    return code


def _ask(address: str, *arguments: str) -> None:
    """Send the program's request. The last file is the end of a pipe that nobody else holds."""
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
