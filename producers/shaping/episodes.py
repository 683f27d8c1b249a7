"""Wrappers that turn each image of a source into an episode of a stalled or a moving camera.

Shapes: H x W pixels, C channels.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray

from stream_ssl.producers.shaping.base import Pairs, Shaping
from stream_ssl.producers.shaping.repeat import frame_of, pixels_of, sent_again
from stream_ssl.producers.sources.base import Source
from stream_ssl.producers.sources.finite import ENDLESS
from stream_ssl.producers.sources.ranges import check_ranges
from stream_ssl.wire.sample import Position, Sample


class Episodes(Shaping, ABC):
    """A source that turns each image into an episode of frames.

    A position stores the number of the image and of the frame, and the source's own position.
    """

    def samples(self, position: Position = None) -> Pairs:
        """Yield each sample with the position after it; see `Source`."""
        (number, done), inner = self._place(position, 2)
        return self._run(self.source.samples(inner), inner, number, done)

    def _run(self, images: Pairs, inner: Position, first: int, done: int) -> Pairs:
        for number, (sample, after) in enumerate(images, start=first):
            count = self._length(number)
            for step in range(done, count):
                over = step + 1 == count
                at, where = ([number + 1, 0], after) if over else ([number, step + 1], inner)
                yield self._frame(sample, number, step), self._mark(at, where)
            inner, done = after, 0

    @abstractmethod
    def _length(self, number: int) -> int:
        """Return the number of frames of an image."""

    @abstractmethod
    def _frame(self, sample: Sample, number: int, step: int) -> Sample:
        """Return a frame of an image."""


class Stalls(Episodes):
    """A source that repeats some images exactly and many times, as a stalled camera does.

    An episode begins at each image with probability `rate`. The number of its frames, L, follows a
    Pareto law: P(L >= l) = (2 / l)^alpha for l = 2, 3, ..., cut at `longest`. If alpha is at most
    1, only `longest` bounds the mean length. The first frame is the image itself. The other frames
    have the id IMAGE~N, N = 1, 2, ..., and meta "duplicate_of" and "duplicate" ("exact").

    Args:
        source: the source of the images.
        rate: probability that an image stalls; 0 to 1.
        alpha: exponent of the law, 0.01 to 100. Smaller values give longer stalls.
        longest: maximum number of frames of an episode; 2 or more.
        seed: the key of all randomness, which is a function of the seed and the image's number.

    Raises:
        ValueError: an argument is out of range.
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

    def _length(self, number: int) -> int:
        rng = np.random.default_rng([self._seed, number])
        if rng.random() >= self._rate:
            return 1
        try:
            return int(min(2 * (1 - rng.random()) ** (-1 / self._alpha), self._longest))
        except OverflowError:  # a small alpha gives lengths that no float holds
            return self._longest

    def _frame(self, sample: Sample, number: int, step: int) -> Sample:  # noqa: ARG002
        if step == 0:
            return sample
        return sent_again(sample, step, {"duplicate": "exact"}, time=time.time())


class Video(Episodes):
    """A source that makes a short video of each image, as a camera that pans and zooms does.

    A frame is a crop of the image, resized to the image's size (bilinear) and noised. The size and
    place of the crop change linearly from the first frame to the last. Both ends are drawn
    uniformly, with sizes from 1 - zoom to 1 of the image's sides.

    Frames have the id IMAGE~N, N = 0, 1, ..., and meta "duplicate_of", "duplicate" ("near", or
    "exact" if no byte differs) and "frame" (N). Frames of encoded images are sent as JPEG.

    Args:
        source: the source of the images.
        frames: number of frames of each image.
        zoom: the smallest crop is shorter than the image's side by this part; 0 to 0.95.
        noise: maximum change of a pixel, in levels of 0 to 255.
        seed: the key of all randomness, which is a function of seed, image and frame.

    Raises:
        ValueError: an argument is out of range.
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

    def _length(self, number: int) -> int:  # noqa: ARG002
        return self._frames

    def _frame(self, sample: Sample, number: int, step: int) -> Sample:
        top, left, size = self._crop(number, step)
        rng = np.random.default_rng([self._seed, 1, number, step])
        if (image_HWC := pixels_of(sample)) is not None:
            level_HWC = crop_resized(image_HWC, top, left, size)
            noise = self._noise
            level_HWC += rng.integers(-noise, noise + 1, level_HWC.shape, dtype=np.int16)
            image_HWC = np.clip(np.rint(level_HWC), 0, 255).astype(np.uint8)
        return frame_of(sample, step, image_HWC, rng, frame=step)

    def _crop(self, number: int, step: int) -> tuple[float, float, float]:
        """Return top, left and size of a frame's crop, as fractions of the image's sides."""
        draw = np.random.default_rng([self._seed, 0, number]).random((2, 3))
        part = step / (self._frames - 1) if self._frames > 1 else 0.0
        size_2 = 1 - self._zoom * draw[:, 2]
        ends_23 = np.stack([*(draw[:, axis] * (1 - size_2) for axis in (0, 1)), size_2], axis=1)
        top, left, size = (1 - part) * ends_23[0] + part * ends_23[1]
        return float(top), float(left), float(size)


def crop_resized(
    image_HWC: NDArray[np.uint8], top: float, left: float, size: float
) -> NDArray[np.float32]:
    """Return a crop resized to the size of the image, by bilinear interpolation.

    `top`, `left` and `size` of the crop are fractions of the image's sides.
    """
    level_HWC = image_HWC.astype(np.float32)
    for axis, begin in ((0, top), (1, left)):
        side = image_HWC.shape[axis]
        # The centres of the resized crop's pixels, in pixels of the image.
        at = np.clip((begin + size * (np.arange(side) + 0.5) / side) * side - 0.5, 0, side - 1)
        low = np.floor(at).astype(np.int64)
        shape = (-1, 1, 1) if axis == 0 else (1, -1, 1)
        weight = (at - low).astype(np.float32).reshape(shape)
        below, above = (
            np.take(level_HWC, index, axis) for index in (low, np.minimum(low + 1, side - 1))
        )
        level_HWC = below + weight * (above - below)
    return level_HWC
