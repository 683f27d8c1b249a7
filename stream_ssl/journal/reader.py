"""Reader of the journal, in the learner's process."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import lmdb

from stream_ssl.durable import UNREAD
from stream_ssl.journal.recovery import salvage
from stream_ssl.journal.segment import (
    Damaged,
    Record,
    Segment,
    file_bytes,
    identity,
    is_coming,
    journal_id,
    key_of,
    list_segments,
    position_of,
    unpack_record,
)
from stream_ssl.rate_limited_logger import RateLimitedLogger

log = logging.getLogger(__name__)


class JournalReader:
    """A reader of records in order of position, which never blocks the writer.

    Each `read` uses its own transaction, so that the writer can reuse pages. One segment is open at
    a time. Not thread-safe.

    Args:
        path: the folder of the journal; it may be created later.

    Attributes:
        corrupt: damaged records skipped so far, plus segments that LMDB could not read. The intact
            records of such a segment are still returned.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.corrupt = 0
        self._open: Segment | None = None
        self._reported: set[int] = set()
        self._limited_log = RateLimitedLogger(log, lines=20)
        self._salvaged: tuple[Path | None, dict[int, bytes]] = (None, {})

    @property
    def id(self) -> str | None:
        """The id of the journal; None if the journal does not exist yet or has no id."""
        return journal_id(self.path)

    @property
    def first(self) -> int:
        """The oldest position that can be read now; last + 1 if there is none."""
        segments = self._segments()
        for _, path in segments:
            bounds = self._bounds(path)
            if bounds:
                return bounds[0]
        return segments[-1][0] if segments else 1

    @property
    def last(self) -> int:
        """The newest position that can be read now; first - 1 if there is none."""
        segments = self._segments()
        if not segments:
            return 0
        start, path = segments[-1]
        bounds = self._bounds(path)
        return bounds[1] if bounds else start - 1

    def read(self, position: int, max_bytes: int = 8 << 20) -> list[Record]:
        """Return records from `position` on, in order.

        Trimmed and damaged records are skipped; gaps in the returned positions show this. An empty
        list means that there are no records yet, or that no file can be opened now.

        Args:
            position: the first position to return, from 1.
            max_bytes: approximate size of all records together; at least one is returned.

        Raises:
            ValueError: `position` is below 1.
            NewerFormat: a later version wrote the journal.
        """
        if position < 1:
            raise ValueError(f"position {position}: positions start at 1")
        try:
            return self._read_from(position, max_bytes)
        except OSError as error:
            self._pass_over(error)
            return []

    def _read_from(self, position: int, max_bytes: int) -> list[Record]:
        segments = list_segments(self.path, coming=True)
        for index, (start, path) in enumerate(segments):
            bound = segments[index + 1][0] if index + 1 < len(segments) else None
            if bound is not None and bound <= position:
                continue
            try:
                records = self._read(path, max(position, start), bound, max_bytes)
            except (Damaged, lmdb.Error, FileNotFoundError) as error:
                coming = is_coming(path)
                if not path.exists():
                    if coming:  # the writer is creating it, or replacing it by its intact records
                        return []
                    continue  # trimmed in the meantime
                if isinstance(error.__cause__, FileNotFoundError) and file_bytes(path):
                    return []  # created in the meantime
                self._count_corrupt(start, f"segment {path}: {error}")
                records = self._salvage(path, start, position, bound, max_bytes)
            else:
                self._salvaged = (None, {})  # the reader has left the damaged segment
            if records:
                return records
        return []

    def close(self) -> None:
        """Close the open segment."""
        if self._open is not None:
            self._open.close()
            self._open = None

    def _segments(self) -> list[tuple[int, Path]]:
        try:
            return list_segments(self.path)
        except PermissionError:  # a learner of another user must not wait for this journal
            raise
        except OSError as error:
            self._pass_over(error)
            return []

    def _pass_over(self, error: OSError) -> None:
        if error.errno not in UNREAD:
            raise error
        self._limited_log.warning("unread", f"journal: {error}; it is tried again")

    def _segment(self, path: Path) -> Segment:
        held = self._open
        if held is not None and held.key == identity(path) and not held.is_cut_off():
            return held
        self.close()
        self._open = Segment(path)
        return self._open

    def _read(self, path: Path, position: int, bound: int | None, max_bytes: int) -> list[Record]:
        segment = self._segment(path)
        records: list[Record] = []
        size = 0
        with segment.env.begin(db=segment.records, buffers=True) as txn:
            cursor: Any = txn.cursor()
            more = cursor.set_range(key_of(position))
            while more and size < max_bytes:
                found = position_of(cursor.key())
                if bound is not None and found >= bound:
                    break
                try:
                    record = unpack_record(cursor.value())
                except Damaged as error:
                    self._count_corrupt(found, f"record {found}: {error}")
                else:
                    records.append(record)
                    size += len(record.header) + len(record.payload)
                more = cursor.next()
        return records

    def _salvage(
        self, path: Path, start: int, position: int, bound: int | None, max_bytes: int
    ) -> list[Record]:
        """Return the intact records of a damaged segment that the writer has not replaced yet."""
        if bound is None:  # the newest segment: the writer checks it before it begins another
            return []
        if self._salvaged[0] != path:
            self._salvaged = (path, salvage(path, start, bound))
        records: list[Record] = []
        size = 0
        for found, value in self._salvaged[1].items():
            if found >= position and size < max_bytes:
                records.append(unpack_record(memoryview(value)))
                size += len(value)
        return records

    def _bounds(self, path: Path) -> tuple[int, int] | None:
        try:
            return self._segment(path).bounds()
        except (Damaged, lmdb.Error, FileNotFoundError):
            return None
        except OSError as error:
            if error.errno in UNREAD:
                return None
            raise

    def _count_corrupt(self, position: int, what: str) -> None:
        if position in self._reported:
            return
        self._reported.add(position)
        self.corrupt += 1
        self._limited_log.log(logging.ERROR, "damaged", f"journal: skipped damaged {what}")
