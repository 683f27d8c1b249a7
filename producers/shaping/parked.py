"""A wrapper that makes the camera stream of a robot that is parked most of the time.

Shapes: H x W pixels, C channels.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stream_ssl.producers.shaping.base import Pairs, Shaping, in_turn
from stream_ssl.producers.shaping.repeat import frame_of, pixels_of, seen_again
from stream_ssl.producers.sources.base import Source
from stream_ssl.producers.sources.finite import ENDLESS
from stream_ssl.producers.sources.ranges import check_ranges
from stream_ssl.wire.sample import Position, Sample


class Scene(NamedTuple):
    """An image that a parked camera looks at: the sample and its pixels, if it can be decoded."""

    sample: Sample
    image_HWC: NDArray[np.uint8] | None


class Parked(Shaping):
    """A source of a robot that parks and drives in turn, so that most frames are near-duplicates.

    The source's first images are the scenes, so shuffle a sorted source. A parked frame shows its
    scene again: moved by some pixels with the edge repeated, brighter or darker, and noised. A
    frame of a drive is the source's next image, unchanged. The stream ends when the source has no
    image left. Parked stretches and drives alternate, with geometric lengths. Each round of
    stretches visits every scene once, in a new order.

    A parked frame has the label of its scene and the id SCENE~N, where N is the frame's number.
    Its meta has "duplicate_of" (the scene's id), "duplicate" ("near", or "exact" if no byte
    differs) and "scene" (the scene's number, from 0).

    All randomness is a function of the seed and the number of the frame or stretch. To resume, the
    first images are read again. The source must give the same images, as files do and a camera
    does not.

    Args:
        source: the source of the scenes and the new images.
        share: long-run share of parked frames; above 0 and below 1.
        scenes: number of scenes.
        stretch: mean frames of a parked stretch. A drive has stretch (1 - share) / share frames.
        shift: maximum move of a parked frame in each direction, in pixels.
        brightness: maximum relative change of brightness of a parked frame; 0 to 1.
        noise: maximum change of a pixel of a parked frame, in levels of 0 to 255.
        seed: the key of all randomness.

    Raises:
        ValueError: an argument is out of range. While running: the source has fewer images than
            scenes, or the scenes changed since the position was taken.
        ImportError: a scene is an encoded image, and Pillow is not installed; raised while running.
    """

    def __init__(
        self,
        source: Source,
        share: float = 0.95,
        scenes: int = 16,
        stretch: float = 200.0,
        shift: int = 2,
        brightness: float = 0.2,
        noise: int = 8,
        seed: int = 0,
    ) -> None:
        check_ranges(
            ("share", share, 0.001, 0.999),
            ("scenes", scenes, 1, 2**20),
            ("stretch", stretch, 1.0, 2.0**31),
            ("shift", shift, 0, 4096),
            ("brightness", brightness, 0.0, 1.0),
            ("noise", noise, 0, 255),
            ("seed", seed, 0, ENDLESS),
        )
        self._drive = stretch * (1 - share) / share
        if self._drive < 1:
            raise ValueError(
                f"stretch {stretch:g}: at a share of {share} drives would have {self._drive:.2g} "
                f"frames on average, less than one; raise it to {math.ceil(share / (1 - share))}"
            )
        self._scenes, self._stretch, self._seed = scenes, stretch, seed
        self._shift, self._brightness, self._noise = shift, brightness, noise
        super().__init__(
            source,
            share=share,
            scenes=scenes,
            stretch=stretch,
            jitter=f"{shift} {brightness} {noise}",
            seed=seed,
        )

    def samples(self, position: Position = None) -> Pairs:
        """Yield each sample with the position after it; see `Source`."""
        at, inner = self._place(position, 3)
        first = self.source.samples()
        if position is None:
            return self._run(first, first, None, None, *at)
        return self._run(first, self.source.samples(inner), inner, position.get("seen"), *at)

    def _run(
        self,
        first: Pairs,
        new: Pairs,
        inner: Position,
        seen: str | None,
        stretch: int,
        skip: int,
        sent: int,
    ) -> Pairs:
        given, found = self._first(first, self._scenes, "scenes", seen)
        scenes = [Scene(sample, pixels_of(sample)) for sample, _ in given]
        if seen is None:
            inner = given[-1][1]
        for number in itertools.count(stretch):
            parked, driven = self._lengths(number)
            scene = self._scene_of(number)
            for offset in range(skip, parked + driven):
                if offset < parked:
                    sample = self._frame(scenes[scene], scene, sent)
                elif (item := next(new, None)) is not None:
                    sample, inner = item
                else:
                    return
                sent += 1
                yield sample, self._mark([number, offset + 1, sent], inner, seen=found)
            skip = 0

    def _lengths(self, stretch: int) -> tuple[int, int]:
        """Return the number of frames of a parked stretch, and of the drive after it."""
        rng = np.random.default_rng([self._seed, 0, stretch])
        return int(rng.geometric(1 / self._stretch)), int(rng.geometric(1 / self._drive))

    def _scene_of(self, stretch: int) -> int:
        return in_turn(stretch, self._scenes, self._seed, 1)

    def _frame(self, scene: Scene, number: int, sent: int) -> Sample:
        rng = np.random.default_rng([self._seed, 2, sent])
        changes = self._shift, self._brightness, self._noise
        image_HWC = scene.image_HWC
        if image_HWC is not None:
            image_HWC = seen_again(image_HWC, rng, *changes)
        return frame_of(scene.sample, sent, image_HWC, rng, scene=number)
