"""Any source whose images each become an episode: a stalled camera's, or a moving one's.

Shapes: H x W pixels, C channels; a crop is h x w.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from stream_ssl.producers.shaping.base import Shaping
from stream_ssl.producers.shaping.parked import pixels_of
from stream_ssl.producers.shaping.repeat import encode, from_pixels
from stream_ssl.producers.sources.base import Facts, Source, place
from stream_ssl.producers.sources.fields import check_ranges, fitting_meta, short_id
from stream_ssl.producers.sources.finite import ENDLESS
from stream_ssl.wire.sample import Position, Sample


class Stalls(Shaping):
    """A camera that stalls: some images come many times over, exactly as they are.

    At each image an episode begins with probability `rate`. It has L frames in all, of a Pareto
    law: P(L >= l) = (2 / l)^alpha for l = 2, 3, ..., cut at `longest`. With alpha at most 1
    the mean length is bounded by `longest` alone. The first frame is the image itself; the others
    have the id IMAGE~N, N = 1, 2, ..., and meta "duplicate_of" and "duplicate" ("exact").

    Args:
        source: whose images.
        rate: chance that an image stalls, 0 to 1.
        alpha: exponent of the law; the smaller, the longer the longest stalls.
        longest: frames of an episode at most, 2 or more.
        seed: the key of all randomness, which is a function of seed and image.

    Raises:
        ValueError: an argument lies outside its range.
    """

    def __init__(
        self,
        source: Source,
        rate: float = 0.05,
        alpha: float = 1.2,
        longest: int = 10_000,
        seed: int = 0,
    ) -> None:
        check_ranges(
            ("rate", rate, 0.0, 1.0),
            ("alpha", alpha, 0.01, 100.0),
            ("longest", longest, 2, 2**31),
            ("seed", seed, 0, ENDLESS),
        )
        self._rate, self._alpha, self._longest, self._seed = rate, alpha, longest, seed
        super().__init__(source, rate=rate, alpha=alpha, longest=longest, seed=seed)

    def samples(self, position: Position = None) -> Iterator[tuple[Sample, Position]]:
        """Each sample with the position after it; see `Source`."""
        return _episodes(self.source, position, self._facts, self._length, self._frame)

    def _length(self, number: int) -> int:
        rng = np.random.default_rng([self._seed, number])
        if rng.random() >= self._rate:
            return 1
        return int(min(2 * (1 - rng.random()) ** (-1 / self._alpha), self._longest))

    def _frame(self, sample: Sample, number: int, step: int) -> Sample:  # noqa: ARG002
        if step == 0:
            return sample
        facts = {"duplicate_of": sample.id, "duplicate": "exact"}
        return replace(
            sample,
            id=short_id(f"{sample.id}~{step}"),
            time=time.time(),
            meta=fitting_meta(facts, sample.meta or {}),
        )


class Video(Shaping):
    """A camera that pans and zooms over each image, for some frames each.

    A frame is a crop of the image, as large as the image after bilinear resizing, and noised. The
    crop goes evenly, in size and place, from one end of a path to the other; the ends are drawn
    evenly, sizes from 1 - zoom to 1 of the image's. Frames have the id IMAGE~N, N = 0, 1, ...,
    and meta "duplicate_of", "duplicate" ("near") and "frame" (N). Encoded images are sent as JPEG.

    Args:
        source: whose images.
        frames: of each image.
        zoom: part of a side by which the smallest crop is shorter, 0 to 0.95.
        noise: largest change of a pixel, in levels.
        seed: the key of all randomness, which is a function of seed, image and frame.

    Raises:
        ValueError: an argument lies outside its range; while running, an image cannot be decoded.
        ImportError: an image is encoded, and Pillow is not installed; raised while running.
    """

    def __init__(
        self, source: Source, frames: int = 30, zoom: float = 0.3, noise: int = 4, seed: int = 0
    ) -> None:
        check_ranges(
            ("frames", frames, 1, 2**31),
            ("zoom", zoom, 0.0, 0.95),
            ("noise", noise, 0, 255),
            ("seed", seed, 0, ENDLESS),
        )
        self._frames, self._zoom, self._noise, self._seed = frames, zoom, noise, seed
        super().__init__(source, frames=frames, zoom=zoom, noise=noise, seed=seed)

    def samples(self, position: Position = None) -> Iterator[tuple[Sample, Position]]:
        """Each sample with the position after it; see `Source`."""
        return _episodes(self.source, position, self._facts, lambda _: self._frames, self._frame)

    def _frame(self, sample: Sample, number: int, step: int) -> Sample:
        top, left, size = self._crop(number, step)
        rng = np.random.default_rng([self._seed, 1, number, step])
        level_HWC = crop_resized(pixels_of(sample), top, left, size)
        level_HWC += rng.integers(-self._noise, self._noise + 1, level_HWC.shape, dtype=np.int16)
        image_HWC = np.clip(np.rint(level_HWC), 0, 255).astype(np.uint8)
        data, codec = image_HWC.tobytes(), sample.codec
        if codec != "raw":
            data, codec = encode(from_pixels(image_HWC), rng), "jpeg"
        facts = {"duplicate_of": sample.id, "duplicate": "near", "frame": step}
        return replace(
            sample,
            id=short_id(f"{sample.id}~{step}"),
            data=data,
            codec=codec,
            time=time.time(),
            meta=fitting_meta(facts, sample.meta or {}),
        )

    def _crop(self, number: int, step: int) -> tuple[float, float, float]:
        """Top, left and size of a frame's crop, in parts of the image's sides."""
        draw = np.random.default_rng([self._seed, 0, number]).random((2, 3))
        part = step / (self._frames - 1) if self._frames > 1 else 0.0
        size_2 = 1 - self._zoom * draw[:, 2]
        ends_23 = np.stack([*(draw[:, axis] * (1 - size_2) for axis in (0, 1)), size_2], axis=1)
        top, left, size = (1 - part) * ends_23[0] + part * ends_23[1]
        return float(top), float(left), float(size)


def crop_resized(
    image_HWC: NDArray[np.uint8], top: float, left: float, size: float
) -> NDArray[np.float32]:
    """The crop as large as the image, by bilinear interpolation; arguments in parts of a side."""
    level_HWC = image_HWC.astype(np.float32)
    for axis, begin in ((0, top), (1, left)):
        side = image_HWC.shape[axis]
        # Centres of the crop's pixels, in pixels of the image.
        at = np.clip((begin + size * (np.arange(side) + 0.5) / side) * side - 0.5, 0, side - 1)
        low = np.floor(at).astype(np.int64)
        shape = (-1, 1, 1) if axis == 0 else (1, -1, 1)
        weight = (at - low).astype(np.float32).reshape(shape)
        below, above = (
            np.take(level_HWC, index, axis) for index in (low, np.minimum(low + 1, side - 1))
        )
        level_HWC = below + weight * (above - below)
    return level_HWC


def _episodes(
    source: Source,
    position: Position,
    facts: Facts,
    length: Callable[[int], int],
    frame: Callable[[Sample, int, int], Sample],
) -> Iterator[tuple[Sample, Position]]:
    """Frames of each image in turn; a position is image, frame, and where the image is."""
    number, done = place(position, facts, source.name, (ENDLESS,) * 2)
    inner = None if position is None else position.get("inner")
    # Here, not at the first sample: the inner source's errors are the caller's to see now.
    return _frames(source.samples(inner), inner, number, done, facts, length, frame)


def _frames(
    images: Iterator[tuple[Sample, Position]],
    inner: Position,
    first: int,
    done: int,
    facts: Facts,
    length: Callable[[int], int],
    frame: Callable[[Sample, int, int], Sample],
) -> Iterator[tuple[Sample, Position]]:
    for number, (sample, after) in zip(itertools.count(first), images, strict=False):
        count = length(number)
        for step in range(done, count):
            over = step + 1 == count
            at, where = ([number + 1, 0], after) if over else ([number, step + 1], inner)
            yield frame(sample, number, step), {"at": at, "inner": where, "of": facts}
        inner, done = after, 0
