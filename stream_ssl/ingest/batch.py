"""One batch, and how pieces of records are joined to it.

Legend: B batch, H height, W width, C channels.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from stream_ssl.ingest.decode import Decoder, Pixels
from stream_ssl.ingest.offset import Offset
from stream_ssl.ingest.pieces import Piece


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Samples ready to be learned from.

    Attributes:
        image_BHWC: uint8 pixels.
        key_B: 63-bit number of source and id, >= 0: equal for two sendings of one sample.
        hash_B: 63-bit number of the pixels, > 0: equal for equal pixels.
        label_B: class, or -1 where the stream carries none.
        time_B: capture time, seconds since the Unix epoch.
        received_B: when the receiver took it, likewise.
        offset: the first sample after this batch; Batches(start=offset) goes on from there.
        rejected: samples left out since the batch before, by reason.
    """

    image_BHWC: Pixels = field(repr=False)
    key_B: NDArray[np.int64] = field(repr=False)
    hash_B: NDArray[np.int64] = field(repr=False)
    label_B: NDArray[np.int64] = field(repr=False)
    time_B: NDArray[np.float64] = field(repr=False)
    received_B: NDArray[np.float64] = field(repr=False)
    offset: Offset
    rejected: Mapping[str, int]

    def __len__(self) -> int:
        return len(self.key_B)


class Filler:
    """Joins pieces, in order, to batches."""

    def __init__(self, batch_size: int, decoder: Decoder) -> None:
        self._size = batch_size
        self._shape = (batch_size, decoder.size, decoder.size, decoder.channels)
        self._begin()

    def _begin(self) -> None:
        self._filled = 0
        self._rejected: Counter[str] = Counter()
        self._image_BHWC = np.empty(self._shape, np.uint8)
        self._key_B, self._hash_B, self._label_B = np.empty((3, self._size), np.int64)
        self._time_B, self._received_B = np.empty((2, self._size), np.float64)

    @property
    def empty(self) -> bool:
        """Whether no sample waits for its batch to be full."""
        return self._filled == 0

    def add(self, piece: Piece) -> Iterator[Batch]:
        """The batches that this piece completes."""
        taken, good, bad = 0, len(piece.index_N), deque(piece.bad)
        while taken < good:
            count = min(self._size - self._filled, good - taken)
            self._take(piece, taken, count)
            taken += count
            if self._filled < self._size:
                break
            after = int(piece.index_N[taken - 1]) + 1
            while bad and bad[0].index < after:
                self._rejected[bad.popleft().error.reason] += 1
            yield self._batch(offset_behind(piece, after))
            self._begin()
        self._rejected.update(sample.error.reason for sample in bad)

    def _take(self, piece: Piece, start: int, count: int) -> None:
        to, source = slice(self._filled, self._filled + count), slice(start, start + count)
        self._image_BHWC[to] = piece.image_NHWC[source]
        self._key_B[to] = piece.key_N[source]
        self._hash_B[to] = piece.hash_N[source]
        self._label_B[to] = piece.label_N[source]
        self._time_B[to] = piece.time_N[source]
        self._received_B[to] = piece.record.received
        self._filled += count

    def _batch(self, offset: Offset) -> Batch:
        return Batch(
            image_BHWC=self._image_BHWC,
            key_B=self._key_B,
            hash_B=self._hash_B,
            label_B=self._label_B,
            time_B=self._time_B,
            received_B=self._received_B,
            offset=offset,
            rejected=dict(self._rejected),
        )


def offset_behind(piece: Piece, sample: int) -> Offset:
    """The offset of a piece's sample; where that is the record's end, of the next record."""
    if piece.last and sample == piece.end:
        return Offset(piece.record.position + 1, 0)
    return Offset(piece.record.position, sample)
