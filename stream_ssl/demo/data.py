"""The embedded images, and their division into streamed and held-out images.

N images.
"""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable

import numpy as np
from numpy.typing import NDArray

from stream_ssl.process.failures import Failure

CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
SIDE = 28
REFERENCE_PER_CLASS = 200
QUERY_PER_CLASS = 100

IMAGES = "t10k-images-idx3-ubyte.gz"
LABELS = "t10k-labels-idx1-ubyte.gz"
SHA256 = {
    IMAGES: "cc1d090a38ace84dfa1aa66e3ada7c336ef481a96936906477e6dd344da56eaa",
    LABELS: "8d3605d196f4be44669e46906da9733c8131fef761fdbfec72c424d5222f1a05",
}


@dataclass(frozen=True)
class Split:
    """Indices of the embedded images in three disjoint, balanced sets.

    Args:
        streamed: 7,000 images that the stream may contain.
        reference: 2,000 held-out images, the neighbours of the kNN probe.
        query: 1,000 held-out images whose classes the probe predicts.
    """

    streamed: NDArray[np.int64]
    reference: NDArray[np.int64]
    query: NDArray[np.int64]


def folder() -> Traversable:
    """Return the folder of the embedded files."""
    return files("stream_ssl.demo").joinpath("data")


def check(where: Traversable | None = None) -> None:
    """Compare the embedded files with their checksums. Raise Failure if one differs."""
    for name, expected in SHA256.items():
        file = (where or folder()).joinpath(name)
        try:
            found = hashlib.sha256(file.read_bytes()).hexdigest()
        except FileNotFoundError:
            raise Failure(f"{file} is missing; install stream-ssl again") from None
        if found != expected:
            raise Failure(
                f"{file} is damaged: its sha256 is {found}, expected {expected}; "
                "install stream-ssl again"
            )


def load() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return all embedded images, uint8 [10000, 28, 28], and their classes, int64 [10000].

    Raises:
        Failure: an embedded file is missing or differs.
    """
    check()
    pixels = gzip.decompress(folder().joinpath(IMAGES).read_bytes())
    labels = gzip.decompress(folder().joinpath(LABELS).read_bytes())
    image_NHW = np.frombuffer(pixels, np.uint8, offset=16).reshape(-1, SIDE, SIDE)
    label_N = np.frombuffer(labels, np.uint8, offset=8).astype(np.int64)
    return image_NHW, label_N


def split(label_N: NDArray[np.int64]) -> Split:
    """Divide the images of each class in file order: reference, then query, then streamed."""
    rows_by_class = [np.flatnonzero(label_N == label) for label in range(len(CLASSES))]
    held = REFERENCE_PER_CLASS + QUERY_PER_CLASS

    def take(start: int, stop: int | None) -> NDArray[np.int64]:
        return np.sort(np.concatenate([rows[start:stop] for rows in rows_by_class]))

    return Split(
        reference=take(0, REFERENCE_PER_CLASS),
        query=take(REFERENCE_PER_CLASS, held),
        streamed=take(held, None),
    )
