"""A source of the binary form of CIFAR-10 and CIFAR-100.

Shapes: N images, H labels of an image, R bytes per record: labels, then 32 x 32 pixels each of red,
green and blue.
"""

from __future__ import annotations

import bisect
from pathlib import Path
from typing import Any, Literal

import numpy as np

from stream_ssl.bounded_files import read_text
from stream_ssl.producers.sources.base import Skipped
from stream_ssl.producers.sources.fields import digest
from stream_ssl.producers.sources.finite import Finite
from stream_ssl.producers.sources.folders import check_root
from stream_ssl.producers.sources.stored_rows import StoredRows
from stream_ssl.wire.sample import Sample

SIDE = 32
PIXELS = 3 * SIDE * SIDE
SHAPE = (SIDE, SIDE, 3)
FILES = {
    (10, "train"): "data_batch_*.bin",
    (10, "test"): "test_batch.bin",
    (100, "train"): "train.bin",
    (100, "test"): "test.bin",
}
CLASSES = {10: (10,), 100: (20, 100)}  # number of classes of each label in a record
FOLDERS = {10: "cifar-10-batches-bin", 100: "cifar-100-binary"}
NAMES = {10: "batches.meta.txt", 20: "coarse_label_names.txt", 100: "fine_label_names.txt"}
"""The file with the names of the classes, by their number."""


class CifarBinary(Finite):
    """Images of CIFAR-10 or CIFAR-100, whichever data set the folder contains.

    The files are read image by image. Sample ids are "SPLIT/INDEX". CIFAR-100 samples carry both
    labels: the label that `labels` does not select is sent as meta "coarse" or "fine".

    Args:
        root: the folder of the .bin files, or the folder that contains cifar-10-batches-bin or
            cifar-100-binary.
        split: the 50,000 training images or the 10,000 test images.
        labels: which of CIFAR-100's two labels is the sample's label.
        name: the source's name; null: "cifar10" or "cifar100".

    Attributes:
        classes: the names of the classes; None without a whole file of names.

    Raises:
        ValueError: a file is incomplete, a label is out of range, or the folder has both data sets.
        FileNotFoundError: the files do not exist.
    """

    def __init__(
        self,
        root: Path,
        split: Literal["train", "test"] = "train",
        labels: Literal["fine", "coarse"] = "fine",
        name: str | None = None,
        **passes: Any,
    ) -> None:
        classes, files = find_files(Path(root), split)
        self._split = split
        self._heads = 1 if classes == 10 else 2  # bytes of labels: CIFAR-100 has coarse and fine
        self._column = 0 if classes == 10 or labels == "coarse" else 1
        self._other = None if classes == 10 else {"fine": "coarse", "coarse": "fine"}[labels]
        self.classes = class_names(files[0].parent, CLASSES[classes][self._column])
        self._record_NR = [read_records(path, self._heads, classes) for path in files]
        self._starts = np.cumsum([0, *map(len, self._record_NR)]).tolist()
        content = digest(part[row].tobytes() for part in self._record_NR for row in (0, -1))
        skipped = Skipped(name or f"cifar{classes}")
        super().__init__(skipped, self._starts[-1], f"{content} {labels}", **passes)

    def _sample(self, index: int) -> Sample:
        part = bisect.bisect(self._starts, index) - 1
        record_R = self._record_NR[part][index - self._starts[part]]
        plane_CX = record_R[self._heads :].reshape(3, SIDE * SIDE)
        pixel_XC = np.empty((SIDE * SIDE, 3), dtype=np.uint8)
        for channel in range(3):  # takes half the time of a transposed copy
            pixel_XC[:, channel] = plane_CX[channel]
        other = None if self._other is None else {self._other: int(record_R[1 - self._column])}
        return Sample(
            id=f"{self._split}/{index}",
            data=pixel_XC.tobytes(),
            shape=SHAPE,
            source=self.name,
            label=int(record_R[self._column]),
            meta=other,
        )


def find_files(root: Path, split: str) -> tuple[int, list[Path]]:
    """Return the number of classes of the data set, and its files in order.

    Raises:
        FileNotFoundError: the folder contains no data set.
        ValueError: the folder contains both data sets.
    """
    found = [
        (classes, files)
        for classes, folder in FOLDERS.items()
        for place in (root, root / folder)
        if (files := sorted(place.glob(FILES[classes, split])))
    ]
    check_root(root)
    if not found:
        wanted = " or ".join(FILES[classes, split] for classes in FOLDERS)
        raise FileNotFoundError(f"no {wanted} in {root} or its {' or '.join(FOLDERS.values())}")
    if len(found) > 1:
        places = ", ".join(str(files[0].parent) for _, files in found)
        raise ValueError(f"{root} holds several data sets: pass as root one of {places}")
    return found[0]


def class_names(folder: Path, classes: int) -> list[str] | None:
    """Return the names of the classes; None if the folder has no such file, or another number."""
    try:
        names = read_text(folder / NAMES[classes]).split()
    except (OSError, ValueError):
        return None
    return names if len(names) == classes else None


def read_records(path: Path, heads: int, classes: int) -> StoredRows:
    """Return the records [N, R] of one file.

    Raises:
        ValueError: the file has no whole number of records, or a label is out of range.
    """
    size, length = path.stat().st_size, heads + PIXELS
    if size == 0 or size % length:
        raise ValueError(
            f"{path}: {size} bytes are not a whole number of records of {length}; "
            "it is truncated or damaged: fetch it again"
        )
    record_NR = StoredRows(path, np.dtype(np.uint8), (size // length, length))
    largest_H = np.max([block_NR[:, :heads].max(axis=0) for block_NR in record_NR.blocks()], axis=0)
    for largest, count in zip(largest_H.tolist(), CLASSES[classes], strict=True):
        if largest >= count:
            raise ValueError(f"{path}: label {largest} lies outside [0, {count}); no such data set")
    return record_NR
