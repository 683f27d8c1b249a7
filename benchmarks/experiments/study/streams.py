"""The streams of the study, made from CIFAR-10 with `stream_ssl.producers.shaping`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.experiments.data import Biased, LabelledImages
from stream_ssl.batch import Batch, Offset
from stream_ssl.producers.shaping import Parked, Popularity, Shift, Stalls, Video
from stream_ssl.producers.sources import Source
from stream_ssl.producers.sources.base import Skipped
from stream_ssl.producers.sources.fields import digest
from stream_ssl.producers.sources.finite import Finite
from stream_ssl.wire.sample import Position, Sample

CLASSES = 10
STRIDE = 1 << 20  # an id is the frame's number times STRIDE, plus the number of its image


class Shuffled(Finite):
    """An endless source of images in shuffled passes. An id is the image's number."""

    def __init__(self, images: LabelledImages, seed: int) -> None:
        super().__init__(Skipped("cifar"), len(images), "in memory", seed=seed, epochs=None)
        self._images = images

    def _sample(self, index: int) -> Sample:
        return _sample(self._images, index)


class DrawnImages:
    """An endless source of images that are drawn as in `Biased`. An id is the image's number."""

    name = "cifar"

    def __init__(self, images: LabelledImages, bias: int, block: int, seed: int) -> None:
        self._images, self._bias, self._block, self._seed = images, bias, block, seed

    def samples(self, position: Position = None) -> Iterator[tuple[Sample, Position]]:
        sent = 0 if position is None else int(position["at"])
        rows = Biased(self._images, CLASSES, self._bias, 1, self._seed, self._block).rows()
        for number, row in enumerate(itertools.islice(rows, sent, None), start=sent + 1):
            yield _sample(self._images, row), {"at": number}


def _sample(images: LabelledImages, row: int) -> Sample:
    label = int(images.label_N[row])
    return Sample.from_array(images.image_NHWC[row], f"{row}", label=label)


class FrameBatches:
    """Batches of a source's frames, whose ids contain the number of the original image.

    Args:
        batch: the number of frames of the stream that pass for each batch.
        used: the number of these frames that are in the batch. They are the first ones.
    """

    def __init__(self, source: Source, batch: int, used: int) -> None:
        self._samples, self._batch, self._count = source.samples(), batch, 0
        self._used = used

    def next(self, timeout: float) -> Batch[NDArray[Any]]:  # noqa: ARG002
        passed = [sample for sample, _ in itertools.islice(self._samples, self._batch)]
        frames = passed[: self._used]
        image_B = np.array([int(frame.id.partition("~")[0]) for frame in frames], np.int64)
        number_B = np.arange(len(frames)) + self._batch * self._count
        self._count += 1
        return Batch(
            images_BCHW=np.stack(
                [np.frombuffer(f.data, np.uint8).reshape(32, 32, 3) for f in frames]
            ).transpose(0, 3, 1, 2),
            ids_B=number_B * STRIDE + image_B,
            # Hash the content as the receiver does: a near-duplicate has another hash.
            hashes_B=np.array([int(digest([f.data])[:15], 16) + 1 for f in frames]),
            labels_B=np.array([frame.label for frame in frames], np.int64),
            offset=Offset(self._count + 1, 0),
        )

    def lag(self) -> float:
        return 0.0


def _parked(images: LabelledImages, seed: int) -> Source:
    return Parked(Shuffled(images, seed), scenes=16, seed=seed)


def _stalls(bias: int) -> Callable[[LabelledImages, int], Source]:
    """Return a stream of blocks of 1,024 frames of a class.

    Each image has a Pareto-distributed number of frames.
    """

    def stream(images: LabelledImages, seed: int) -> Source:
        source = DrawnImages(images, bias, 1024 // 8, seed)  # an image appears about 8 times
        return Stalls(source, rate=1.0, alpha=1.1, longest=1024, seed=seed)

    return stream


def _video(images: LabelledImages, seed: int) -> Source:
    """Return blocks of 256 frames of a class, with 16 frames of each image."""
    return Video(DrawnImages(images, 1, 16, seed), frames=16, seed=seed)


def _crawl(images: LabelledImages, seed: int) -> Source:
    return Popularity(Shuffled(images, seed), images=len(images), exponent=1.2, seed=seed)


def _shift(images: LabelledImages, seed: int) -> Source:
    return Shift(Shuffled(images, seed), period=7680, bias=27, seed=seed)


def _drawn(bias: int, block: int) -> Callable[[LabelledImages, int], Source]:
    return lambda images, seed: DrawnImages(images, bias, block, seed)


STREAMS: Mapping[str, Callable[[LabelledImages, int], Source]] = {
    "shuffled": Shuffled,
    "parked": _parked,
    "stalls": _stalls(1),
    "stalls-x27": _stalls(27),
    "video": _video,
    "crawl": _crawl,
    "shift": _shift,
    **{
        f"x{bias}-{'iid' if block == 1 else f'blocks{block}'}": _drawn(bias, block)
        for bias in (27, 9, 1)
        for block in (1, 64)
    },
}
"""By name: a function from images and a seed to an endless source."""

TITLES: Mapping[str, str] = {
    "shuffled": "shuffled, balanced, no near-duplicates: the ceiling",
    "parked": "a parked robot: 95 % of the frames from 16 scenes, jittered",
    "stalls": "a stalling camera: blocks of a class, images repeated by a Pareto law",
    "stalls-x27": "the same, one class 27 times as frequent",
    "video": "video: each image 16 frames long, panned and zoomed, blocks of a class",
    "crawl": "a crawl: images repeat by a Zipf law, near-duplicates are moved and noised",
    "shift": "one class 27 times as frequent, a different class every 7,680 samples",
    "x27-iid": "one class 27 times as frequent, shuffled",
    "x27-blocks64": "one class 27 times as frequent, blocks of 64 of a class",
    "x9-iid": "one class 9 times as frequent, shuffled",
    "x9-blocks64": "one class 9 times as frequent, blocks of 64 of a class",
    "x1-iid": "balanced, each class drawn alike",
    "x1-blocks64": "balanced, blocks of 64 of a class",
}
"""The titles of the streams."""


def frames(
    name: str, images: LabelledImages, batch: int, seed: int, used: int | None = None
) -> FrameBatches:
    """Return batches of the stream of this name, of all frames or of the first ones of each."""
    return FrameBatches(STREAMS[name](images, seed), batch, batch if used is None else used)
