"""Batches of one size, in journal order, which depend only on the journal and the start offset.

Shapes: B samples, C channels, H height, W width.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from stream_ssl.batch import START, Batch, Offset, Origin
from stream_ssl.feed.decode import Chunk, DecodeTask, Payloads
from stream_ssl.feed.decode_process import DecodePool
from stream_ssl.feed.journal_tasks import (
    Event,
    JournalReplaced,
    JournalShare,
    JournalTasks,
    ReadFrom,
    RecordRead,
    Task,
)
from stream_ssl.feed.originals import KeptOriginals
from stream_ssl.feed.quarantine import Quarantine

if TYPE_CHECKING:
    from stream_ssl.journal.reader import JournalReader

log = logging.getLogger(__name__)

POLL = 0.02  # seconds between two reads of a journal that has no new records
REFRESH = 0.25  # seconds between two reads of the journal's last position
PREFETCH = 4  # most batches that are prepared ahead
PATIENCE = 5.0  # most seconds that a rank with unread records may block the other ranks


class Batches:
    """A prefetching reader of decoded batches from the journal, with its own threads.

    A sample that cannot be decoded goes to the quarantine, and the next good sample takes its
    place in the batch. A batch ends with its last good sample. Bad samples directly after it belong
    to the next batch, so that a restart from `offset` gives the same batches. Records that the
    journal no longer has are skipped.

    If the stream pauses, samples that do not fill a batch wait for more samples. They count as
    `pending` and not as lag. No timeout ends a batch early. A replay after a crash would end the
    batch elsewhere, and BatchNorm and in-batch negatives would see only a few samples.

    Args:
        reader: the reader of the journal. The caller closes it, after closing this object.
        decoder: converts payloads to pixels, or to the bytes of vectors.
        quarantine: receives the bad samples. No other thread may use it.
        batch_size: number of samples in every batch, at least 1.
        start: the first sample to read.
        workers: number of threads that decode samples, at least 1. With a GPU, each of them has a
            process of its own.
        clock: returns the time in seconds since the Unix epoch.
        share: the records to read, if several ranks share the journal, and the journal's id.
        originals: keeps the bytes of samples as they were sent; None: they are not kept.
        processes: whether each thread decodes in a process of its own (decode_process.py).

    Raises:
        ValueError: `batch_size` or `workers` is below 1.
    """

    def __init__(
        self,
        reader: JournalReader,
        decoder: Payloads,
        quarantine: Quarantine,
        batch_size: int,
        start: Offset = START,
        workers: int = 2,
        clock: Callable[[], float] = time.time,
        share: JournalShare | None = None,
        originals: KeptOriginals | None = None,
        processes: bool = False,
    ) -> None:
        if min(batch_size, workers) < 1:
            raise ValueError(f"{batch_size=}, {workers=}: each must be at least 1")
        self._reader, self._quarantine = reader, quarantine
        self._workers, self._clock = workers, clock
        self._originals = originals
        self._batcher = Batcher(batch_size, decoder)
        share = JournalShare() if share is None else share
        self._tasks, self._joint = JournalTasks(reader, start, share), share.joint
        self._change = threading.Condition()  # guards the following attributes
        self._ready: deque[Batch[NDArray[Any]]] = deque()
        self._arrived: deque[float] = deque()  # for each of `_ready`, when its last sample arrived
        self._decoding: dict[int, float] = {}  # record being decoded -> when it arrived
        self._read = start.record  # the next record to read
        self._pending = 0
        self._decoded: Counter[str] = Counter()
        self._last = reader.last
        self._refresh_at = 0.0  # when to read the journal's last position again
        self._offset = start  # of the next batch to return
        self._rejected_until = start  # all samples from `_offset` to this offset were rejected
        self._failure: Exception | None = None
        self._closed = False
        keep = None if originals is None else originals.keep
        self._pool = DecodePool(decoder, workers, processes, keep)
        self._thread = threading.Thread(target=self._run, name="batches", daemon=True)
        self._thread.start()

    def next(self, timeout: float) -> Batch[NDArray[Any]] | None:
        """Return the next batch, or None after the timeout or after `close`.

        If the share is `joint`, None also means that the rank has decoded all that the journal
        holds; the rank does not return None while it still decodes. The journal then determines
        which batches the ranks combine in a step. This wait ends after PATIENCE seconds.

        Args:
            timeout: seconds to wait for a batch.

        Raises:
            JournalReplaced: another journal has taken the journal's place.
            RuntimeError: reading or decoding failed, for another reason than a bad sample. Its
                cause is the original error.
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
            self._arrived.popleft()
            self._pending -= len(batch)
            self._offset = batch.offset
            self._change.notify_all()
        if self._originals is not None:
            self._originals.arrived(batch.origins_B or ())
        return batch

    def _ready_or_read(self) -> bool:
        """Return whether a batch is ready, or the journal has no unread records for one."""
        if self._ready or self._failure or self._closed:
            return True
        return not self._decoding and self._read > self._last

    @property
    def journal(self) -> str | None:
        """The id of the journal that is read; before it is known, the id that `share` names."""
        return self._tasks.journal

    @property
    def offset(self) -> Offset:
        """The offset of the first sample that was not returned and not rejected.

        The offset of the last batch does not advance in a stream of only bad samples. A run that
        starts at this offset counts fewer `rejected` samples.
        """
        with self._change:
            return self._offset if self._ready else max(self._offset, self._rejected_until)

    @property
    def unread(self) -> int:
        """The first journal record that still waits to be read.

        Samples that were read and do not fill a batch wait for others and not for the learner. They
        are therefore behind this record.
        """
        with self._change:
            return self._offset.record if self._ready or self._decoding else self._read

    def lag(self) -> float:
        """Return the age of the oldest waiting batch in seconds, since its last sample arrived.

        Records that are being decoded count as a batch. The result is 0 if nothing waits. A jump of
        the system's clock does not change the age of a record that was read before.
        """
        with self._change:
            since = next(iter(self._arrived or self._decoding.values()), math.inf)
            return max(0.0, time.monotonic() - since)

    def waiting(self) -> int:
        """Return the number of journal records that were not returned completely.

        The result is 0 if the remaining samples do not fill a batch. The journal's last position
        may be up to REFRESH seconds old.
        """
        with self._change:
            if not self._ready and not self._decoding and self._read > self._last:
                return 0
            return max(0, self._last + 1 - self._offset.record)

    def pending(self) -> int:
        """Return the number of samples that were read, and neither returned nor `rejected`.

        When the stream pauses and the consumer has taken all batches, fewer good samples than a
        batch remain.
        """
        with self._change:
            return self._pending

    def rejected(self) -> Mapping[tuple[str, str], int]:
        """Return the number of samples in the quarantine so far, by reason and producer.

        The numbers include samples that were read ahead of the next batch, because a stream of bad
        samples may never fill another batch.
        """
        return self._quarantine.counts.copy()

    def unkept(self) -> Mapping[str, int]:
        """Return the number of rejected samples that the quarantine lacks, by reason."""
        return self._quarantine.unkept.copy()

    def decoded(self) -> Mapping[str, int]:
        """Return the number of samples decoded so far, by producer as in `rejected`.

        The numbers include samples that wait for their batch.
        """
        return self._decoded.copy()

    def close(self) -> None:
        """Stop the threads and wait for them; prefetched batches are dropped."""
        with self._change:
            self._closed = True
            self._change.notify_all()
        self._pool.close()  # the thread may wait for an image whose decoding never ends
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _run(self) -> None:
        try:
            tasks = iter(self._tasks)
            decoding: deque[Future[Chunk]] = deque()
            while not self._closed:
                self._look_at_end(at_once=False)
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

    def _submit(self, tasks: Iterator[Task | Event | None]) -> Future[Chunk] | None:
        """Submit the next task to a worker; return None if the journal has no new records."""
        done: Future[Chunk] = Future()
        try:
            while isinstance(task := next(tasks), Event):
                self._count(task)
        except Exception as error:  # raise it only after the records that were read before
            done.set_exception(error)
            return done
        if isinstance(task, DecodeTask):
            return self._pool.submit(task)
        if task is None:
            return None
        done.set_result(task)
        return done

    def _consume(self, chunk: Chunk) -> None:
        """Put the bad samples of a chunk into the quarantine, and the good ones into batches."""
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
                self._look_at_end()
            with self._change:
                self._ready.append(batch)
                self._arrived.append(self._decoding[chunk.record.position])
                self._change.notify_all()
        with self._change:
            self._pending -= len(chunk.rejected)
            if self._batcher.empty and chunk.rejected:
                self._rejected_until = offset_behind(chunk, chunk.end)
            if chunk.last:
                self._decoding.pop(chunk.record.position, None)
                self._change.notify_all()

    def _wait_for_room(self) -> bool:
        """Wait up to REFRESH seconds for the consumer; return whether a batch may be added."""
        with self._change:
            return self._change.wait_for(
                lambda: self._closed or len(self._ready) < PREFETCH, REFRESH
            )

    def _look_at_end(self, at_once: bool = True) -> None:
        """Read the journal's last position; if not `at_once`, only every REFRESH seconds."""
        now = time.monotonic()
        if at_once or now >= self._refresh_at:
            last, self._refresh_at = self._reader.last, now + REFRESH
            with self._change:
                self._last = max(self._last, last)

    def _count(self, event: Event) -> None:
        """Count what happened in the journal before the next task."""
        with self._change:
            match event:
                case ReadFrom(first):
                    self._read = first.record
                    self._offset = self._rejected_until = first
                case RecordRead(record, samples):
                    self._read = record.position + 1
                    self._last = max(self._last, record.position)
                    if samples > 0:
                        age = max(0.0, self._clock() - record.received)
                        self._decoding[record.position] = time.monotonic() - age
                        self._pending += samples
                    else:
                        self._change.notify_all()


class Batcher:
    """A builder of batches from the good samples of chunks, in order."""

    def __init__(self, batch_size: int, decoder: Payloads) -> None:
        self._size = batch_size
        self._shape_BHWC = (batch_size, *decoder.shape_HWC)
        self._filled = 0
        self._rejected: Counter[str] = Counter()
        self._origins: list[Origin | None] = []
        self._batch = self._empty_batch()

    def _empty_batch(self) -> Batch[NDArray[Any]]:
        ids_B, hashes_B, labels_B = np.empty((3, self._size), np.int64)
        received_B = np.empty(self._size, np.float64)
        images_BCHW = np.empty(self._shape_BHWC, np.uint8).transpose(0, 3, 1, 2)
        return Batch(ids_B, hashes_B, labels_B, images_BCHW, received_B)

    @property
    def empty(self) -> bool:
        """Whether the next batch has no samples yet."""
        return self._filled == 0

    def add(self, chunk: Chunk) -> Iterator[Batch[NDArray[Any]]]:
        """Add the good samples of a chunk, and yield the batches that become full."""
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
            self._filled, self._origins, self._rejected = 0, [], Counter()
            self._batch = self._empty_batch()
        self._rejected.update(sample.error.reason for sample in rejected)

    def _take(self, samples: Batch[NDArray[Any]], start: int, count: int) -> None:
        to, source = slice(self._filled, self._filled + count), slice(start, start + count)
        columns = samples.columns()
        for name, filled in self._batch.columns().items():
            filled[to] = columns[name][source]
        self._origins += (samples.origins_B or ())[start : start + count]
        self._filled += count


def offset_behind(chunk: Chunk, sample: int) -> Offset:
    """Return the offset of a chunk's sample, or of the next record at the end of the record."""
    if chunk.last and sample == chunk.end:
        return Offset(chunk.record.position + 1, 0)
    return Offset(chunk.record.position, sample)
