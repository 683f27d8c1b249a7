"""A wrapper that gives a labelled source a dominant class, which changes over time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from stream_ssl.producers.shaping.base import Pairs, Shaping, in_turn
from stream_ssl.producers.sources.base import Source, SourceError
from stream_ssl.producers.sources.finite import ENDLESS
from stream_ssl.producers.sources.ranges import check_ranges
from stream_ssl.wire.sample import Position

DRAWS = 1024  # random numbers drawn at once


class Shift(Shaping):
    """A source whose dominant class changes after every `period` samples.

    The dominant class keeps all samples. Samples of the other classes are dropped at random: one in
    `bias` is kept on average. Each class dominates once a round, and each round has a new order.

    All randomness is a function of the seed and the sample's number in the source.

    Args:
        source: the source to thin. Every sample needs a label.
        classes: number of classes of the source, labelled 0, 1, ...
        period: samples of the stream until the next class dominates.
        bias: how many times more frequent the dominant class becomes; 1 or more.
        seed: the key of all randomness.

    Raises:
        ValueError: an argument is out of range. While running: a sample has no label.
    """

    def __init__(
        self,
        source: Source,
        classes: int = 10,
        period: int = 5000,
        bias: float = 9.0,
        seed: int = 0,
    ) -> None:
        check_ranges(
            ("classes", classes, 1, 2**20),
            ("period", period, 1, 2**62),
            ("bias", bias, 1.0, 1e9),
            ("seed", seed, 0, ENDLESS),
        )
        self._classes, self._period, self._bias, self._seed = classes, period, bias, seed
        super().__init__(source, classes=classes, period=period, bias=bias, seed=seed)

    def samples(self, position: Position = None) -> Pairs:
        """Yield each sample with the position after it; see `Source`."""
        (read, sent), inner = self._place(position, 2)
        return self._run(self.source.samples(inner), read, sent)

    def dominant(self, sent: int) -> int:
        """Return the class that dominates after `sent` samples of the stream."""
        return in_turn(sent // self._period, self._classes, self._seed, 1)

    def _run(self, source: Pairs, read: int, sent: int) -> Pairs:
        dominant, draw_N = self.dominant(sent), self._draws(read // DRAWS)
        for number, (sample, after) in enumerate(source, start=read):
            if number % DRAWS == 0:
                draw_N = self._draws(number // DRAWS)
            if sample.label is None:
                raise SourceError(
                    f"source {self.name!r}: sample {sample.id!r} carries no label, which a shift "
                    "of classes needs; give a labelled source"
                )
            if sample.label == dominant or draw_N[number % DRAWS] * self._bias < 1:
                sent += 1
                yield sample, self._mark([number + 1, sent], after)
                if sent % self._period == 0:
                    dominant = self.dominant(sent)

    def _draws(self, block: int) -> NDArray[np.float64]:
        return np.random.default_rng([self._seed, 0, block]).random(DRAWS)
