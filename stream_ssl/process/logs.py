"""Logging of the commands: lines for people, JSON objects for other tools, errors for Sentry."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from stream_ssl import __version__
from stream_ssl.process import standard_error
from stream_ssl.rate_limited_logger import LineLimit

if TYPE_CHECKING:
    from stream_ssl.learning.records import StepRecord

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
FORMATS = ("text", "json")
log = logging.getLogger(__name__)
_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def configure(environment: Mapping[str, str] = os.environ) -> None:
    """Log to standard error, from level STREAM_SSL_LOG on, in the form STREAM_SSL_LOG_FORMAT.

    An empty variable counts as absent, because Docker Compose sets variables to empty text. With
    several ranks, each line has the rank that torchrun gave this process.

    Raises:
        ValueError: a variable has an unknown value.
    """
    level = (environment.get("STREAM_SSL_LOG") or "INFO").upper()
    if level not in LEVELS:
        raise ValueError(f"STREAM_SSL_LOG is {level.lower()!r}: choose one of {', '.join(LEVELS)}")
    form = (environment.get("STREAM_SSL_LOG_FORMAT") or "text").lower()
    if form not in FORMATS:
        raise ValueError(f"STREAM_SSL_LOG_FORMAT is {form!r}: choose one of {', '.join(FORMATS)}")
    handler = logging.StreamHandler(sys.stderr)
    alone = (environment.get("WORLD_SIZE") or "1") == "1"
    rank = None if alone else environment.get("RANK") or None
    handler.addFilter(LibraryLimit())
    handler.addFilter(tell_of_lost_lines)
    handler.setFormatter(JsonLines(rank) if form == "json" else Lines(rank))
    logging.basicConfig(level=level, handlers=[handler])
    if form == "json":
        _log_all_text()
    # These libraries log every attempt to reach a server and every rewrite of a model. Some also
    # log where credentials lie, and signed URLs.
    quiet = ("faiss", "onnx_ir", "onnxscript", "aiobotocore", "botocore", "httpcore", "hpack")
    for library in quiet:
        logging.getLogger(library).setLevel(logging.WARNING)


def _log_all_text() -> None:
    """Log Python's warnings and uncaught exceptions as JSON, so that programs can parse the log.

    Python writes them as plain text otherwise.
    """
    logging.captureWarnings(True)
    sys.excepthook = lambda *error: log.critical("stopped by an uncaught error", exc_info=error)
    threading.excepthook = _log_end_of_thread


def _log_end_of_thread(ended: threading.ExceptHookArgs) -> None:
    if ended.exc_value is not None and not isinstance(ended.exc_value, SystemExit):
        name = ended.thread.name if ended.thread is not None else "unknown"
        error = (ended.exc_type, ended.exc_value, ended.exc_traceback)
        log.error("the thread %s was ended by an uncaught error", name, exc_info=error)


def report_errors(environment: Mapping[str, str] = os.environ) -> None:
    """Send log records from level ERROR on, and uncaught exceptions, if SENTRY_DSN is set.

    Sentry's other variables apply too, such as SENTRY_ENVIRONMENT. The values of local variables
    are not sent, because they contain samples. The command line is not sent, because a camera's URL
    may contain a password. A server that does not answer holds nothing up.

    Raises:
        ValueError: SENTRY_DSN is not the address of a project.
    """
    address = environment.get("SENTRY_DSN")
    if not address:
        return
    try:
        import sentry_sdk
        from sentry_sdk.integrations.argv import ArgvIntegration
    except ModuleNotFoundError:
        log.warning(
            "SENTRY_DSN is set and sentry-sdk is not installed, so errors are only logged: "
            "pip install 'stream-ssl[sentry]'"
        )
        return
    try:
        sentry_sdk.init(
            address,
            release=f"stream-ssl@{__version__}",
            auto_enabling_integrations=False,
            disabled_integrations=[ArgvIntegration()],
            include_local_variables=False,
            max_breadcrumbs=20,
        )
    except sentry_sdk.utils.BadDsn as error:
        raise ValueError(f"SENTRY_DSN is not the address of a Sentry project: {error}") from error


def tell_of_lost_lines(record: logging.LogRecord) -> bool:
    """Let a line say how many lines before it were lost because nobody read the log."""
    if lost := standard_error.lost():
        record.msg = f"{record.msg} (before this line, {lost} were lost: nobody read the log)"
    return True


class LibraryLimit(logging.Filter):
    """A filter that limits the lines of libraries, because peers can cause a library to log often.

    Args:
        lines: most lines of one kind within a window. A kind is a logger, a level and the beginning
            of the text before its arguments are filled in.
        seconds: length of a window.
    """

    OURS = ("stream_ssl", "__main__")
    KINDS = 256

    def __init__(
        self,
        lines: int = 3,
        seconds: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._limit = LineLimit(lines, seconds, clock, self.KINDS)

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log the record. The first of a window says how many were left out."""
        if record.name.partition(".")[0] in self.OURS:
            return True
        more = self._limit.admit((record.name, record.levelno, str(record.msg)[:32]))
        if more:
            record.msg = f"{record.msg}{more}"
        return more is not None


class Lines(logging.Formatter):
    """A formatter of lines: `2026-11-22T21:49:35.123+01:00 INFO    stream_ssl.learner: ...`.

    Times are local.

    Args:
        rank: rank of this process; None: the only process.
    """

    MOST = 1 << 15  # characters of a line, traceback included

    def __init__(self, rank: str | None = None) -> None:
        self._rank = int(rank) if rank is not None and rank.isdecimal() else None
        whose = "" if self._rank is None else f"rank {self._rank} "
        super().__init__(f"%(asctime)s %(levelname)-7s {whose}%(name)s: %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: ARG002
        """Return the time with the zone's offset, because a run's machines may differ in zone."""
        return (
            datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds")
        )

    def format(self, record: logging.LogRecord) -> str:
        """Return the text without control characters, which act on a terminal, cut after MOST."""
        text = super().format(record)
        cut = text[: self.MOST] + ("..." if len(text) > self.MOST else "")
        return "".join(one if one.isprintable() or one in "\n\t" else "?" for one in cut)


class JsonLines(Lines):
    """A formatter of JSON objects, one a line.

    An object has time, level, logger and message, an error's traceback as `exception`, and the
    fields of `extra`.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return one line, whatever the message contains."""
        fields: dict[str, Any] = {
            "time": self.formatTime(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "pid": record.process,
        }
        if self._rank is not None:
            fields["rank"] = self._rank
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        fields |= {name: value for name, value in vars(record).items() if name not in _OWN}
        try:
            return json.dumps(fields, default=str, allow_nan=False)
        except (TypeError, ValueError):  # such as NaN or a key of two parts, which JSON lacks
            kept = (str, int)
            texts = {
                name: one if isinstance(one, kept) else str(one) for name, one in fields.items()
            }
            return json.dumps(texts)


class StepLog:
    """A log line of training progress every `every` seconds; none while no updates are made.

    Args:
        every: seconds between two lines.
    """

    def __init__(
        self,
        log: logging.Logger,
        every: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log, self._every, self._clock = log, every, clock
        self._at, self._updates, self._samples = clock(), 0, 0

    def consume(self, record: StepRecord) -> None:
        """Consume one step."""
        self._updates += record.skipped is None
        self._samples += 0 if record.replay else record.batch + record.near_duplicates
        seconds = self._clock() - self._at
        if seconds < self._every or record.skipped is not None:
            return
        values = {
            "step": record.step,
            "loss": round(record.loss, 4),
            "learning_rate": record.learning_rate,
            "samples_per_second": round(self._samples / seconds, 1),
            "updates_per_second": round(self._updates / seconds, 2),
            "lag_seconds": round(record.lag_seconds, 1),
        }
        self._log.info(
            "step %(step)d: loss %(loss)s, learning rate %(learning_rate)g, "
            "%(samples_per_second)s samples/s of the stream, %(updates_per_second)s updates/s, "
            "lag %(lag_seconds)s s",
            values,
            extra=values,
        )
        self._at, self._updates, self._samples = self._clock(), 0, 0
