"""Batches of one size, in journal order: a function of the journal and the offset alone.

Legend: B batch, C channels, H height, W width.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from stream_ssl.batch import START, Batch, Offset, Origin
from stream_ssl.feed.decode import (
    Chunk,
    DecodeTask,
    JournalRecord,
    Payloads,
    decode_chunk,
    rejected_packet,
)
from stream_ssl.feed.quarantine import Quarantine
from stream_ssl.wire import Data, WireError

log = logging.getLogger(__name__)

POLL = 0.02  # seconds between two reads of a journal that has nothing new
REFRESH = 0.25  # seconds between two looks at where the journal ends
READ = 4 << 20  # bytes of records taken from the journal at once
PATIENCE = 5.0  # seconds that a rank whose journal has unread records keeps the others waiting
CHUNK = 64  # samples decoded by one task, at most: bounds what is between journal and batch


class Reader(Protocol):
    """What is read of a journal, from one thread."""

    @property
    def first(self) -> int: ...
    @property
    def last(self) -> int: ...
    @property
    def id(self) -> str | None: ...
    def read(self, position: int, max_bytes: int = ...) -> Sequence[JournalRecord]: ...


class JournalReplaced(RuntimeError):
    """The journal that was being read is gone, and another stands in its place."""


@dataclass(frozen=True, slots=True)
class JournalShare:
    """The records of one journal that one of several ranks reads: every W-th, so that no sample is
    read twice and none left out.

    Args:
        rank, ranks: which, of how many.
        before: for each earlier number of ranks, the offset that each rank had reached: what was
            read then is not read again.
    """

    rank: int = 0
    ranks: int = 1
    before: Sequence[Sequence[Offset]] = ()

    def first(self, record: int) -> int | None:
        """The first sample of a record that is this rank's to read; None where none is."""
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


class Batches:
    """Reads, decodes and joins samples to batches ahead of the consumer, in threads of its own.

    A sample that cannot be decoded goes to the quarantine and its place to the next good one. A
    batch ends with its last good sample: bad ones right behind it belong to the next batch, as they
    do when one starts from `offset`. Records that the journal no longer has are skipped.

    Samples that do not fill a batch when the stream pauses stay in the journal until more arrive;
    they are `pending`, not lag. No clock ends a batch early: it would be cut elsewhere when it is
    replayed after a kill, and BatchNorm and in-batch negatives would see a handful of samples.

    Args:
        reader: the journal; closed by whoever opened it, after this.
        decoder: payloads to pixels, or to the bytes of vectors.
        quarantine: takes the bad samples; not to be used elsewhere meanwhile.
        batch_size: samples in every batch.
        start: the first sample to read.
        workers: threads that decode.
        prefetch: batches made ahead.
        clock: seconds since the Unix epoch.
        share: which records are read, where several ranks share the journal.
        journal: the id of that which `start` is a place in; None: not known.
        joint: one of several ranks, whose batches meet in a step; see `next`.

    Attributes:
        journal: the id of that which is read, once it is known.

    Raises:
        ValueError: batch_size, workers or prefetch below 1.
    """

    def __init__(
        self,
        reader: Reader,
        decoder: Payloads,
        quarantine: Quarantine,
        batch_size: int,
        start: Offset = START,
        workers: int = 2,
        prefetch: int = 2,
        clock: Callable[[], float] = time.time,
        share: JournalShare | None = None,
        journal: str | None = None,
        joint: bool = False,
    ) -> None:
        if min(batch_size, workers, prefetch) < 1:
            raise ValueError(f"{batch_size=}, {workers=}, {prefetch=}: each must be at least 1")
        self._reader, self._decoder, self._quarantine = reader, decoder, quarantine
        self._prefetch, self._workers, self._clock = prefetch, workers, clock
        self._batcher = Batcher(batch_size, decoder)
        self._share = JournalShare() if share is None else share
        self.journal, self._joint = journal, joint
        self._found: str | None = None  # its id, as it was on the disk
        self._change = threading.Condition()  # guards what follows
        self._ready: deque[Batch[NDArray[Any]]] = deque()
        self._decoding: dict[int, float] = {}  # records read, not yet decoded: when received
        self._read = start.record  # the next record to read
        self._pending = 0
        self._decoded: Counter[str] = Counter()
        self._skipped = 0
        self._last = reader.last
        self._refresh_at = 0.0  # when to look at the journal's end again
        self._offset = start  # of the next batch to hand out
        self._rejected_until = start  # from `_offset` to here all samples were rejected
        self._failure: Exception | None = None
        self._closed = False
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="decode")
        self._thread = threading.Thread(target=self._run, name="batches", daemon=True)
        self._thread.start()

    def next(self, timeout: float) -> Batch[NDArray[Any]] | None:
        """The next batch; None when there is none after `timeout` seconds, or after close().

        One of several ranks has none once it has read what the journal holds, rather than while it
        decodes: which batches meet in a step is then a function of the journal.

        Raises:
            JournalReplaced: there is another journal than was read so far.
            RuntimeError: reading or decoding failed (not a bad sample); its cause says how.
        """
        with self._change:
            self._change.wait_for(lambda: self._ready or self._failure or self._closed, timeout)
            if self._joint:
                self._change.wait_for(self._ready_or_read, PATIENCE)
            if self._closed:
                return None
            if not self._ready:
                if isinstance(self._failure, JournalReplaced):
                    raise self._failure
                if self._failure:
                    raise RuntimeError(
                        f"no more batches: failed behind {self._offset}: {self._failure!r}"
                    ) from self._failure
                return None
            batch = self._ready.popleft()
            self._pending -= len(batch)
            self._offset = batch.offset
            self._change.notify_all()
            return batch

    def _ready_or_read(self) -> bool:
        """Whether there is a batch, or no whole one in what the journal has."""
        if self._ready or self._failure or self._closed:
            return True
        return not self._decoding and self._read > self._last

    @property
    def offset(self) -> Offset:
        """The first sample not handed out; where only bad ones follow so far, the one after them.

        With the last batch's offset alone, a stream of nothing but bad samples would keep the
        journal from being trimmed until it is full: publish this one while next() gives None. A
        run that starts here counts fewer `rejected`.
        """
        with self._change:
            return self._offset if self._ready else max(self._offset, self._rejected_until)

    def lag(self) -> float:
        """Seconds since the oldest batch that is whole was so: since its last sample was received.
        0 when there is none; what is being decoded counts as if it made one."""
        with self._change:
            if self._ready:
                received_B = self._ready[0].received_B
                assert received_B is not None, "the journal has the times of receipt"
                since = float(received_B[-1])
            else:
                since = next(iter(self._decoding.values()), math.inf)
            return max(0.0, self._clock() - since)

    def waiting(self) -> int:
        """Journal records not wholly handed out, as of a moment ago; 0 where all that is left of
        them is short of a batch."""
        with self._change:
            if not self._ready and not self._decoding and self._read > self._last:
                return 0
            return max(0, self._last + 1 - self._offset.record)

    def pending(self) -> int:
        """Samples read from the journal, neither handed out nor `rejected`.

        While nothing is appended to the journal these are all that wait: fewer good ones than a
        batch, once the consumer has taken what is ready.
        """
        with self._change:
            return self._pending

    def rejected(self) -> Mapping[tuple[str, str], int]:
        """Return the samples put into the quarantine so far, by reason and producer.

        The samples that were read ahead of the next batch are among them, because a stream of bad
        samples may never have a next batch.
        """
        return self._quarantine.counts.copy()

    def decoded(self) -> Mapping[str, int]:
        """Return the samples that were decoded so far, by producer as in `rejected`.

        The samples that wait for their batch are among them.
        """
        return self._decoded.copy()

    @property
    def skipped_records(self) -> int:
        """Positions skipped because the journal no longer had them, or had them damaged.

        After the loss of a whole segment more than the records lost, since the journal then leaves
        a wide gap."""
        with self._change:
            return self._skipped

    def close(self) -> None:
        """Stops the threads and waits for them; batches made ahead are dropped."""
        with self._change:
            self._closed = True
            self._change.notify_all()
        self._thread.join()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _run(self) -> None:
        try:
            tasks = self._tasks(self._offset)
            decoding: deque[Future[Chunk]] = deque()
            while not self._closed:
                self._journal_end(at_once=False)
                while len(decoding) <= self._workers and (chunk := self._submit(tasks)):
                    decoding.append(chunk)
                if decoding:
                    self._consume(decoding.popleft().result())
                else:
                    with self._change:
                        self._change.wait_for(lambda: self._closed, POLL)
        except Exception as error:
            with self._change:
                self._failure = error
                self._change.notify_all()

    def _submit(self, tasks: Iterator[DecodeTask | Chunk | None]) -> Future[Chunk] | None:
        """Hands the next task to a worker; None if the journal has nothing new."""
        done: Future[Chunk] = Future()
        try:
            task = next(tasks)
        except Exception as error:  # raised in its turn, behind what was read before
            done.set_exception(error)
            return done
        if isinstance(task, DecodeTask):
            return self._pool.submit(decode_chunk, self._decoder, task)
        if task is None:
            return None
        done.set_result(task)
        return done

    def _consume(self, chunk: Chunk) -> None:
        """Quarantines a chunk's bad samples and batches the good ones."""
        self._decoded[self._quarantine.label(chunk.record.producer)] += len(chunk.batch)
        for sample in chunk.rejected:
            self._quarantine.put(
                sample.error,
                sample.row,
                sample.data,
                source=sample.source,
                producer=chunk.record.producer,
                sequence=chunk.record.sequence,
                index=sample.index,
                received=chunk.record.received,
            )
        for batch in self._batcher.add(chunk):
            while not self._wait_for_room():
                self._journal_end()
            with self._change:
                self._ready.append(batch)
                self._change.notify_all()
        with self._change:
            self._pending -= len(chunk.rejected)
            if self._batcher.empty and chunk.rejected:
                self._rejected_until = offset_behind(chunk, chunk.end)
            if chunk.last:
                self._decoding.pop(chunk.record.position, None)
                self._change.notify_all()

    def _wait_for_room(self) -> bool:
        """Waits a while for the consumer; whether one more batch may be made ready."""
        with self._change:
            return self._change.wait_for(
                lambda: self._closed or len(self._ready) < self._prefetch, REFRESH
            )

    def _journal_end(self, at_once: bool = True) -> int:
        """The journal's last position; without `at_once` it may be `REFRESH` seconds old."""
        now = time.monotonic()
        if at_once or now >= self._refresh_at:
            last, self._refresh_at = self._reader.last, now + REFRESH
            with self._change:
                self._last = max(self._last, last)
        return self._last

    def _check_same(self) -> None:
        """Where we are in one journal says nothing of another, whose records begin at 1."""
        found = self._reader.id
        if None in (found, self._found) or found == self._found:
            return
        raise JournalReplaced(
            f"journal {self._found} was replaced by {found} while it was read: what is in that is "
            "read from its beginning after a start from the newest checkpoint"
        )

    def _tasks(self, start: Offset) -> Iterator[DecodeTask | Chunk | None]:
        """What to decode, in order; None each time the journal has nothing new."""
        start = yield from self._first_to_read(start)
        position, sample = start.record, start.sample
        while True:
            records = self._reader.read(position, READ)
            if records and records[0].position > position:  # a gap: believe it when seen twice
                records = self._reader.read(position, READ)
            self._check_same()
            for record in records:
                if record.position > position:
                    self._count_skipped(position, record.position)
                    sample = 0
                if (first := self._share.first(record.position)) is None:
                    self._count_pending(record, 0)
                else:
                    yield from self._split(record, max(first, sample))
                position, sample = record.position + 1, 0
            if not records:
                yield None

    def _first_to_read(self, start: Offset) -> Generator[None, None, Offset]:
        """`start`, unless this is another journal than it is a place in: all of that is unread.

        Ids tell. Where there are none, a journal is another one that ends before `start` and then
        grows, still before it; one that does not grow may have a damaged end, and go on behind it.
        """
        while (found := self._reader.id) is None and self._journal_end() < 1:
            yield None  # not there yet
        expected, self.journal, self._found = self.journal, found or self.journal, found
        if expected not in (None, self.journal):
            log.error(
                "the checkpoint goes on in journal %s, and this is journal %s: reading all that it "
                "has. To go on where the checkpoint was, stop, and put its own journal back",
                expected,
                self.journal,
            )
            return self._from_the_beginning()
        seen = self._journal_end()
        if start.record <= seen + 1:
            return start
        log.error(
            "the journal ends at record %d, yet the next to read is %s: it was replaced or its end "
            "is damaged; waiting for it to go on",
            seen,
            start,
        )
        while (last := self._journal_end()) == seen:
            yield None
        if start.record <= last + 1:
            return start
        log.error("the journal is a new one: reading all that it has")
        return self._from_the_beginning()

    def _from_the_beginning(self) -> Offset:
        self._share = replace(self._share, before=())  # of the other journal
        first = Offset(max(self._reader.first, 1), 0)
        with self._change:
            self._read, self._offset, self._rejected_until = first.record, first, first
        return first

    def _count_skipped(self, expected: int, found: int) -> None:
        log.error(
            "journal records %d to %d cannot be read (trimmed or damaged): what they held is lost "
            "to this learner",
            expected,
            found - 1,
        )
        with self._change:
            self._skipped += found - expected

    def _split(self, record: JournalRecord, sample: int) -> Iterator[DecodeTask | Chunk]:
        """Tasks for a record's samples, from `sample` on."""
        data = Data(record.sequence, record.header, record.payload)
        try:
            rows: list[dict[str, Any]] = data.fields["samples"]
        except WireError as error:
            self._count_pending(record, 1 if sample == 0 else 0)
            if sample == 0:
                yield rejected_packet(record, error)
            return
        self._count_pending(record, len(rows) - sample)
        view, starts = memoryview(record.payload), [0, *accumulate(row["size"] for row in rows)]
        for begin in range(sample, len(rows), CHUNK):
            end = min(begin + CHUNK, len(rows))
            payload, last = view[starts[begin] : starts[end]], end == len(rows)
            yield DecodeTask(record, data.fields["source"], rows[begin:end], payload, begin, last)

    def _count_pending(self, record: JournalRecord, samples: int) -> None:
        with self._change:
            self._read = record.position + 1
            self._last = max(self._last, record.position)
            if samples > 0:
                self._decoding[record.position] = record.received
                self._pending += samples
            else:
                self._change.notify_all()


class Batcher:
    """Joins the good samples of chunks, in order, to batches."""

    def __init__(self, batch_size: int, decoder: Payloads) -> None:
        self._size = batch_size
        self._shape_BHWC = (batch_size, *decoder.shape_HWC)
        self._begin()

    def _begin(self) -> None:
        self._filled = 0
        self._rejected: Counter[str] = Counter()
        self._origins: list[Origin | None] = []
        ids_B, hashes_B, labels_B = np.empty((3, self._size), np.int64)
        received_B = np.empty(self._size, np.float64)
        images_BCHW = np.empty(self._shape_BHWC, np.uint8).transpose(0, 3, 1, 2)
        self._batch: Batch[NDArray[Any]] = Batch(ids_B, hashes_B, labels_B, images_BCHW, received_B)

    @property
    def empty(self) -> bool:
        """Whether no sample waits for its batch to be full."""
        return self._filled == 0

    def add(self, chunk: Chunk) -> Iterator[Batch[NDArray[Any]]]:
        """The batches that this chunk completes."""
        taken, good, rejected = 0, len(chunk.batch), deque(chunk.rejected)
        while taken < good:
            count = min(self._size - self._filled, good - taken)
            self._take(chunk.batch, taken, count)
            taken += count
            if self._filled < self._size:
                break
            after = int(chunk.index_B[taken - 1]) + 1
            while rejected and rejected[0].index < after:
                self._rejected[rejected.popleft().error.reason] += 1
            offset = offset_behind(chunk, after)
            yield replace(
                self._batch,
                origins_B=self._origins,
                offset=offset,
                rejected=dict(self._rejected),
            )
            self._begin()
        self._rejected.update(sample.error.reason for sample in rejected)

    def _take(self, samples: Batch[NDArray[Any]], start: int, count: int) -> None:
        to, source = slice(self._filled, self._filled + count), slice(start, start + count)
        columns = samples.columns()
        for name, filled in self._batch.columns().items():
            filled[to] = columns[name][source]
        self._origins += (samples.origins_B or ())[start : start + count]
        self._filled += count


def offset_behind(chunk: Chunk, sample: int) -> Offset:
    """The offset of a chunk's sample; where that is the record's end, of the next record."""
    if chunk.last and sample == chunk.end:
        return Offset(chunk.record.position + 1, 0)
    return Offset(chunk.record.position, sample)
