"""Image files that appear in a folder."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Literal

from stream_ssl.producers.sources.base import (
    SHOWN_CHARS,
    Facts,
    Skipped,
    checked,
    mark,
    wrong_position,
)
from stream_ssl.producers.sources.fields import codec_of, content_id, no_image, read_image
from stream_ssl.producers.sources.folders import walk
from stream_ssl.rate_limited_logger import printable
from stream_ssl.wire.sample import Position, Sample

log = logging.getLogger(__name__)

Key = tuple[int, str]
"""(stamp in nanoseconds, path below the root): the order in which files are sent."""


@dataclass(frozen=True, slots=True)
class Found:
    """A file at one look at the folder."""

    key: Key
    path: str
    touched: int  # ns; the later of its two stamps
    mtime: int  # ns


def look_at(path: str, order: str, below: str) -> Found | None:
    """The file at `path`, called `below` in positions; None where there is none (any more)."""
    try:
        stat = Path(path).stat()
    except OSError:
        return None
    if not S_ISREG(stat.st_mode):
        return None
    stamp = stat.st_mtime_ns if order == "mtime" else stat.st_ctime_ns
    # A name need not be UTF-8; what stands in a position must be.
    name = os.fsencode(below).decode(errors="backslashreplace")
    touched = max(stat.st_mtime_ns, stat.st_ctime_ns)
    return Found((max(stamp, 0), name), path, touched, stat.st_mtime_ns)


class WatchedFolder:
    """Sends image files as they appear in a folder or below, oldest first, as they are.

    A file is sent once it has rested `settle_seconds` since its last change, so that half-written
    ones are not; none overtakes an older one that has not rested yet. Names that begin with "." or
    "~" or do not end as an image's are taken for unfinished: rename them when they are complete.

    Order and position are (stamp, path), and each run sends what lies above its position. A file
    that turns up at or below it, being older than one already sent, is late: it is logged, counted
    in `late` and left out. With `order="mtime"` so are files moved in with an old time (mv,
    cp -p, rsync -t); `order="ctime"` goes by the time of their arrival instead, and sends a file
    again after a chmod or a restore from backup. A file that was rewritten is sent again.

    Sample ids are the path below the root and a digest of the content, capture time is the file's
    modification time. What cannot be read, or is no image, is logged, counted in `skipped` and
    passed over. Links to files and folders are followed; a folder is listed once, even if several
    links lead to it.

    Args:
        root: the folder.
        order: stamp that orders the files: of the last writing, or of the last change of any kind.
        settle_seconds: how long a file must have rested. Clocks that disagree (network file
            systems) need more. Files dated in the future wait until then.
        poll_seconds: pause between two looks at the folder.
        idle_seconds: end when nothing has come for this long; null: watch for ever.
        name: the source's name; null: that of the folder.

    Raises:
        FileNotFoundError: no such folder.
        ValueError: a time is negative.
    """

    def __init__(
        self,
        root: Path,
        order: Literal["mtime", "ctime"] = "mtime",
        settle_seconds: float = 2.0,
        poll_seconds: float = 0.5,
        idle_seconds: float | None = None,
        name: str | None = None,
    ) -> None:
        if not Path(root).is_dir():
            raise FileNotFoundError(
                f"no folder {root}: create it, or name another with --source.root"
            )
        if settle_seconds < 0 or poll_seconds < 0 or (idle_seconds or 0.0) < 0:
            raise ValueError(
                f"settle_seconds {settle_seconds}, poll_seconds {poll_seconds} and idle_seconds "
                f"{idle_seconds} must not be negative"
            )
        self.name = name or Path(root).absolute().name
        self.late = 0
        self.skipped = Skipped(self.name)
        self._left_out: set[tuple[str, str]] = set()
        self._stopped = threading.Event()
        # Public for tests, whose time passes as they say.
        self.wall: Callable[[], float] = time.time
        self.monotonic: Callable[[], float] = time.monotonic
        self.sleep: Callable[[float], object] = self._stopped.wait
        self._root = Path(root)
        self._order = order
        self._settle, self._poll, self._idle = settle_seconds, poll_seconds, idle_seconds
        self._facts: Facts = {"source": self.name, "order": order}

    def samples(self, position: Position = None) -> Iterator[tuple[Sample, Position]]:
        """Each sample with the position after it; see `Source`."""
        return self._watch(self._key(position))

    def stop(self) -> None:
        """From any thread: `samples` ends, at once where it waits for files."""
        self._stopped.set()

    def _key(self, position: Position) -> Key:
        if position is None:
            return (0, "")
        at = checked(position, self._facts, self.name)
        if not (
            isinstance(at, list | tuple) and len(at) == 2 and type(at[0]) is int and at[0] >= 0
        ) or not isinstance(at[1], str):
            raise wrong_position(self.name, f"{at!r:.80} is no [nanoseconds, path]")
        return at[0], at[1]

    def _watch(self, last: Key) -> Iterator[tuple[Sample, Position]]:
        passed: set[Key] | None = None  # at or below `last`, and accounted for
        came = self.monotonic()
        while not self._stopped.is_set():
            files = sorted(self._look(), key=lambda found: found.key)
            below = {found.key for found in files if found.key <= last}
            self._note_late(below - passed if passed is not None else set())
            passed = below
            waiting = False
            for found in files:
                if found.key <= last:
                    continue
                if self._stopped.is_set():
                    return
                age = self.wall() - found.touched * 1e-9
                if age < self._settle:
                    waiting = age >= 0
                    break
                last = found.key
                passed.add(last)
                sample = self._read(found)
                if sample is not None:
                    yield sample, mark(list(last), self._facts)
                came = self.monotonic()
            if waiting:
                came = self.monotonic()
            elif self._idle is not None and self.monotonic() - came >= self._idle:
                return
            self.sleep(self._poll)

    def _look(self) -> Iterator[Found]:
        for path, entry in walk(self._root, self._leave_out, hidden=(".", "~")):
            if self._stopped.is_set():
                return
            found = look_at(entry.path, self._order, path)
            if found is not None:
                yield found

    def _leave_out(self, reason: str, what: str, why: object) -> None:
        if (reason, what) not in self._left_out:  # once, not at every look
            self._left_out.add((reason, what))
            self.skipped.note(reason, what, why)

    def _note_late(self, keys: set[Key]) -> None:
        for stamp, path in sorted(keys):
            self.late += 1
            log.warning(
                "source %s: left out %s: its time %.3f is not after that of a file already sent; "
                'touch it, or watch with order="ctime"',
                *(self.name, printable(path, SHOWN_CHARS), stamp * 1e-9),
            )

    def _read(self, found: Found) -> Sample | None:
        path = found.key[1]
        while True:
            try:
                data = read_image(Path(found.path))
            except OSError as error:
                self.skipped.note("unreadable", path, error)
                return None
            again = look_at(found.path, self._order, path)
            if again is None:
                self.skipped.note("unreadable", path, "it was taken away while it was read")
                return None
            if again.key != found.key:
                return None  # rewritten meanwhile: it comes again, at its new time
            if again.touched == found.touched:
                break
            found = again  # a chmod, or a new link: its time is the same, it does not come again
        codec = codec_of(data)
        if codec is None:
            self.skipped.note("no image", path, no_image(data))
            return None
        return Sample(
            id=content_id(path, data),
            data=data,
            codec=codec,
            time=found.mtime * 1e-9,
            source=self.name,
        )
