"""A wrapper that adds class bias, duplicates, correlation in time, and a pace to a source."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from stream_ssl.producers.shaping.base import Pairs, Shaping
from stream_ssl.producers.shaping.rate import RateLimit
from stream_ssl.producers.shaping.repeat import NearBy, repeat
from stream_ssl.producers.sources.base import Source, SourceError
from stream_ssl.producers.sources.finite import ENDLESS
from stream_ssl.producers.sources.ranges import check_ranges
from stream_ssl.wire.sample import Position, Sample

Order = Literal["keep", "iid", "sequential", "blurred"]


@dataclass(frozen=True, slots=True)
class Repeats:
    """The duplicates that `Shaped` adds.

    Args:
        duplicates: share of the outputs that are duplicates of a recent sample; 0 to 0.95.
        near: share of the duplicates that differ slightly from their original; 0 to 1.
        near_by: how near-duplicates of raw images differ. "jitter" moves them by up to one pixel,
            changes the brightness and adds noise. "jpeg" encodes them as JPEG of quality 50 to 90,
            which needs Pillow. Encoded images are always encoded again as such a JPEG.
        recent: how many of the last originals may get a duplicate; 1 or more.

    Raises:
        ValueError: an argument is out of range.
    """

    duplicates: float = 0.0
    near: float = 1.0
    near_by: NearBy = "jitter"
    recent: int = 256

    def __post_init__(self) -> None:
        check_ranges(
            ("duplicates", self.duplicates, 0.0, 0.95),
            ("near", self.near, 0.0, 1.0),
            ("recent", self.recent, 1, 2**31),
        )


class Shaped(Shaping):
    """A source that thins, reorders and repeats the samples of another source, window by window.

    The bias is defined as in the experiments of DUEL. The dominant class keeps all samples. Every
    other class keeps one sample in `bias` on average. If the C classes of the source are equally
    frequent, the dominant class gets the share bias / (bias + C - 1).

    Each output is a duplicate with probability `duplicates`. Its original is drawn uniformly from
    the last `recent` originals of the window. A duplicate has a new id, and meta "duplicate_of"
    and "duplicate" ("exact" or "near").

    All randomness is a function of the seed and the window's number. A position stores where its
    window begins in the source. To resume, the window is read again, so the source must still have
    its samples in the same order. If only `rate` and `limit` are set, no sample is read again.

    Args:
        source: the source to shape.
        bias: how many times more frequent the dominant class becomes; 1 or more.
        dominant: the label of the dominant class.
        order: "keep" keeps the order of the source. "iid" permutes the window. "sequential" sorts
            the window by class. "blurred" also mixes the class borders. All orders except "keep"
            wait for a whole window.
        window: number of samples that are read from the source at a time.
        blur: width of the mixed borders, in samples. Every sample moves by less than this.
        rate: samples per second; null: no limit. It is not part of the position.
        limit: end after this many samples from the start of the stream; null: no limit. A source
            that continues from a position counts the samples before it. The limit is not part of
            the position.
        seed: the key of all randomness.
        repeats: the arguments of `Repeats`: `duplicates`, `near`, `near_by` and `recent`.

    Raises:
        ValueError: an argument is out of range. While running: a sample has no label, and the bias
            or the order needs one.
        ImportError: a near-duplicate needs Pillow, which is not installed; raised while running.
    """

    def __init__(
        self,
        source: Source,
        bias: float = 1.0,
        dominant: int = 0,
        order: Order = "keep",
        window: int = 1024,
        blur: int = 64,
        rate: float | None = None,
        limit: int | None = None,
        seed: int = 0,
        **repeats: Any,
    ) -> None:
        check_ranges(
            ("bias", bias, 1.0, 1e9),
            ("window", window, 1, 2**31),
            ("blur", blur, 1, 2**31),
            ("limit", limit, 0, ENDLESS),
            ("seed", seed, 0, ENDLESS),
        )
        if rate is not None:
            RateLimit(rate)
        again = self._repeats = Repeats(**repeats)
        self._stopped = threading.Event()
        # Whether the samples pass through unchanged, each once and in the order of the source.
        self.plain = bias == 1 and order == "keep" and not again.duplicates
        self.rate, self.limit = rate, limit
        self._bias, self._dominant = bias, dominant
        self._order, self._window, self._blur = order, window, blur
        self._seed = seed
        super().__init__(
            source,
            bias=bias,
            dominant=dominant if bias > 1 else None,
            duplicates=again.duplicates,
            near=f"{again.near} {again.near_by} {again.recent}" if again.duplicates else None,
            order=order,
            window=window,
            blur=blur if order == "blurred" else None,
            seed=seed,
        )

    def samples(self, position: Position = None) -> Pairs:
        """Yield each sample with the position after it; see `Source`."""
        (window, skip, sent), inner = self._place(position, 3)
        taken = self.source.samples(inner)
        return self._paced(self._run(taken, inner, window, skip, sent), sent)

    def stop(self) -> None:
        """Stop a stream that waits for its rate or its source. Any thread may call this."""
        self._stopped.set()
        super().stop()

    def _paced(self, shaped: Pairs, sent: int) -> Pairs:
        if self.limit is not None:
            shaped = itertools.islice(shaped, max(self.limit - sent, 0))
        if self.rate is None:
            yield from shaped
            return
        limiter = RateLimit(self.rate, sleep=self._stopped.wait)
        for item in shaped:
            if not limiter.wait():
                return
            yield item

    def _run(self, taken: Pairs, inner: Position, window: int, skip: int, sent: int) -> Pairs:
        if self.plain:
            # Positions of the source suffice here. A live source or a crawl cannot be read again.
            for sample, position in itertools.islice(taken, skip, None):
                sent += 1
                yield sample, self._mark([0, 0, sent], position)
            return
        for number in itertools.count(window):
            after = [inner]  # where the next window begins, once this one has been taken
            outputs = self._shape(self._take(taken, after), number)
            for offset, sample in enumerate(outputs, start=1):
                if offset > skip:
                    sent += 1
                    yield sample, self._mark([number, offset, sent], inner)
            if len(after) <= self._window:
                return
            inner, skip = after[-1], 0

    def _take(self, taken: Pairs, after: list[Position]) -> Iterator[Sample]:
        for sample, position in itertools.islice(taken, self._window):
            after.append(position)
            yield sample

    def _shape(self, window: Iterator[Sample], number: int) -> Iterator[Sample]:
        # Each stage has its own generator, so that a change in one stage keeps the others' draws.
        thinning, ordering, repeating = (
            np.random.default_rng([self._seed, number, stage]) for stage in range(3)
        )
        return self._repeat(
            self._reorder(self._thin(window, thinning), ordering), repeating, number
        )

    def _thin(self, window: Iterator[Sample], rng: np.random.Generator) -> Iterator[Sample]:
        if self._bias == 1:
            yield from window
            return
        keep = (rng.random(self._window) * self._bias < 1).tolist()
        for sample, kept in zip(window, keep, strict=False):
            if self._label(sample) == self._dominant or kept:
                yield sample

    def _reorder(self, window: Iterator[Sample], rng: np.random.Generator) -> Iterator[Sample]:
        if self._order == "keep":
            yield from window
            return
        samples = list(window)
        if self._order == "iid":
            rank = rng.permutation(len(samples))
        else:
            rank = np.argsort([self._label(sample) for sample in samples], kind="stable")
            if self._order == "blurred":
                rank = rank[np.argsort(np.arange(len(rank)) + rng.random(len(rank)) * self._blur)]
        for index in rank.tolist():
            yield samples[index]

    def _repeat(
        self, window: Iterator[Sample], rng: np.random.Generator, number: int
    ) -> Iterator[Sample]:
        again = self._repeats
        if again.duplicates == 0:
            yield from window
            return
        # Independent draws decide whether an output is a duplicate, so the number of duplicates
        # between two originals is geometric.
        runs = (rng.geometric(1 - again.duplicates, self._window) - 1).tolist()
        originals: list[Sample] = []
        made = 0
        for sample, run in zip(window, runs, strict=False):
            yield sample
            originals.append(sample)
            del originals[: -again.recent]
            for _ in range(run):
                near = again.near_by if rng.random() < again.near else None
                original = originals[int(rng.integers(len(originals)))]
                yield repeat(original, f"{number}.{made}", near, rng)
                made += 1

    def _label(self, sample: Sample) -> int:
        if sample.label is None:
            raise SourceError(
                f"source {self.name!r}: sample {sample.id!r} carries no label, which bias and the "
                'orders "sequential" and "blurred" need; set bias to 1 and order to "keep" or "iid"'
            )
        return sample.label
