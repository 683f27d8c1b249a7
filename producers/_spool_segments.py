"""The segment files of a spool, NUMBER.spool, which hold records.

Records are appended to the last segment and never overwritten. Old segments are deleted whole.
"""

from __future__ import annotations

import errno
import logging
import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from stream_ssl import durable
from stream_ssl.bounded_files import open_binary
from stream_ssl.producers._spool_records import MAGIC, Record, records_of
from stream_ssl.rate_limited_logger import RateLimitedLogger

SEGMENT_BYTES = 8 * 1024 * 1024
OWNER = "spool.json"
"""The file of each spool with the producer's name and epoch."""

logger = logging.getLogger("stream_ssl.producers")


class Segments:
    """The segments of a folder, from oldest to newest.

    Args:
        folder: the folder.
        max_bytes: maximum bytes of the spool. A segment takes at most an eighth of them.

    Raises:
        OSError: a segment cannot be read.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder, self.max_bytes = folder, max_bytes
        self.paths = deque(
            path for path in sorted(durable.entries(folder, "*.spool")) if _is_segment(path)
        )
        self.bytes = sum(path.stat().st_size for path in self.paths)
        self._disk = folder.stat().st_dev
        self._end = 0  # where the next record begins in the last segment
        self._limited_log = RateLimitedLogger(logger, seconds=60.0)

    @property
    def first_number(self) -> int:
        """The number of the first sample of the first segment, or 0 if there is none."""
        return int(self.paths[0].stem) if self.paths else 0

    def read(self) -> Iterator[tuple[int, Path, int, Record | None]]:
        """Yield number, segment, offset and content of each whole record, and cut off a torn end.

        The number is that of the next sample. The beginning of each segment comes as a record None.
        """
        end = self.first_number
        for path in self.paths:
            end = max(end, int(path.stem))
            yield int(path.stem), path, 0, None
            self._end = len(MAGIC)
            for offset, record in records_of(path):
                number = record.info.get("number", end)  # development builds did not write it
                if not 0 <= number - end <= offset - self._end:
                    continue  # a payload that contains a record
                self._end = offset + record.size
                end = number + record.info.get("count", 0)
                yield number, path, offset, record
        if self.paths and (torn := self.paths[-1].stat().st_size - self._end):
            text = "spool %s: its end was torn, and %d bytes are cut off"
            logger.warning(text, self.paths[-1], torn)
            os.truncate(self.paths[-1], self._end)
            self.bytes -= torn

    def append(self, data: bytes, number: int) -> tuple[Path, int]:
        """Write records to the disk. Return the segment and the offset after them.

        A new segment is named after `number`, the number of the next sample.

        Raises:
            OSError: the disk cannot be written. Nothing has changed.
        """
        new = not self.paths or self._end >= min(SEGMENT_BYTES, self.max_bytes // 8)
        new = new or not self.paths[-1].exists()  # a user may have removed the file
        path = self.folder / f"{number:020d}.spool" if new else self.paths[-1]
        if new:
            data = MAGIC + data
        self._check_mounted()
        try:
            durable.make_folder(self.folder)
            with path.open("wb" if new else "r+b") as file:
                file.seek(0 if new else self._end)
                file.truncate()
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            if new:
                durable.sync(self.folder)
        except OSError:
            if new:
                path.unlink(missing_ok=True)
            raise
        if new:
            self.paths.append(path)
            self._end = 0
        self._end += len(data)
        self.bytes += len(data)
        return path, self._end

    def _check_mounted(self) -> None:
        """Raise OSError if the disk of the spool is not mounted any more.

        The empty folder of the mount point belongs to another disk. Samples there would be hidden
        once the disk is back.
        """
        place = next(path for path in (self.folder, *self.folder.parents) if path.exists())
        if place.stat().st_dev != self._disk and not (self.folder / OWNER).exists():
            raise OSError(errno.ENODEV, "its disk is not mounted here; mount it again")

    def keep_from(self, path: Path | None) -> None:
        """Delete the segments before this one, but never the last segment.

        If the disk refuses to delete a segment, the segment stays, and the next call tries again.
        """
        while len(self.paths) > 1 and self.paths[0] != path and self._delete_first():
            pass

    def clear(self) -> None:
        """Delete all segments; see `keep_from`."""
        while self.paths and self._delete_first():
            pass
        if not self.paths:
            self.bytes = self._end = 0

    def _delete_first(self) -> bool:
        """Delete the first segment. Return False if that fails, as on a read-only disk."""
        path = self.paths[0]
        try:
            size = path.stat().st_size
            path.unlink()
        except FileNotFoundError:  # a user may have removed the file
            size = 0
        except OSError as error:
            text = f"spool {path}: {error.strerror}; its samples are delivered, and it stays"
            self._limited_log.warning("delete", text)
            return False
        self.paths.popleft()
        self.bytes -= size
        return True


def _is_segment(path: Path) -> bool:
    """Return whether a file is a segment.

    An empty segment, as a power cut leaves it, is deleted. Any other file with such a name is
    renamed.
    """
    if not path.stem.isdecimal():
        return False
    with open_binary(path) as file:
        head = file.read(len(MAGIC))
    if head == MAGIC or any(records_of(path)):
        return True
    if head.strip(b"\0"):
        logger.error("spool %s: is no segment; it is renamed and left out", path)
        path.rename(path.with_suffix(".damaged"))
    else:
        path.unlink()
    return False
