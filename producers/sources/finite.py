"""Base class of sources that can read any of their samples by index."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from stream_ssl.producers.sources.base import Facts, Skipped, mark, place
from stream_ssl.producers.sources.fields import digest
from stream_ssl.producers.sources.passes import Passes, no_sample
from stream_ssl.producers.sources.ranges import check_ranges
from stream_ssl.wire.sample import Position, Sample

ENDLESS = 2**62


class Finite(Passes[int]):
    """A source of `count` samples that sends whole or partial passes in an order fixed by a seed.

    A sample that cannot be read is logged, counted in `skipped` and left out.

    Args:
        skipped: the counter of samples that are left out, made with the source's name.
        count: number of samples.
        content: identifies the files, so that a position is rejected if the files change.
        shuffle: whether to send each pass in a new order, computed from the seed and the number of
            the pass. False sends the stored order.
        seed: seed of the orders, 0 or more.
        epochs: number of passes, 1 or more; null: endless.
        subset: the samples to send, as a Python slice "start:stop:step" or a list of indices.

    Raises:
        ValueError: an argument is out of range, or there is no sample.
    """

    def __init__(
        self,
        skipped: Skipped,
        count: int,
        content: str,
        shuffle: bool = True,
        seed: int = 0,
        epochs: int | None = 1,
        subset: list[int] | str | None = None,
    ) -> None:
        check_ranges(("seed", seed, 0, math.inf))
        super().__init__(skipped, epochs)
        self.shuffle, self.seed = shuffle, seed
        if count == 0:
            raise no_sample(self.name)
        self._index_N = select(count, subset)
        if len(self._index_N) == 0:
            raise ValueError(f"source {self.name!r}: subset {subset!r} of {count} samples is empty")
        self._facts: Facts = {
            "source": self.name,
            "content": content,
            "samples": digest([self._index_N.tobytes()]),
            "shuffle": shuffle,
            "seed": seed if shuffle else None,
        }

    def __len__(self) -> int:
        """Return the number of samples in one pass."""
        return len(self._index_N)

    def samples(self, position: Position = None) -> Iterator[tuple[Sample, Position]]:
        """Yield each sample with the position after it; see `Source`."""
        epoch, done = place(position, self._facts, self.name, (ENDLESS, len(self)))
        return self._passes(epoch, done or None)

    def _pass(self, epoch: int, start: int | None) -> Iterator[tuple[Sample, Position]]:
        done = start or 0
        for step, index in enumerate(self._order(epoch)[done:].tolist(), start=done + 1):
            if self._stopped.is_set():
                return
            try:
                sample = self._sample(index)
            except OSError as error:
                self.skipped.note("unreadable", f"sample {index}", error)
                continue
            if sample is not None:
                yield sample, mark([epoch, step], self._facts)

    def _order(self, epoch: int) -> NDArray[np.int64]:
        if not self.shuffle:
            return self._index_N
        return np.random.default_rng([self.seed, epoch]).permutation(self._index_N)

    @abstractmethod
    def _sample(self, index: int) -> Sample | None:
        """Return the sample stored at `index`, or None if `skipped` has counted why it is left out.

        Raises:
            OSError: the file of the sample cannot be read.
        """


def select(count: int, subset: list[int] | str | None) -> NDArray[np.int64]:
    """Return the indices that `subset` selects, in the order of `subset`.

    Raises:
        ValueError: `subset` is not a valid slice, or an index lies outside [0, count).
    """
    if subset is None:
        return np.arange(count)
    if isinstance(subset, str):
        try:
            parts = [int(part) if part.strip() else None for part in subset.split(":")]
            if not 2 <= len(parts) <= 3:
                raise ValueError
            return np.arange(count)[slice(*parts)]
        except ValueError:
            raise ValueError(
                f'subset {subset!r}: must be a slice such as "0:9000" or a list of indices'
            ) from None
    index_N = np.asarray(subset, dtype=np.int64)
    outside = index_N[(index_N < 0) | (index_N >= count)]
    if len(outside):
        raise ValueError(f"subset: index {outside[0]} lies outside [0, {count})")
    return index_N
