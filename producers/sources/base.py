"""The interface of a source, and functions that build and check the positions of a source."""

from __future__ import annotations

import errno
import logging
import threading
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from stream_ssl.rate_limited_logger import printable
from stream_ssl.wire.sample import Position, Sample

log = logging.getLogger(__name__)

OUT_OF_FILES = (errno.EMFILE, errno.ENFILE)
"""Errors of a process or a machine with too many open files: they say nothing about the file."""
SHOWN = 10  # log lines per reason
SHOWN_CHARS = 300
Facts = Mapping[str, str | int | float | bool | None]
"""The settings and files that fix the order of samples. A position is valid only for them."""


class Source(Protocol):
    """A sequence of samples in a fixed order that can resume after any sample.

    A source that may be silent for long, such as a watched folder, has a true attribute `sporadic`.
    """

    name: str

    def samples(self, position: Position = None) -> Iterator[tuple[Sample, Position]]:
        """Yield each sample with the position after it.

        Args:
            position: resume directly after the sample that was yielded with this position. None
                starts from the first sample.

        Raises:
            ValueError: the position comes from another source, or from other settings.
        """
        ...


class SourceError(ValueError):
    """An error that ends a source. Its message is one line for the user."""


class BrokenFileError(Exception):
    """A file cannot be read past this place. The message says why."""


def own_fault(error: Exception) -> bool:
    """Return True if a bug in this package caused the error, and False if the input data caused it.

    Damaged input makes libraries raise errors of any type, but such an error is raised in library
    code. A TypeError or AttributeError that is raised in our code is our bug. An example is a call
    that the installed version of a library does not support.
    """
    if isinstance(error, ImportError | NameError | MemoryError):
        return True
    if not isinstance(error, TypeError | AttributeError) or error.__traceback__ is None:
        return False
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return Path(frame.f_code.co_filename).is_relative_to(Path(__file__).parents[1])


def check_is_damage(error: Exception, name: str) -> None:
    """Check that an error tells something about the data, so that the data may be left out.

    The error, or the one that caused it, was raised while data was read.

    Raises:
        SourceError: this process or this machine has too many open files.
        Exception: `error` itself, if a bug in this package caused it.
    """
    if own_fault(error):
        raise error
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in OUT_OF_FILES:
            why = f"source {name!r}: {cause}; raise ulimit -n, and start it again"
            raise SourceError(why) from cause
        cause = cause.__cause__


class Skipped:
    """Counts of the samples and parts of files that a source left out, by reason.

    The first `SHOWN` of each reason are also logged, except those that repeat the line before.

    Args:
        source: the source's name.
    """

    def __init__(self, source: str) -> None:
        self.by_reason: Counter[str] = Counter()
        self._logged: Counter[str] = Counter()
        self._last: dict[str, str] = {}  # by reason
        self.source = source

    def note(self, reason: str, what: object, why: object, count: int = 1) -> None:
        """Add `count` to the counter of `reason`, and log `what` and `why`."""
        self.by_reason[reason] += count
        if (text := f"{what}: {why}") == self._last.get(reason):
            return
        self._last[reason] = text
        self._logged[reason] += 1
        if (logged := self._logged[reason]) <= SHOWN:
            more = "; more of this reason are only counted" if logged == SHOWN else ""
            # File names may contain line breaks and escape sequences, which must not reach the log.
            parts = (printable(str(part), SHOWN_CHARS) for part in (what, reason, why))
            log.warning("source %s: left out %s (%s): %s%s", self.source, *parts, more)

    def note_damage(self, what: object, why: Exception | str) -> None:
        """Count a part of a file that cannot be read; `check_is_damage` names the errors."""
        if isinstance(why, Exception):
            check_is_damage(why, self.source)
        if not isinstance(why, BrokenFileError | str):
            why = f"{type(why).__name__}: {why}"
        self.note("damaged", what, why)

    def tell_end(self, stopped: threading.Event) -> None:
        """Log that the source has ended or was stopped, and all that it left out."""
        how = "was stopped" if stopped.is_set() else "has been read to its end"
        log.info("source %s %s; %s", self.source, how, self)

    def __str__(self) -> str:
        counted = ", ".join(f"{count} {reason}" for reason, count in self.by_reason.most_common())
        return f"left out: {counted or 'nothing'}"


def mark(at: object, facts: Facts) -> dict[str, Any]:
    """Return a position made of a place (`at`) and the facts for which the place is valid."""
    return {"at": at, "of": facts}


def place(
    position: Position,
    facts: Facts,
    name: str,
    limits: tuple[int, ...],
    lowest: tuple[int, ...] | None = None,
) -> tuple[int, ...]:
    """Return the integers that were passed to `mark` as `at`; zeros if `position` is None.

    Args:
        position: a return value of `mark`, perhaps after a round trip through JSON or msgpack.
        facts: the facts of the source that resumes.
        name: the source's name, used in the error message.
        limits: the largest allowed value of each integer.
        lowest: the smallest allowed value of each integer; None: 0.

    Raises:
        ValueError: the position is malformed, or its facts differ from `facts`.
    """
    if position is None:
        return (0,) * len(limits)
    at, lowest = checked(position, facts, name), lowest or (0,) * len(limits)
    if not (
        isinstance(at, list | tuple)
        and len(at) == len(limits)
        and all(
            type(value) is int and low <= value <= high
            for low, value, high in zip(lowest, at, limits, strict=True)
        )
    ):
        raise wrong_position(name, f"{at!r:.80} does not lie within {list(lowest)}..{list(limits)}")
    return tuple(at)


def checked(position: Position, facts: Facts, name: str) -> Any:
    """Return the `at` of a position after checking that the position's facts equal `facts`.

    Raises:
        ValueError: the position is malformed, or its facts differ. The message names each
            difference.
    """
    if not (isinstance(position, Mapping) and isinstance(position.get("of"), Mapping)):
        raise wrong_position(name, f"{position!r:.80} is no position of a source")
    made: Facts = position["of"]
    differing = [
        f"{key} was {made.get(key)!r} and is {facts.get(key)!r}"
        for key in sorted({*made, *facts})
        if made.get(key) != facts.get(key)
    ]
    if differing:
        raise wrong_position(name, "since it was taken, " + "; ".join(differing))
    return position.get("at")


def wrong_position(name: str, what: str) -> SourceError:
    """Return the error for a position that does not fit the source."""
    return SourceError(
        f"source {name!r}: the position does not fit: {what}. "
        "Give the source the settings and files it had, or start anew: under another producer "
        "name, with another --out of curate or embed, or in Python with position None"
    )


def stop_source(source: Source) -> None:
    """Stop a blocked source, if it supports stopping."""
    stop = getattr(source, "stop", None)
    if stop is not None:
        stop()
