"""What a source is, and how its positions are made and checked."""

from __future__ import annotations

import logging
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from stream_ssl.rate_limited_logger import printable
from stream_ssl.wire.sample import Position, Sample

log = logging.getLogger(__name__)

SHOWN = 10  # of each reason
SHOWN_CHARS = 300
Facts = Mapping[str, str | int | float | bool | None]
"""What a position holds true for: the settings and the files that fix the order of samples."""


class Source(Protocol):
    """Samples in a fixed order that can be taken up again at any of them."""

    name: str

    def samples(self, position: Position = None) -> Iterator[tuple[Sample, Position]]:
        """Each sample with the position after it.

        Args:
            position: go on exactly after the sample it came with; None: from the start.

        Raises:
            ValueError: the position was taken from another source, or under other settings.
        """
        ...


class SourceError(ValueError):
    """A source cannot go on; the message is a line for the user."""


def own_fault(error: Exception) -> bool:
    """Return whether the program caused an error, and not the data that it read.

    Libraries raise errors of any type at damaged bytes, but in their own code. A call of ours that
    a library's version does not know fails in our code.
    """
    if isinstance(error, ImportError | NameError | MemoryError):
        return True
    if not isinstance(error, TypeError | AttributeError) or error.__traceback__ is None:
        return False
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return Path(frame.f_code.co_filename).is_relative_to(Path(__file__).parents[1])


class Skipped:
    """What a source has left out, counted by reason; the first ones of each reason are logged."""

    def __init__(self, source: str) -> None:
        self.by_reason: Counter[str] = Counter()
        self._logged: Counter[str] = Counter()
        self._source = source

    def note(self, reason: str, what: object, why: object, count: int = 1) -> None:
        """Count `what` under `reason`, once or `count` times; the log has `why`."""
        self.by_reason[reason] += count
        self._logged[reason] += 1
        if (logged := self._logged[reason]) <= SHOWN:
            more = "; more of this reason are only counted" if logged == SHOWN else ""
            # Names in archives and folders may hold line ends and escape sequences.
            parts = (printable(str(part), SHOWN_CHARS) for part in (what, reason, why))
            log.warning("source %s: left out %s (%s): %s%s", self._source, *parts, more)

    def __str__(self) -> str:
        counted = ", ".join(f"{count} {reason}" for reason, count in self.by_reason.most_common())
        return f"left out: {counted or 'nothing'}"


def mark(at: object, facts: Facts) -> dict[str, Any]:
    """A position: where (`at`), and what it holds true for."""
    return {"at": at, "of": facts}


def place(position: Position, facts: Facts, name: str, limits: tuple[int, ...]) -> tuple[int, ...]:
    """The integers that `mark` was given as `at`; zeros for None.

    Args:
        position: what `mark` returned, perhaps after a round trip through JSON or msgpack.
        facts: those of the source that is to go on.
        name: the source's name, for the error.
        limits: the largest value of each integer.

    Raises:
        ValueError: no such position, or other facts.
    """
    if position is None:
        return (0,) * len(limits)
    at = checked(position, facts, name)
    if not (
        isinstance(at, list | tuple)
        and len(at) == len(limits)
        and all(
            type(value) is int and 0 <= value <= limit
            for value, limit in zip(at, limits, strict=True)
        )
    ):
        raise wrong_position(name, f"{at!r:.80} does not lie within 0..{list(limits)}")
    return tuple(at)


def checked(position: Position, facts: Facts, name: str) -> Any:
    """The `at` of a position, once its facts have been found to be `facts`.

    Raises:
        ValueError: no such position, or other facts; it names each that differs.
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


def wrong_position(name: str, what: str) -> ValueError:
    """The error of a position that does not fit the source."""
    return ValueError(
        f"source {name!r}: the position does not fit: {what}. "
        "Give the source the settings and files it had, or start anew: under another producer "
        "name, or in Python with position None"
    )


def stop_source(source: Source) -> None:
    """Ends a source that waits for something, where it can be ended."""
    stop = getattr(source, "stop", None)
    if stop is not None:
        stop()
