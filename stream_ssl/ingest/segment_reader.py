"""Reading a journal while another process writes it."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import lmdb

from stream_ssl.ingest.layout import (
    Damaged,
    Record,
    key_of,
    position_of,
    unpack_record,
)
from stream_ssl.ingest.segment import (
    Segment,
    identity,
    list_segments,
)

log = logging.getLogger(__name__)


class JournalReader:
    """Reads records in order of position; needs no writer, and holds none up.

    Transactions last for one read(), so that the writer can reuse pages; one segment is open at a
    time. Not thread-safe.

    Args:
        path: the journal's folder; it may come into being later.

    Attributes:
        corrupt: records (or, where LMDB itself finds damage, segments) skipped so far.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.corrupt = 0
        self._open: Segment | None = None
        self._reported: set[int] = set()

    @property
    def first(self) -> int:
        """The oldest position held; last + 1 when there is none."""
        for start, path in list_segments(self.path):
            bounds = self._bounds(path)
            if bounds:
                return bounds[0]
            last = start
        return last if list_segments(self.path) else 1

    @property
    def last(self) -> int:
        """The newest position held; first - 1 when there is none."""
        segments = list_segments(self.path)
        if not segments:
            return 0
        start, path = segments[-1]
        bounds = self._bounds(path)
        return bounds[1] if bounds else start - 1

    def read(self, position: int, max_bytes: int = 8 << 20) -> list[Record]:
        """Records from `position` on, of about `max_bytes` together and at least one.

        Records that were trimmed or are damaged are left out: look at the positions of those that
        come. An empty list: there is nothing yet.

        Raises:
            ValueError: position below 1.
            NewerFormat: the journal is of a later version.
        """
        if position < 1:
            raise ValueError(f"position {position}: positions start at 1")
        segments = list_segments(self.path)
        for index, (start, path) in enumerate(segments):
            bound = segments[index + 1][0] if index + 1 < len(segments) else None
            if bound is not None and bound <= position:
                continue
            try:
                records = self._read(path, max(position, start), bound, max_bytes)
            except (Damaged, lmdb.Error, FileNotFoundError) as error:
                if path.exists():  # else trimmed in the meantime
                    self._count(start, f"segment {path}: {error}")
                continue
            if records:
                return records
        return []

    def close(self) -> None:
        """Closes the segment that is open."""
        if self._open is not None:
            self._open.close()
            self._open = None

    def _segment(self, path: Path) -> Segment:
        if self._open is None or self._open.key != identity(path):
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
                    self._count(found, f"record {found}: {error}")
                else:
                    records.append(record)
                    size += len(record.header) + len(record.payload)
                more = cursor.next()
        return records

    def _bounds(self, path: Path) -> tuple[int, int] | None:
        try:
            return self._segment(path).bounds()
        except (Damaged, lmdb.Error, FileNotFoundError):
            return None

    def _count(self, position: int, what: str) -> None:
        if position in self._reported:
            return
        self._reported.add(position)
        self.corrupt += 1
        log.error("journal: skipped damaged %s", what)
