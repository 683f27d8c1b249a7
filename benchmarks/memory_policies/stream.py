"""CIFAR-10, and the shapes of the streams drawn from it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from producers.sources.cifar import CifarBinary
from stream_ssl.reproduction.data import Biased, Images

CLASSES = 10


def load(root: Path, split: str) -> Images:
    """CIFAR-10's "train" or "test" images from a folder of its binary batches, in the source's own
    shuffled order, which is always the same."""
    source = CifarBinary(root, split="train" if split == "train" else "test")
    images, labels = [], []
    for sample, _ in source.samples():
        images.append(np.frombuffer(sample.data, dtype=np.uint8).reshape(32, 32, 3))
        labels.append(sample.label)
    return Images(np.stack(images), np.array(labels, dtype=np.int64))


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

    def stream(self, images: Images, batch: int, seed: int) -> Biased:
        """Batches of this shape."""
        return Biased(images, CLASSES, self.bias, batch, seed, self.block)
