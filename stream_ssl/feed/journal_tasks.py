"""The samples of a journal as tasks for the decoder, in journal order."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from stream_ssl.batch import Offset
from stream_ssl.feed.decode import Chunk, DecodeTask, rejected_packet
from stream_ssl.wire import Data, WireError

if TYPE_CHECKING:
    from stream_ssl.journal.reader import JournalReader
    from stream_ssl.journal.segment import Record

log = logging.getLogger(__name__)

READ = 4 << 20  # bytes of records per read of the journal
CHUNK = 64  # most samples that one task decodes; bounds the samples between journal and batch


class JournalReplaced(RuntimeError):
    """An error for a journal that was replaced while it was read."""


@dataclass(frozen=True, slots=True)
class JournalShare:
    """The share of a journal's records that one of several ranks reads.

    With W ranks, each rank reads every W-th record. Every sample is read exactly once.

    Args:
        rank: the number of this rank, from 0.
        ranks: the number of ranks, W.
        before: for each earlier number of ranks, the offset that each rank had reached. Samples
            before these offsets are not read again.
        journal: id of the journal to which these offsets, and the offset of the start, refer; None:
            unknown.
        joint: the ranks combine their batches in a step; see `Batches.next`.
    """

    rank: int = 0
    ranks: int = 1
    before: Sequence[Sequence[Offset]] = ()
    journal: str | None = None
    joint: bool = False

    def first(self, record: int) -> int | None:
        """Return the first sample that this rank reads of a record, or None if it reads none."""
        if record % self.ranks != self.rank:
            return None
        first = 0
        for offsets in self.before:
            ended = offsets[record % len(offsets)]
            if record < ended.record:
                return None
            if record == ended.record:
                first = max(first, ended.sample)
        return first


@dataclass(frozen=True, slots=True)
class RecordRead:
    """The note that a record was read, and that `samples` of its samples follow as tasks."""

    record: Record
    samples: int


@dataclass(frozen=True, slots=True)
class ReadFrom:
    """The note that another journal than expected is read, from this offset on."""

    offset: Offset


Task = DecodeTask | Chunk
Event = RecordRead | ReadFrom


class JournalTasks:
    """A reader of a journal that yields decode tasks, and what happens between them.

    It yields None whenever the journal has no new records. `Batches` explains the arguments.

    Attributes:
        journal: id of the journal that is read; before it is known, the id that `share` names.
    """

    def __init__(self, reader: JournalReader, start: Offset, share: JournalShare) -> None:
        self._reader, self._start, self._share = reader, start, share
        self.journal = share.journal
        self._found: str | None = None  # the id that was read from the disk

    def __iter__(self) -> Iterator[Task | Event | None]:
        start = yield from self._first_to_read()
        if start != self._start:
            yield ReadFrom(start)
        position, sample = start.record, start.sample
        while True:
            records = self._reader.read(position, READ)
            if records and records[0].position > position:  # read a gap again, to confirm it
                records = self._reader.read(position, READ)
            self._check_same()
            for record in records:
                if record.position > position:
                    log.error(
                        "journal records %d to %d cannot be read (trimmed or damaged): this "
                        "learner will not see their samples",
                        position,
                        record.position - 1,
                    )
                    sample = 0
                if (first := self._share.first(record.position)) is None:
                    yield RecordRead(record, 0)
                else:
                    yield from self._split(record, max(first, sample))
                position, sample = record.position + 1, 0
            if not records:
                yield None

    def _check_same(self) -> None:
        """Check that the journal is still the same one; positions are valid for one journal only.

        Raises:
            JournalReplaced: the id of the journal has changed.
        """
        found = self._reader.id
        if None in (found, self._found) or found == self._found:
            return
        raise JournalReplaced(
            f"journal {self._found} was replaced by {found} while it was read: start the learner "
            "again, which reads the new journal from its beginning"
        )

    def _first_to_read(self) -> Generator[None, None, Offset]:
        """Return the start, or the beginning of the journal if the start is of another journal.

        The ids of the journals decide. Without ids, a journal that ends before `start` and then
        grows, but not up to `start`, is another journal. A journal that does not grow may only have
        lost its end, and its writer then continues after `start`.
        """
        while (found := self._reader.id) is None and self._reader.last < 1:
            yield None  # the journal does not exist yet
        expected, self.journal, self._found = self.journal, found or self.journal, found
        if expected not in (None, self.journal):
            log.error(
                "the checkpoint goes on in journal %s, and this is journal %s: reading all that it "
                "has. To continue at the checkpoint, stop the run and restore the first journal",
                expected,
                self.journal,
            )
            return self._from_the_beginning()
        seen = self._reader.last
        if self._start.record <= seen + 1:
            return self._start
        log.error(
            "the journal ends at record %d, yet the next to read is %s: it was replaced or its end "
            "is damaged; waiting for new records",
            seen,
            self._start,
        )
        while (last := self._reader.last) == seen:
            yield None
        if self._start.record <= last + 1:
            return self._start
        log.error("the journal is a new one: reading all that it has")
        return self._from_the_beginning()

    def _from_the_beginning(self) -> Offset:
        self._share = replace(self._share, before=())  # its offsets refer to the other journal
        return Offset(max(self._reader.first, 1), 0)

    def _split(self, record: Record, sample: int) -> Iterator[Task | RecordRead]:
        """Yield the tasks for the samples of a record, from `sample` on."""
        data = Data(record.sequence, record.header, record.payload)
        try:
            rows: list[dict[str, Any]] = data.fields["samples"]
        except WireError as error:
            yield RecordRead(record, 1 if sample == 0 else 0)
            if sample == 0:
                yield rejected_packet(record, error)
            return
        yield RecordRead(record, len(rows) - sample)
        view, starts = memoryview(record.payload), [0, *accumulate(row["size"] for row in rows)]
        for begin in range(sample, len(rows), CHUNK):
            end = min(begin + CHUNK, len(rows))
            payload, last = view[starts[begin] : starts[end]], end == len(rows)
            yield DecodeTask(record, data.fields["source"], rows[begin:end], payload, begin, last)
