"""The biased stream of DUEL's experiments, out of RAM.

Shapes: N images, B samples, C classes, H height, W width, 3 colours.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from producers.sources.cifar import CifarBinary
from stream_ssl.ingest.batch import Batch
from stream_ssl.ingest.offset import Offset

CLASSES = 10


class Images(NamedTuple):
    """uint8 images [N, 32, 32, 3] and their classes, int64 [N]."""

    image_NHWC: NDArray[np.uint8]
    label_N: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.label_N)


def load(root: Path, split: str) -> Images:
    """CIFAR-10's "train" or "test" images from a folder of its binary batches, in the source's own
    shuffled order, which is always the same."""
    source = CifarBinary(root, split="train" if split == "train" else "test")
    images, labels = [], []
    for sample, _ in source.samples():
        images.append(np.frombuffer(sample.data, dtype=np.uint8).reshape(32, 32, 3))
        labels.append(sample.label)
    return Images(np.stack(images), np.array(labels, dtype=np.int64))


def balanced(images: Images, each: int) -> Images:
    """The first `each` images of every class, or as many of all as the rarest has."""
    rows = [np.flatnonzero(images.label_N == label) for label in range(CLASSES)]
    each = min(each, min(map(len, rows)))
    chosen = np.sort(np.concatenate([row[:each] for row in rows]))
    return Images(images.image_NHWC[chosen], images.label_N[chosen])


@dataclass(frozen=True)
class Shape:
    """How a stream departs from balanced and shuffled.

    Args:
        bias: how many times as frequent as any other the dominant class is (class 0), >= 1.
        block: so many samples of one class follow each other; 1 is iid.
    """

    bias: int
    block: int

    @property
    def name(self) -> str:
        return f"x{self.bias}-{'iid' if self.block == 1 else f'blocks{self.block}'}"

    @property
    def shares(self) -> NDArray[np.float64]:
        """Of the classes in the stream, [C]."""
        weights = np.ones(CLASSES)
        weights[0] = self.bias
        share_C: NDArray[np.float64] = weights / weights.sum()
        return share_C


class Biased:
    """Batches of `shape`: a block's class is drawn by its share, its images in turn from a
    permutation of that class, permuted anew when it is through.

    Every draw of an image is a sample with an id of its own; its content hash tells that it came
    before.
    """

    def __init__(self, images: Images, shape: Shape, batch: int, seed: int) -> None:
        self._images, self._shape, self._batch = images, shape, batch
        self._draw = np.random.default_rng([seed, shape.bias, shape.block])
        self._rows = [np.flatnonzero(images.label_N == label) for label in range(CLASSES)]
        empty = [label for label, rows in enumerate(self._rows) if not len(rows)]
        if empty:
            raise ValueError(f"the training images hold none of class {empty[0]}: all ten are due")
        self._queues: list[list[int]] = [[] for _ in range(CLASSES)]
        self._block: list[int] = []
        self._count = 0

    def next(self, timeout: float) -> Batch:  # noqa: ARG002
        rows_B = np.array([self._row() for _ in range(self._batch)])
        ids_B = np.arange(self._batch, dtype=np.int64) + self._batch * self._count
        self._count += 1
        zeros_B = np.zeros(self._batch)
        return Batch(
            image_BHWC=self._images.image_NHWC[rows_B],
            key_B=ids_B,
            hash_B=rows_B.astype(np.int64) + 1,
            label_B=self._images.label_N[rows_B],
            time_B=zeros_B,
            received_B=zeros_B,
            offset=Offset(self._count + 1, 0),
            rejected={},
        )

    def lag(self) -> float:
        return 0.0

    def _row(self) -> int:
        if not self._block:
            label = int(self._draw.choice(CLASSES, p=self._shape.shares))
            self._block = [label] * self._shape.block
        label = self._block.pop()
        if not self._queues[label]:
            self._queues[label] = self._draw.permutation(self._rows[label]).tolist()
        return self._queues[label].pop()
