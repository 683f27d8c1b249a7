"""The console script `stream-ssl`. It imports the module of a command when that command runs."""

from __future__ import annotations

import errno
import importlib
import io
import logging
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress

from stream_ssl import __version__
from stream_ssl.app.choices import ChoiceParser
from stream_ssl.process import logs
from stream_ssl.process.crashes import trace_crashes
from stream_ssl.process.first_process import leave_first_process
from stream_ssl.process.standard_error import STDERR, lose_what_cannot_be_written

COMMANDS = {
    "demo": "run the whole system on embedded real images, and write a report",
    "init": "print a configuration to start from",
    "run": "start receiver and learner from a config file, and supervise both",
    "receiver": (
        "start only the receiver: it receives samples from producers and writes them to the journal"
    ),
    "learner": "start only the learner: it trains from the journal",
    "produce": "send a data set, a folder, videos, a camera or a synthetic stream to a receiver",
    "evaluate": "evaluate a checkpoint's encoder on a labelled set: accuracy, geometry, plots",
    "embed": "write the features of a data set, made by a run's encoder, to a file for NumPy",
    "export": (
        "write a run's encoder (safetensors, ONNX) and its memory (WebDataset) for use elsewhere"
    ),
    "search": "find the samples of a run's memory that look like a picture",
    "curate": "choose a small, diverse set of pictures from any source, without a learner",
    "keys": "make a CURVE key pair for a producer or a receiver",
    "conform": "test a producer in any language against the rules of docs/wire.md",
    "check": "validate a config file without opening a socket",
    "schema": "print a JSON Schema of the config file, for editors",
    "completion": "print a script with which bash or zsh completes commands and options",
    "status": "show the state of a running daemon: rates, lag, memory, last checkpoint",
    "watch": "show a running daemon live in a terminal: answers, speed, memory and producers",
}
DAEMONS = ("run", "receiver", "learner", "produce")
MAY_NOT_BE_FIRST = ("run", "learner")
"""Commands that continue in a child if they are process 1, such as in a container."""
NEEDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGCHLD)
"""Signals that must not stay blocked."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status: 0 done, 1 failed, 2 wrong usage, 130 Ctrl-C."""
    _open_standard_files()
    if argv is None:
        _use_utf8()
        _print_any_character()
        lose_what_cannot_be_written()
    _clean_environment()
    _restore_signals()
    trace_crashes()
    parser = _parser()
    chosen, rest = parser.parse_known_args(argv)
    if chosen.command in MAY_NOT_BE_FIRST:
        leave_first_process()
    if chosen.command in DAEMONS:  # before the command handles SIGTERM, there is nothing to drain
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    try:
        os.getcwd()  # noqa: PTH109 - only whether it exists matters
    except FileNotFoundError:
        parser.error("the working folder no longer exists: change to another folder")
    try:
        logs.configure()
        if chosen.command in DAEMONS:
            logs.report_errors()
    except ValueError as error:
        parser.error(str(error))
    return _run(chosen.command, rest)


def _parser() -> ChoiceParser:
    parser = ChoiceParser(
        prog="stream-ssl",
        description="Learn an image encoder from an endless, uncurated stream.",
        epilog=(
            "stream-ssl COMMAND --help lists a command's options. STREAM_SSL_LOG=DEBUG "
            "(INFO, WARNING, ...) sets how much is logged. STREAM_SSL_LOG_FORMAT=json "
            "logs one JSON object per line."
        ),
    )
    parser.add_argument("--version", action="version", version=f"stream-ssl {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, line in COMMANDS.items():
        commands.add_parser(name, help=line, add_help=False)
    return parser


def _run(name: str, arguments: Sequence[str]) -> int:
    """Run the command of this name and return the exit status."""
    try:
        module = importlib.import_module(f"stream_ssl.app.commands.{name}")
        status = module.main(arguments)
        sys.stdout.flush()
    except ImportError as error:
        from stream_ssl.process.failures import USAGE, missing_extra

        source = arguments[0] if name == "produce" and arguments else None
        hint = missing_extra(error, name, source)
        print(f"stream-ssl {name}: {hint}", file=sys.stderr)
        return USAGE
    except BrokenPipeError as error:
        if name in DAEMONS:
            logging.getLogger("stream_ssl").error("%s", error)
            return 1
        _drop_output()  # the program that reads it, such as `head`, has ended
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.filename is not None or error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        _drop_output()
        print(
            f"stream-ssl {name}: the output cannot be written ({error.strerror}): free "
            "space there, then repeat the command",
            file=sys.stderr,
        )
        return 1
    except RuntimeError as error:  # such as that of the thread that handles signals
        from stream_ssl.process.failures import NO_THREAD, THREAD_LIMITS

        if NO_THREAD not in str(error):
            raise
        print(f"stream-ssl {name}: {error}: raise {THREAD_LIMITS}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"stream-ssl {name}: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    assert isinstance(status, int)
    return status


def _open_standard_files() -> None:
    """Open /dev/null as each of the files 0 to 2 that the caller has closed, such as by `2>&-`.

    Otherwise the next file that is opened, such as the lock of a run, gets the free number, and
    the stacks of a crash are written into this file. Python sets `sys.stdout` or `sys.stderr` to
    None if its file is closed, and code that prints would fail.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= STDERR:
        os.set_inheritable(number, True)
    os.close(number)
    for number, name in enumerate(("stdout", "stderr"), 1):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w", closefd=False))


def _use_utf8() -> None:
    """Start this program again in Python's UTF-8 mode if the locale has another encoding.

    Libraries write files under names in UTF-8, and tables need characters that Latin-1 lacks.
    """
    if sys.getfilesystemencoding() != "utf-8" and "PYTHONUTF8" not in os.environ:
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606


def _print_any_character() -> None:
    """Make standard output accept characters that its encoding lacks (PYTHONIOENCODING=ascii).

    A "?" replaces each such character. The name of a file that is not UTF-8 keeps its bytes.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        errors = "surrogateescape" if sys.stdout.encoding.lower() == "utf-8" else "replace"
        with suppress(OSError):  # the position of some files cannot be read
            sys.stdout.reconfigure(errors=errors)


def _clean_environment() -> None:
    """Remove variables, set for other programs, that would change how our libraries work."""
    for name in ("COLUMNS", "LINES"):  # 0 if a terminal tells no size: tables would be empty
        if os.environ.get(name) == "0":
            del os.environ[name]
    # Prometheus's client would read and write our metrics in files of this folder.
    for name in ("PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir"):
        os.environ.pop(name, None)
    # Notebooks name a module of their own, without which matplotlib could not be imported.
    os.environ.pop("MPLBACKEND", None)


def _restore_signals() -> None:
    """Undo what the program that started this one did to its signals.

    While SIGCHLD is ignored, the system does not keep the status with which a child ends. Each
    child then seems to end with status 0. A blocked SIGTERM would not stop a daemon.
    """
    if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, NEEDED)


def _drop_output() -> None:
    """Discard the rest of the output, because Python flushes it once more at its exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
