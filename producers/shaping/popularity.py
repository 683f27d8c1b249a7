"""A wrapper that repeats a source's first images, with frequencies by a Zipf law."""

from __future__ import annotations

import itertools

import numpy as np

from stream_ssl.producers.shaping.base import Pairs, Shaping
from stream_ssl.producers.shaping.repeat import frame_of, pixels_of, seen_again
from stream_ssl.producers.sources.base import Source
from stream_ssl.producers.sources.finite import ENDLESS
from stream_ssl.producers.sources.ranges import check_ranges
from stream_ssl.wire.sample import Position, Sample


class Popularity(Shaping):
    """An endless source of near-duplicates, in which few images are frequent and most are rare.

    A crawler sees images with such frequencies. The source's first images are ranked in the order
    of the source, so shuffle a sorted source. Each sample is one of these images, moved by some
    pixels and noised. The image of rank r = 1, 2, ... is drawn with probability proportional to
    r^-exponent.

    A sample has the id IMAGE~N, where N is its number in the stream. Its meta has "duplicate_of",
    "duplicate" ("near", or "exact" if no byte differs) and "rank".

    All randomness is a function of the seed and N. To resume, the first images are read again, so
    the source must give the same images.

    Args:
        source: the source of the images.
        images: number of images. They are kept in memory.
        exponent: exponent of the Zipf law, 0 to 10. 0 makes all images equally frequent.
        shift: maximum move in each direction, in pixels.
        noise: maximum change of a pixel, in levels of 0 to 255.
        seed: the key of all randomness.

    Raises:
        ValueError: an argument is out of range. While running: the source has too few images, or
            the first images changed since the position was taken.
        ImportError: an image is encoded, and Pillow is not installed; raised while running.
    """

    def __init__(
        self,
        source: Source,
        images: int = 1000,
        exponent: float = 1.2,
        shift: int = 2,
        noise: int = 4,
        seed: int = 0,
    ) -> None:
        check_ranges(
            ("images", images, 1, 2**24),
            ("exponent", exponent, 0.0, 10.0),
            ("shift", shift, 0, 4096),
            ("noise", noise, 0, 255),
            ("seed", seed, 0, ENDLESS),
        )
        self._images, self._shift, self._noise, self._seed = images, shift, noise, seed
        weight_R = np.arange(1, images + 1, dtype=np.float64) ** -exponent
        self._chance_R = np.cumsum(weight_R) / weight_R.sum()  # P(rank <= r)
        super().__init__(
            source, images=images, exponent=exponent, jitter=f"{shift} {noise}", seed=seed
        )

    def samples(self, position: Position = None) -> Pairs:
        """Yield each sample with the position after it; see `Source`."""
        (sent,), _ = self._place(position, 1)
        seen = None if position is None else position.get("seen")
        return self._run(self.source.samples(), seen, sent)

    def _run(self, source: Pairs, seen: str | None, sent: int) -> Pairs:
        first, found = self._first(source, self._images, "images", seen)
        ranked = [sample for sample, _ in first]
        for number in itertools.count(sent):
            position = {"at": [number + 1], "seen": found, "of": self._facts}
            yield self._meet(ranked, number), position

    def _meet(self, ranked: list[Sample], number: int) -> Sample:
        rng = np.random.default_rng([self._seed, number])
        rank = int(np.searchsorted(self._chance_R[:-1], rng.random(), side="right"))
        sample = ranked[rank]
        if (image_HWC := pixels_of(sample)) is not None:
            image_HWC = seen_again(image_HWC, rng, self._shift, 0.0, self._noise)
        return frame_of(sample, number, image_HWC, rng, rank=rank + 1)
