"""A source that watches a folder and sends image files as they appear."""

from __future__ import annotations

import errno
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Literal

from stream_ssl.producers.sources.base import (
    OUT_OF_FILES,
    SHOWN_CHARS,
    Facts,
    Skipped,
    checked,
    mark,
    wrong_position,
)
from stream_ssl.producers.sources.fields import fitting_time, source_name, utf8_name
from stream_ssl.producers.sources.folders import check_root, is_away, walk
from stream_ssl.producers.sources.image_files import image_sample, read_image
from stream_ssl.producers.sources.ranges import DAY, check_ranges
from stream_ssl.rate_limited_logger import RateLimitedLogger, printable
from stream_ssl.wire.sample import Position, Sample

log = logging.getLogger(__name__)

FUTURE_SECONDS = 60.0  # the clocks of two machines may differ by less

MAX_PATH = 2048  # bytes; the rest of a position is for the wrappers of the source

PAUSE = 4.0
"""A pause lasts at least this many times as long as the scan before it."""

Key = tuple[int, str]
"""(stamp in nanoseconds, path below the root). Files are sent in the order of their keys."""


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file as one scan of the folder found it."""

    key: Key
    path: str
    touched: int  # ns; the later of mtime and ctime
    mtime: int  # ns


def look_at(path: str, order: str, below: str) -> FoundFile | None:
    """Return the file at `path`, named `below` in positions; None if it is not a regular file."""
    try:
        stat = Path(path).stat()
    except OSError:
        return None
    if not S_ISREG(stat.st_mode):
        return None
    stamp = stat.st_mtime_ns if order == "mtime" else stat.st_ctime_ns
    touched = max(stat.st_mtime_ns, stat.st_ctime_ns)
    return FoundFile((max(stamp, 0), utf8_name(below)), path, touched, stat.st_mtime_ns)


class WatchedFolder:
    """Image files that appear in a folder or its subfolders, oldest first.

    A file is sent unchanged, `settle_seconds` after its last change, so that incomplete files are
    not sent. A newer file waits until all older files are sent. Files are ignored as unfinished if
    their name begins with "." or "~" or has no image extension. Rename such files when they are
    complete. Folders that a system makes are ignored, such as `@eaDir` and recycle bins.

    Files are ordered by (stamp, path), which is also the position. Each run sends the files above
    its position. A file that appears later with a key at or below the position is late: it is
    logged, counted in `skipped` and left out. With `order="mtime"`, a file that is moved in with an
    old time (mv, cp -p, rsync -t) is late. `order="ctime"` uses the time of arrival instead, but
    sends a file again after a chmod or a restore from backup. A file that is rewritten is sent
    again.

    Sample ids are the path below the root and a digest of the content. The capture time is the
    file's modification time. A file that cannot be read or is not an image is logged, counted in
    `skipped` and left out. The source follows links to files and folders. It lists each folder
    once, even if several links point to the folder.

    Args:
        root: the folder.
        order: stamp that orders the files: "mtime" (last write) or "ctime" (last change of any
            kind).
        settle_seconds: seconds that must pass after a file's last change. Use a larger value if
            clocks disagree (network file systems). Files dated in the future wait until that time,
            and the log names them.
        poll_seconds: seconds between two scans of the folder, at most a day; longer if a scan takes
            long.
        idle_seconds: end after this many seconds without a new file; null: watch for ever.
        name: the source's name; null: the name of the folder.

    Raises:
        FileNotFoundError: the folder does not exist.
        ValueError: a time is negative.
    """

    sporadic = True

    def __init__(
        self,
        root: Path,
        order: Literal["mtime", "ctime"] = "mtime",
        settle_seconds: float = 2.0,
        poll_seconds: float = 0.5,
        idle_seconds: float | None = None,
        name: str | None = None,
    ) -> None:
        check_root(Path(root))
        check_ranges(
            ("settle_seconds", settle_seconds, 0, math.inf),
            ("poll_seconds", poll_seconds, 0, DAY),
            ("idle_seconds", idle_seconds, 0, math.inf),
        )
        self.name = name or source_name(Path(root).absolute().name)
        self.skipped = Skipped(self.name)
        self._left_out: set[tuple[str, str]] = set()
        self._away: list[str] = []  # folders that the current scan could not list
        self._disks: dict[str, int] = {}  # of the folders that the current scan has listed
        # Files changed after now, because the clock was set back, and when they were found so.
        self._unchanged: dict[FoundFile, float] = {}
        self._log = RateLimitedLogger(log, seconds=60.0)
        self._noted: Key | None = None  # the last file that was logged as dated in the future
        self._stopped = threading.Event()
        # Public, so that tests can replace the clocks.
        self.wall: Callable[[], float] = time.time
        self.monotonic: Callable[[], float] = time.monotonic
        self.sleep: Callable[[float], object] = self._stopped.wait
        self._root = Path(root)
        self._order = order
        self._settle, self._poll, self._idle = settle_seconds, poll_seconds, idle_seconds
        self._facts: Facts = {"source": self.name, "order": order}

    def samples(self, position: Position = None) -> Iterator[tuple[Sample, Position]]:
        """Yield each sample with the position after it; see `Source`."""
        return self._watch(self._key(position))

    def stop(self) -> None:
        """End `samples`, immediately if it waits for files. Thread-safe."""
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
        passed: set[Key] | None = None  # keys at or below `last` that were sent or counted
        came = self.monotonic()
        while not self._stopped.is_set():
            # A file that comes after the scan begins may be older than files that the scan finds.
            now, began = self.wall(), self.monotonic()
            try:
                files = self._scan()
            except OSError as error:
                self._note_busy(error)
                came = self.monotonic()
                self.sleep(self._poll)
                continue
            passed = self._passed(files, last, passed)
            seen = self.monotonic()
            self._unchanged = {
                found: self._unchanged.get(found, seen)
                for found in files
                if found.key > last and found.key[0] * 1e-9 <= now < found.touched * 1e-9
            }
            waiting = False
            for found in files:
                if found.key <= last:
                    continue
                if self._stopped.is_set():
                    break
                age = now - found.touched * 1e-9
                if found in self._unchanged:  # its time lies in the future
                    age = seen - self._unchanged[found]
                if age < self._settle:
                    self._note_future(found.key, -age)
                    waiting = age >= 0
                    break
                try:
                    sample = self._read(found)
                except OSError as error:
                    self._note_busy(error)
                    waiting = True
                    break
                last = found.key
                passed.add(last)
                if sample is not None:
                    yield sample, mark(list(last), self._facts)
                came = self.monotonic()
            if waiting:
                came = self.monotonic()
            elif self._idle is not None and self.monotonic() - came >= self._idle:
                break
            self.sleep(max(self._poll, PAUSE * (seen - began)))
        self.skipped.tell_end(self._stopped)

    def _scan(self) -> list[FoundFile]:
        """Return the files of the folder, the oldest first."""
        self._away.clear()
        self._disks.clear()
        return sorted(self._look(), key=lambda found: found.key)

    def _passed(self, files: list[FoundFile], last: Key, before: set[Key] | None) -> set[Key]:
        """Return the keys up to `last`. Each of these files has been sent, or counts as late.

        Args:
            files: the files that a scan found.
            last: the key of the last file that was sent or counted.
            before: the result for the scan before; None at the first scan, which counts no file.
        """
        below = {found.key for found in files if found.key <= last}
        if before is not None:
            self._note_late(below - before)
            if self._away or not files:  # no files: the disk may be away
                below |= {key for key in before if not files or self._is_away(key[1])}
        return below

    def _note_busy(self, error: OSError) -> None:
        self._log.warning("busy", f"source {self.name}: waiting, no file is left out: {error}")

    def _look(self) -> Iterator[FoundFile]:
        for path, entry in walk(self._root, self._leave_out, (".", "~"), self._disks):
            if self._stopped.is_set():
                return
            found = look_at(entry.path, self._order, path)
            if found is None:
                continue
            if (size := len(found.key[1].encode())) > MAX_PATH:
                why = f"its path has {size} bytes, and a position holds {MAX_PATH}"
                self._leave_out("long path", path, f"{why}; give the source a folder nearer to it")
            else:
                yield found

    def _is_away(self, path: str) -> bool:
        """Return whether a file lies in a folder that the current scan could not list."""
        return any(path.startswith(folder) or folder == str(self._root) for folder in self._away)

    def _leave_out(self, reason: str, what: str, why: object) -> None:
        if reason == "unlisted":
            self._away.append(what)
        if (reason, what) not in self._left_out:  # log once, not at every scan
            self._left_out.add((reason, what))
            self.skipped.note(reason, what, why)

    def _note_late(self, keys: set[Key]) -> None:
        remedy = 'touch it, or watch with order="ctime"'
        if self._order == "ctime":
            remedy = (
                "its folder was moved here with it: touch it. If the clock was set back, touch it "
                "once the clock has passed that time"
            )
        for stamp, path in sorted(keys):
            why = f"its time {stamp * 1e-9:.3f} is not after that of a file already sent"
            self.skipped.note("late", path, f"{why}; {remedy}")

    def _note_future(self, key: Key, seconds: float) -> None:
        if seconds > max(FUTURE_SECONDS, self._settle) and key != self._noted:
            self._noted = key
            log.warning(
                "source %s: %s is dated %.0f s in the future; it and newer files wait until then. "
                "Set the clock of this machine, or touch the file",
                *(self.name, printable(key[1], SHOWN_CHARS), seconds),
            )

    def _check_disk(self, found: FoundFile) -> None:
        """Raise OSError if the disk of a file is away, which says nothing about the file."""
        folder = Path(found.path).parent
        if is_away(folder, self._disks[str(folder)]):
            raise OSError(errno.ENODEV, "its disk is away; mount it again", str(folder))

    def _read(self, found: FoundFile) -> Sample | None:
        path = found.key[1]
        while True:
            try:
                data = read_image(Path(found.path))
            except OSError as error:
                if error.errno in OUT_OF_FILES:
                    raise
                self._check_disk(found)
                self.skipped.note("unreadable", path, error)
                return None
            again = look_at(found.path, self._order, path)
            if again is None:
                self._check_disk(found)
                self.skipped.note("unreadable", path, "it was taken away while it was read")
                return None
            if again.key != found.key:
                return None  # the file was rewritten: a later scan finds it with its new stamp
            if again.touched == found.touched:
                break
            found = again  # only other stamps changed: no later scan sends it again
        return image_sample(path, data, self.skipped, time=fitting_time(found.mtime * 1e-9))
