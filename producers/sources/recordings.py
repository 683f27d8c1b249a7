"""Base classes of sources that read files one after another and can resume after any sample."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from stream_ssl.producers.sources.base import (
    Facts,
    Skipped,
    SourceError,
    mark,
    place,
    wrong_position,
)
from stream_ssl.producers.sources.fields import files_of, utf8_name
from stream_ssl.producers.sources.file_patterns import find_files
from stream_ssl.producers.sources.finite import ENDLESS
from stream_ssl.producers.sources.folders import away, is_away
from stream_ssl.producers.sources.passes import Passes
from stream_ssl.wire.sample import Position, Sample

Where = tuple[int, int]
"""A place in a file: (time, number of earlier samples with the same time)."""
At = TypeVar("At", bound=tuple[int, ...])
LATEST = 2**64 - 1
"""The latest time in nanoseconds or in units of a time base; MCAP has 64 bits for it."""


class FilePasses(Passes[tuple[int, At | None]], Generic[At]):
    """Passes over files that are read in sequence.

    Files may be added after the file of a position, and a file that is still written may grow.
    Parts that cannot be read are logged, counted in `skipped` and left out.

    Args:
        files: paths, globs, or brace expansions such as "drive-{00..09}.mp4".
        epochs: number of passes, 1 or more; null: endless.
        skipped: the counter of parts that are left out, made with the source's name.
        what: the word for a file in messages.
        settings: further facts for which positions are valid.
        key: the name of a file's number among these facts.

    Attributes:
        FOLDERS: whether a folder counts as a file.
        LOWEST, HIGHEST: the first and the last place in a file that a position may name.

    Raises:
        FileNotFoundError: a pattern matches no file.
        ValueError: the braces or `epochs` are invalid, or a pattern is the name of a folder.
    """

    FOLDERS = False
    LOWEST: At
    HIGHEST: At

    def __init__(
        self,
        files: list[str] | str,
        epochs: int | None,
        skipped: Skipped,
        what: str,
        settings: Facts,
        key: str = "number",
    ) -> None:
        super().__init__(skipped, epochs)
        self._files = find_files(files, what, self.FOLDERS)
        self._what, self._settings, self._key = what, settings, key
        folders = {path.parent for path in self._files}
        self._disks = {folder: folder.stat().st_dev for folder in folders}

    def samples(self, position: Position = None) -> Iterator[tuple[Sample, Position]]:
        """Yield each sample with the position after it; see `Source`."""
        if position is None:
            return self._passes(0, None)
        number = self._number(position)
        facts = self._facts(number, position)
        limits, lowest = (ENDLESS, *self.HIGHEST), (0, *self.LOWEST)
        epoch, *at = place(position, facts, self.name, limits, lowest)
        return self._passes(epoch, (number, cast(At, tuple(at))))

    def _number(self, position: Position) -> int:
        """Return the number of the file that a position names, or 0 if it names none."""
        if not (isinstance(position, Mapping) and isinstance(position.get("of"), Mapping)):
            return 0
        number = position["of"].get(self._key, 0)
        if type(number) is not int or not 0 <= number < len(self._files):
            why = f"{self._what} {number!r} is none of {len(self._files)}"
            raise wrong_position(self.name, why)
        return number

    def _facts(self, number: int, position: Position = None) -> Facts:
        """Return the facts of a file. A file that is still written may grow after a position."""
        path = self._files[number]
        size: Any = sum(part.stat().st_size for part in files_of(path) if part.is_file())
        made = position.get("of") if isinstance(position, Mapping) else None
        if isinstance(made, Mapping):
            may_grow = made.get("bytes", 0) is None
        else:
            may_grow = self._is_unfinished(path)
        if may_grow:
            size = None
        name = utf8_name(path.name)
        own: Facts = {"source": self.name, self._key: number, "file": name, "bytes": size}
        return {**own, **self._settings}

    def _pass(
        self, epoch: int, start: tuple[int, At | None] | None
    ) -> Iterator[tuple[Sample, Position]]:
        first, after = start or (0, None)
        for number in range(first, len(self._files)):
            if self._stopped.is_set():
                return
            facts, path = self._facts(number), self._files[number]
            left_out = self.skipped.by_reason.total()
            for sample, at in self._readable(path, after):
                yield sample, mark([epoch, *at], facts)
            lost = self.skipped.by_reason.total() > left_out
            if lost and is_away(path.parent, self._disks[path.parent]):
                raise SourceError(away(self.name, path.parent))
            after = None

    def _is_unfinished(self, path: Path) -> bool:  # noqa: ARG002
        """Return whether the file lacks what its program writes last, so that it may grow."""
        return False

    @abstractmethod
    def _readable(self, path: Path, after: At | None) -> Iterator[tuple[Sample, At]]:
        """Yield the readable samples of a file, each with the place after it, until `stop`.

        Args:
            path: the file.
            after: the place after which to go on; None: the beginning.
        """


class CountedPasses(FilePasses[tuple[int]]):
    """Passes over files in which one whole number from 0 on names a place.

    A position is [pass, place] in one of the files.
    """

    LOWEST, HIGHEST = (0,), (ENDLESS,)


class Recordings(FilePasses[Where]):
    """Passes over files whose samples are ordered by time.

    A position is [pass, time, number among the samples of that time] in one of the files.
    """

    LOWEST, HIGHEST = (-LATEST, 0), (LATEST, ENDLESS)

    def _readable(self, path: Path, after: Where | None) -> Iterator[tuple[Sample, Where]]:
        """Yield the samples up to the end of the file, its first damage, or `stop`."""
        try:
            for item in self._recorded(path, after):
                if self._stopped.is_set():
                    return
                yield item
        except self.damages() as error:
            self.skipped.note_damage(f"{path}, or the rest of it", error)

    def damages(self) -> tuple[type[Exception], ...]:
        """Return the error types that damaged bytes can cause; most libraries raise any type.

        Any other error is a bug and ends the source.
        """
        return (Exception,)

    @abstractmethod
    def _recorded(self, path: Path, after: Where | None) -> Iterator[tuple[Sample, Where]]:
        """Yield the file's samples after `after`, or all samples if `after` is None.

        Raises:
            Exception: the rest cannot be read. A BrokenFileError has the reason as its message.
        """
