"""Any source's first images, met again and again by a Zipf law."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from stream_ssl.producers.shaping.base import Shaping
from stream_ssl.producers.shaping.parked import pixels_of, seen_again
from stream_ssl.producers.shaping.repeat import encode, from_pixels
from stream_ssl.producers.sources.base import Source, place, wrong_position
from stream_ssl.producers.sources.fields import check_ranges, digest, fitting_meta, short_id
from stream_ssl.producers.sources.finite import ENDLESS
from stream_ssl.wire.sample import Position, Sample


class Popularity(Shaping):
    """Few images are met very often and most hardly ever, as by a crawler.

    The source's first images are ranked in its order, so shuffle one that is sorted. Each sample is
    one of them, drawn with P(rank r) in proportion to r^-exponent, r = 1, 2, ...: moved by some
    pixels and noised. It has the id IMAGE~N, N its number in the stream, and meta "duplicate_of",
    "duplicate" ("near", or "exact" where nothing differs) and "rank". The stream never ends.

    All randomness is a function of seed and N. To go on, the first images are read again: the
    source must give the same ones.

    Args:
        source: whose images.
        images: how many of them; kept in memory as the source gives them.
        exponent: of the law; 0: all are met as often.
        shift: largest move in each direction, in pixels.
        noise: largest change of a pixel, in levels.
        seed: the key of all randomness.

    Raises:
        ValueError: an argument lies outside its range; while running, the source has fewer images,
            an image cannot be decoded, or is another than when a position was taken.
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
        self._chance_R = np.cumsum(weight_R) / weight_R.sum()  # of this rank or a smaller one
        super().__init__(
            source, images=images, exponent=exponent, jitter=f"{shift} {noise}", seed=seed
        )

    def samples(self, position: Position = None) -> Iterator[tuple[Sample, Position]]:
        """Each sample with the position after it; see `Source`."""
        (sent,) = place(position, self._facts, self.name, (ENDLESS,))
        seen = None if position is None else position.get("seen")
        return self._run(self.source.samples(), seen, sent)

    def _run(
        self, source: Iterator[tuple[Sample, Position]], seen: str | None, sent: int
    ) -> Iterator[tuple[Sample, Position]]:
        ranked = [sample for sample, _ in itertools.islice(source, self._images)]
        if len(ranked) < self._images:
            raise ValueError(
                f"source {self.name!r} has {len(ranked)} images, not {self._images}: set images to "
                "fewer, or give it more"
            )
        found = digest(bytes(sample.data) for sample in ranked)
        if seen not in (None, found):
            raise wrong_position(self.name, "its first images, which are met again, are others now")
        for number in itertools.count(sent):
            position = {"at": [number + 1], "seen": found, "of": self._facts}
            yield self._meet(ranked, number), position

    def _meet(self, ranked: list[Sample], number: int) -> Sample:
        rng = np.random.default_rng([self._seed, number])
        rank = int(np.searchsorted(self._chance_R[:-1], rng.random(), side="right"))
        sample = ranked[rank]
        image_HWC = seen_again(pixels_of(sample), rng, self._shift, 0.0, self._noise)
        data, codec = image_HWC.tobytes(), sample.codec
        if codec != "raw":
            data, codec = encode(from_pixels(image_HWC), rng), "jpeg"
        kind = "exact" if data == sample.data else "near"
        facts = {"duplicate_of": sample.id, "duplicate": kind, "rank": rank + 1}
        return replace(
            sample,
            id=short_id(f"{sample.id}~{number}"),
            data=data,
            codec=codec,
            time=time.time(),
            meta=fitting_meta(facts, sample.meta or {}),
        )
