"""A source of seeded images with known classes, known duplicates and known drift.

Shapes: B samples per block, C classes, H x W pixels, K channels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from stream_ssl.producers.sources.base import Facts, mark, place
from stream_ssl.producers.sources.finite import ENDLESS
from stream_ssl.producers.sources.ranges import check_ranges
from stream_ssl.wire.sample import Position, Sample, Scalar

BLOCK = 256  # samples drawn at once
COARSE = 5  # knots per side of a prototype's random field
STEPS = 64  # steps of a prototype from one anchor to the next
BRIGHTNESS = 24  # levels; largest brightness offset of a sample
NEAR = 8  # levels of noise between a near-duplicate and its original
POOL = 2**20  # start offsets in the noise pool
CONCENTRATION = 2.0  # of the moving mix: the most frequent class has e^4 = 55 x the rarest's share


@dataclass(frozen=True, slots=True)
class Pictures:
    """The pictures of `Synthetic`.

    Args:
        size: side of the square images in pixels, at most 1024. Memory holds 256 images at a time,
            which take 2.4 GB at this size and 0.2 GB at 256.
        channels: 1 (grey) or 3 (colour).
        noise: levels of noise per pixel, 0 to 64. The noise distinguishes samples of one class.
        shift: largest shift of a class's field in each direction, in pixels.

    Raises:
        ValueError: an argument is out of range.
    """

    size: int = 32
    channels: int = 3
    noise: int = 48
    shift: int = 4

    def __post_init__(self) -> None:
        check_ranges(
            ("size", self.size, 1, 1024),
            ("noise", self.noise, 0, 64),
            ("shift", self.shift, 0, self.size),
        )
        if self.channels not in (1, 3):
            raise ValueError(f"channels {self.channels}: must be 1 or 3")


class Synthetic:
    """Generated images with known classes, known duplicates and known drift.

    Each class is a smooth random field. Each sample shifts its class's field, brightens it and adds
    noise. No files are read: sample n depends only on the arguments and n. Its id is "SEED-n".

    A duplicate repeats an earlier sample of the same block of 256, under its own id. Its meta
    contains "duplicate_of" (the id of the earlier sample) and "duplicate" ("exact" or "near"). A
    near-duplicate adds new noise of up to 8 levels per pixel.

    Args:
        count: number of samples; null: endless.
        classes: number of classes, labelled 0, 1, ...
        duplicates: share of samples that repeat an earlier sample, 0 to 0.9.
        near: share of near-duplicates among the duplicates, 0 to 1. The others are exact.
        prototype_period: number of samples after which a class's field has changed to an unrelated
            field, in 64 linear steps; null: the fields do not change.
        mix_period: number of samples in which the peak of the class frequencies visits all classes
            once. The most frequent class is 55 times as frequent as the rarest; null: all classes
            are equally frequent.
        seed: seed of all randomness.
        name: the source's name.
        pictures: the arguments of `Pictures`: `size`, `channels`, `noise` and `shift`.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        count: int | None = None,
        classes: int = 10,
        duplicates: float = 0.0,
        near: float = 0.5,
        prototype_period: int | None = None,
        mix_period: int | None = None,
        seed: int = 0,
        name: str = "synthetic",
        **pictures: Any,
    ) -> None:
        made = Pictures(**pictures)
        check_ranges(
            ("count", count, 1, ENDLESS),
            ("classes", classes, 1, 100_000),
            ("duplicates", duplicates, 0.0, 0.9),
            ("near", near, 0.0, 1.0),
            ("prototype_period", prototype_period, STEPS, ENDLESS),
            ("mix_period", mix_period, 1, ENDLESS),
            ("seed", seed, 0, ENDLESS),
        )
        self.name, self.count, self.classes, self.seed = name, count, classes, seed
        self._shape = (made.size, made.size, made.channels)
        self._noise, self._shift = made.noise, made.shift
        self._duplicates, self._near = duplicates, near
        self._prototype_period, self._mix_period = prototype_period, mix_period
        self._pools: dict[int, NDArray[np.uint8]] = {}
        self._fields: tuple[int, NDArray[np.uint8]] | None = None
        self._facts: Facts = {
            "source": name,
            "classes": classes,
            "shape": f"{made.size} x {made.size} x {made.channels}",
            "noise": made.noise,
            "shift": made.shift,
            "duplicates": duplicates,
            "near": near,
            "prototype_period": prototype_period,
            "mix_period": mix_period,
            "seed": seed,
        }

    def samples(self, position: Position = None) -> Iterator[tuple[Sample, Position]]:
        """Yield each sample with the position after it; see `Source`."""
        (start,) = place(position, self._facts, self.name, (ENDLESS,))
        return self._from(start)

    def _from(self, start: int) -> Iterator[tuple[Sample, Position]]:
        end = ENDLESS if self.count is None else self.count
        while start < end:
            block, skip = divmod(start, BLOCK)
            image_BHWK, label_B, origin_B, near_B = self._block(block)
            for row in range(skip, min(BLOCK, end - block * BLOCK)):
                start = block * BLOCK + row
                yield (
                    Sample(
                        id=f"{self.seed}-{start}",
                        data=image_BHWK[row].tobytes(),
                        shape=self._shape,
                        source=self.name,
                        label=label_B[row],
                        meta=self._meta(block, origin_B[row], near_B[row]),
                    ),
                    mark([start + 1], self._facts),
                )
            start += 1

    def _meta(self, block: int, origin: int, near: bool) -> dict[str, Scalar] | None:
        if origin < 0:
            return None
        return {
            "duplicate_of": f"{self.seed}-{block * BLOCK + origin}",
            "duplicate": "near" if near else "exact",
        }

    def class_shares(self, n: int) -> NDArray[np.float64]:
        """Return the class probabilities [C] of sample n."""
        if self._mix_period is None:
            return np.full(self.classes, 1.0 / self.classes)
        turn = n // BLOCK * BLOCK / self._mix_period
        phase_C = turn - np.arange(self.classes) / self.classes
        weight_C = np.exp(CONCENTRATION * np.cos(2 * np.pi * phase_C))
        return np.asarray(weight_C / weight_C.sum())

    def _block(self, block: int) -> tuple[NDArray[np.uint8], list[int], list[int], list[bool]]:
        rng = np.random.default_rng([self.seed, 0, block])
        height, width, channels = self._shape
        label_B = rng.choice(self.classes, size=BLOCK, p=self.class_shares(block * BLOCK))
        # One window of the field per sample: rows are H, the pixels of a row are flattened.
        view = sliding_window_view(
            self._prototypes(block * BLOCK), (height, width * channels), axis=(1, 2)
        )
        down_B, right_B = rng.integers(0, 2 * self._shift + 1, size=(2, BLOCK))
        image_BHX = view[label_B, down_B, right_B * channels]
        # Fields stay below 255 minus everything that is added, so bytes never overflow.
        image_BHX += rng.integers(0, BRIGHTNESS + 1, (BLOCK, 1, 1), dtype=np.uint8)
        image_BHX += self._noises(rng, BLOCK, self._noise).reshape(image_BHX.shape)
        origin_B, near_B = self._duplicate(rng, image_BHX, label_B)
        return (
            image_BHX.reshape(BLOCK, height, width, channels),
            label_B.tolist(),
            origin_B.tolist(),
            near_B.tolist(),
        )

    def _duplicate(
        self, rng: np.random.Generator, image_BHX: NDArray[np.uint8], label_B: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Replace part of the block by duplicates, and return two arrays [B].

        The arrays contain the row of each sample's original (-1 if it is not a duplicate), and
        whether the sample is a near-duplicate.
        """
        origin_B = np.full(BLOCK, -1)
        # The first sample of a block has no earlier sample, so the others repeat slightly more
        # often.
        repeat_B = rng.random(BLOCK) < self._duplicates * BLOCK / (BLOCK - 1)
        repeat_B[0] = False
        (original,) = np.nonzero(~repeat_B)
        before_B = np.cumsum(~repeat_B)
        pick_B = original[(rng.random(BLOCK) * before_B).astype(np.int64)]
        near_B = repeat_B & (rng.random(BLOCK) < self._near)
        origin_B[repeat_B] = pick_B[repeat_B]
        image_BHX[repeat_B] = image_BHX[pick_B[repeat_B]]
        label_B[repeat_B] = label_B[pick_B[repeat_B]]
        (rows,) = np.nonzero(near_B)
        jitter = self._noises(rng, len(rows), NEAR).reshape(len(rows), *image_BHX.shape[1:])
        jitter[:, 0, 0] = NEAR  # ensures that a near-duplicate differs from its original
        image_BHX[rows] += jitter
        return origin_B, near_B

    def _noises(self, rng: np.random.Generator, count: int, top: int) -> NDArray[np.uint8]:
        """Return noise [count, H W K] in 0..top, as random slices of one pool.

        Drawing new bytes for each sample would take longer than all other steps together.
        """
        length = math.prod(self._shape)
        if top not in self._pools:
            source = np.random.default_rng([self.seed, 2, top])
            self._pools[top] = source.integers(0, top + 1, length + POOL, dtype=np.uint8)
        stretches = sliding_window_view(self._pools[top], length)
        return np.asarray(stretches[rng.integers(0, POOL, count)])

    def _prototypes(self, n: int) -> NDArray[np.uint8]:
        """Return the fields [C, H + 2 shift, (W + 2 shift) K] of all classes at sample n."""
        step = 0 if self._prototype_period is None else n * STEPS // self._prototype_period
        if self._fields is None or self._fields[0] != step:
            anchor, way = divmod(step, STEPS)
            field_CHX = self._anchor(anchor)
            if way:
                field_CHX += (self._anchor(anchor + 1) - field_CHX) * (way / STEPS)
            top = 255 - BRIGHTNESS - self._noise - NEAR
            self._fields = step, (field_CHX * top).astype(np.uint8)
        return self._fields[1]

    def _anchor(self, number: int) -> NDArray[np.float64]:
        """Return random fields in [0, 1]: coarse noise, enlarged by linear interpolation."""
        side, channels = self._shape[0] + 2 * self._shift, self._shape[2]
        rng = np.random.default_rng([self.seed, 1, number])
        knots: NDArray[Any] = rng.random((self.classes, COARSE, COARSE, channels))
        at = np.linspace(0, COARSE - 1, side)
        weights = np.maximum(0, 1 - np.abs(at[:, None] - np.arange(COARSE)))
        field = np.einsum("yi,cijk,xj->cyxk", weights, knots, weights, optimize=True)
        return np.ascontiguousarray(field).reshape(self.classes, side, side * channels)
