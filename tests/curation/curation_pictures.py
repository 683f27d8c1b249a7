"""A source of pictures with copies, for the tests of curation."""

from __future__ import annotations

import io
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from stream_ssl.producers.sources.base import mark, place
from stream_ssl.wire.sample import Position, Sample

DIFFERENT = 300
COUNT = 900


def picture(number: int) -> NDArray[np.uint8]:
    """Return one of many different pictures, uint8 [48, 48, 3]."""
    rng = np.random.default_rng(number)
    layers = [
        np.asarray(
            Image.fromarray(rng.integers(0, 256, (side, side, 3), dtype=np.uint8)).resize(
                (48, 48), Image.Resampling.BICUBIC
            ),
            float,
        )
        for side in (4, 8)
    ]
    return np.mean(layers, axis=0).astype(np.uint8)


def jpeg(pixels: NDArray[np.uint8], quality: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=quality)
    return file.getvalue()


class Crawl:
    """COUNT samples that show DIFFERENT pictures at several qualities, and some damaged files."""

    name = "crawl"

    def __init__(self, ends_at: int = COUNT) -> None:
        self._ends_at = ends_at
        rng = np.random.default_rng(7)
        self.original_N = np.concatenate(
            [rng.permutation(DIFFERENT), rng.integers(0, DIFFERENT, COUNT - DIFFERENT)]
        )

    def samples(self, position: Position = None) -> Iterator[tuple[Sample, Position]]:
        (first,) = place(position, {}, self.name, limits=(COUNT,))
        for number in range(first, self._ends_at):
            original = int(self.original_N[number])
            data = jpeg(picture(original), 95 if number < DIFFERENT else 40 + number % 50)
            if number % 100 == 50:
                data = data[:100]
            sample = Sample(
                f"{number}", data, codec="jpeg", source=self.name, label=original % 10, time=1.0
            )
            yield sample, mark([number + 1], {})
