"""Images in RAM for the runs, and biased streams of these images.

Shapes: N images, B batch, H height, W width, C channels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stream_ssl.batch import Batch, Offset
from stream_ssl.evaluation.labelled import LabelledBatch


class LabelledImages(NamedTuple):
    """uint8 images [N, H, W, C] and their classes, int64 [N]."""

    image_NHWC: NDArray[np.uint8]
    label_N: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.label_N)


class LabelledData(NamedTuple):
    """Training images for the stream and the probes, and test images."""

    train: LabelledImages
    test: LabelledImages
    classes: int


def gather(parts: Iterable[LabelledBatch]) -> LabelledData:
    """Gather all batches of a labelled set: references to train on and queries to test on.

    Raises:
        ValueError: there are no training or no test images, a class has no training images, or
            there is only one class.
    """
    found: dict[str, list[LabelledBatch]] = {"reference": [], "query": []}
    for part in parts:
        found[part.part].append(part)
    for name, kind in (("reference", "training"), ("query", "test")):
        if not found[name]:
            raise ValueError(f"the data set gave no {kind} images: choose one that has them")
    train, test = (
        LabelledImages(
            np.concatenate([part.image_BHWC for part in found[name]]),
            np.concatenate([part.label_B for part in found[name]]),
        )
        for name in ("reference", "query")
    )
    classes = int(train.label_N.max()) + 1
    missing = sorted(set(range(classes)) - set(np.unique(train.label_N).tolist()))
    if missing or classes < 2:
        raise ValueError(
            f"the training images hold {classes} classes and none of {missing or 'another'}: a "
            "biased stream is drawn from two or more, numbered from 0 without a gap"
        )
    return LabelledData(train, first_of_each(test, len(test)), classes)


def first_of_each(images: LabelledImages, each: int) -> LabelledImages:
    """Return the first `each` images of every class, or fewer if the rarest class has fewer."""
    rows = [np.flatnonzero(images.label_N == label) for label in np.unique(images.label_N)]
    each = min(each, min(map(len, rows)))
    chosen = np.sort(np.concatenate([row[:each] for row in rows]))
    return LabelledImages(images.image_NHWC[chosen], images.label_N[chosen])


def store(data: LabelledData, folder: Path) -> None:
    """Write the data as arrays, which worker processes map instead of loading a copy each."""
    for name, images in (("train", data.train), ("test", data.test)):
        np.save(folder / f"{name}-images.npy", images.image_NHWC, allow_pickle=False)
        np.save(folder / f"{name}-labels.npy", images.label_N, allow_pickle=False)


def stored(folder: Path) -> LabelledData:
    """Return the data that `store` wrote, mapped from the files."""
    train, test = (
        LabelledImages(
            np.load(folder / f"{name}-images.npy", mmap_mode="r", allow_pickle=False),
            np.load(folder / f"{name}-labels.npy", allow_pickle=False),
        )
        for name in ("train", "test")
    )
    return LabelledData(train, test, int(train.label_N.max()) + 1)


class Biased:
    """An endless stream of batches in which class 0 is `bias` times as frequent as each other one.

    The class of each block is drawn by its share. Its images come in turn from a permutation of the
    class, which is permuted again when it is used up (DUEL, section 5). Every draw is a sample with
    its own id. Its content hash identifies the image.

    Args:
        bias: 1 or more; 1 is balanced.
        block: number of consecutive samples of one class; 1 is iid.

    Raises:
        ValueError: a class has no image.
    """

    def __init__(
        self, images: LabelledImages, classes: int, bias: int, batch: int, seed: int, block: int = 1
    ) -> None:
        self._images, self._batch, self._size = images, batch, block
        weight_C = np.ones(classes)
        weight_C[0] = bias
        self.share_C: NDArray[np.float64] = weight_C / weight_C.sum()
        self._draw = np.random.default_rng([seed, bias, block])
        self._rows = [np.flatnonzero(images.label_N == label) for label in range(classes)]
        empty = [label for label, rows in enumerate(self._rows) if not len(rows)]
        if empty:
            raise ValueError(f"the images hold none of class {empty[0]}: all {classes} are due")
        self._queues: list[list[int]] = [[] for _ in range(classes)]
        self._block: list[int] = []
        self._count = 0

    def next(self, timeout: float) -> Batch[NDArray[Any]]:  # noqa: ARG002
        rows_B = np.array([self._row() for _ in range(self._batch)])
        ids_B = np.arange(self._batch, dtype=np.int64) + self._batch * self._count
        self._count += 1
        return Batch(
            images_BCHW=self._images.image_NHWC[rows_B].transpose(0, 3, 1, 2),
            ids_B=ids_B,
            hashes_B=rows_B.astype(np.int64) + 1,
            labels_B=self._images.label_N[rows_B],
            offset=Offset(self._count + 1, 0),
        )

    def lag(self) -> float:
        return 0.0

    def rows(self) -> Iterator[int]:
        """Yield the numbers of the images in the order of the stream, without end."""
        while True:
            yield self._row()

    def _row(self) -> int:
        if not self._block:
            label = int(self._draw.choice(len(self._rows), p=self.share_C))
            self._block = [label] * self._size
        label = self._block.pop()
        if not self._queues[label]:
            self._queues[label] = self._draw.permutation(self._rows[label]).tolist()
        return self._queues[label].pop()
