"""Builds batches of one size from decoded chunks of journal records.

Shapes: B samples, C channels, H height, W width.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stream_ssl.batch import Batch, Offset, Origin
from stream_ssl.feed.decode import Chunk, Payloads


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
