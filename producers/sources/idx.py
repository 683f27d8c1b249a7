"""A source of images in IDX files, the format of MNIST and Fashion-MNIST.

Shapes: N images, H x W pixels, C channels.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from stream_ssl.producers.sources.base import Skipped
from stream_ssl.producers.sources.fields import digest, source_name
from stream_ssl.producers.sources.finite import Finite
from stream_ssl.producers.sources.packed import GZIP, PACKED_DAMAGE, unpacked
from stream_ssl.producers.sources.stored_rows import StoredRows
from stream_ssl.wire.sample import Sample

UBYTE = 0x08
HEAD_BYTES = 20  # of a file of four dimensions
STEMS = {"train": "train", "test": "t10k"}


class IdxDataset(Finite):
    """Images and labels of IDX files, the format of MNIST.

    Plain files are read image by image, gzipped files are loaded. Sample ids are "FILE/INDEX",
    where FILE is the name of the image file up to "-images".

    Args:
        root: folder in torchvision's layout (ROOT/FashionMNIST/raw/...), or the raw folder.
        split: which pair of files to read in `root`.
        images: the file of images, instead of a root.
        labels: the file of labels, used with `images`; null: the samples have no labels.
        name: the source's name; null: the name of the data set's folder.

    Raises:
        ValueError: a file is not IDX or is incomplete, or the numbers of images and labels differ.
        FileNotFoundError: the files do not exist.
    """

    def __init__(
        self,
        root: Path | None = None,
        split: Literal["train", "test"] = "train",
        images: Path | None = None,
        labels: Path | None = None,
        name: str | None = None,
        **passes: Any,
    ) -> None:
        if (root is None) == (images is None):
            raise ValueError("an IDX data set is named by root, or by images: pass one of the two")
        if root is not None and labels is not None:
            raise ValueError("a root finds its own labels: pass labels along with images only")
        if root is not None:
            images, labels = find_pair(Path(root), split)
        assert images is not None
        images = Path(images)
        self._image_NHWC, shape = read_images(images)
        self._shape = shape[1:]
        self._label_N = None if labels is None else read_labels(Path(labels), shape[0])
        self._prefix = images.name.partition("-images")[0].partition(".")[0]
        content = digest(
            [
                str(shape).encode(),
                *(self._image_NHWC[row].tobytes() for row in (0, -1) if shape[0]),
                b"" if self._label_N is None else self._label_N.tobytes(),
            ]
        )
        folder = images.absolute().parent
        name = name or source_name((folder.parent if folder.name == "raw" else folder).name)
        super().__init__(Skipped(name), shape[0], content, **passes)

    def _sample(self, index: int) -> Sample:
        return Sample(
            id=f"{self._prefix}/{index}",
            data=self._image_NHWC[index].tobytes(),
            shape=self._shape,
            source=self.name,
            label=None if self._label_N is None else int(self._label_N[index]),
        )


def find_pair(root: Path, split: str) -> tuple[Path, Path]:
    """Return the files of images and labels under ROOT, ROOT/raw or ROOT/*/raw.

    Raises:
        FileNotFoundError: there is no such pair.
        ValueError: there are several data sets.
    """
    stem = STEMS[split]
    folders = [root, root / "raw", *sorted(root.glob("*/raw"))]
    pairs = []
    for folder in folders:
        images = first_file(folder / f"{stem}-images-idx3-ubyte")
        labels = first_file(folder / f"{stem}-labels-idx1-ubyte")
        if images is not None and labels is not None:
            pairs.append((images, labels))
    if not pairs:
        raise FileNotFoundError(
            f"no {stem}-images-idx3-ubyte and {stem}-labels-idx1-ubyte, plain or .gz, under "
            f"{root}, {root}/raw or {root}/*/raw; pass images and labels for other names"
        )
    if len(pairs) > 1:
        found = ", ".join(str(images.parent.parent) for images, _ in pairs)
        raise ValueError(f"{root} holds several data sets: pass as root one of {found}")
    return pairs[0]


def first_file(path: Path) -> Path | None:
    """Return `path` or its compressed form, if one of them exists."""
    packed = path.with_name(path.name + ".gz")
    return next((candidate for candidate in (path, packed) if candidate.is_file()), None)


def read_images(path: Path) -> tuple[StoredRows | NDArray[np.uint8], tuple[int, int, int, int]]:
    """Return the pixels of an IDX file of N x H x W or N x H x W x C bytes, and (N, H, W, C).

    Raises:
        ValueError: the dimensions are not those of images.
    """
    array = read_idx(path)
    shape = (*array.shape, 1) if len(array.shape) == 3 else array.shape
    if len(shape) != 4 or shape[-1] not in (1, 3, 4):
        raise ValueError(
            f"{path}: dimensions {shape} are no images; need N x H x W or N x H x W x C"
        )
    return array, shape


def read_labels(path: Path, count: int) -> NDArray[np.uint8]:
    """Return the labels [N] of an IDX file, one label for each of `count` images.

    Raises:
        ValueError: the file has another number of labels.
    """
    label_N = read_idx(path)
    if isinstance(label_N, StoredRows):
        label_N = np.concatenate(list(label_N.blocks()))
    if label_N.shape != (count,):
        raise ValueError(
            f"{path}: dimensions {label_N.shape} are not one label for each of {count} images; "
            "pass the labels of the same split"
        )
    return label_N


def read_idx(path: Path) -> StoredRows | NDArray[np.uint8]:
    """Return the array of unsigned bytes in an IDX file: loaded if the file is gzipped.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is not IDX, has another type than bytes, or has the wrong length.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    if head.startswith(GZIP):
        try:
            body = np.frombuffer(unpack(path), dtype=np.uint8)
        except PACKED_DAMAGE as error:
            raise ValueError(f"{path}: cannot be unpacked ({error}); fetch it again") from error
        sizes, start = parse_head(body[:HEAD_BYTES].tobytes(), len(body), path)
        return body[start:].reshape(sizes)
    if not head:
        raise ValueError(f"{path}: the file is empty; fetch it again")
    sizes, start = parse_head(head, path.stat().st_size, path)
    return StoredRows(path, np.dtype(np.uint8), sizes, start)


def unpack(path: Path) -> bytearray:
    """Return the content of a gzipped IDX file, or slightly more than its header requires."""
    body = bytearray()
    with path.open("rb") as file:
        for part in unpacked(file, GZIP, lambda: False):
            body += part
            if len(body) > needed(body)[1]:
                break
    return body


def needed(body: bytearray | bytes) -> tuple[tuple[int, ...], int]:
    """Return the dimensions in an IDX file's header, and how many bytes the file needs."""
    head = 4 + 4 * body[3] if len(body) > 3 else 4
    sizes = tuple(int.from_bytes(body[at : at + 4], "big") for at in range(4, head, 4))
    return sizes, head + math.prod(sizes)


def parse_head(head: bytes, size: int, path: Path) -> tuple[tuple[int, ...], int]:
    """Return the dimensions of an IDX file of `size` bytes, and the offset of its values.

    The file has the bytes 0, 0, type and rank, then the dimensions (big-endian), then the values.

    Raises:
        ValueError: the bytes are not IDX of unsigned bytes, or have the wrong length.
    """
    magic = list(head[:4])
    if magic[:3] != [0, 0, UBYTE] or not magic[3:] or not 1 <= magic[3] <= 4:
        raise ValueError(f"{path}: begins with {magic}, not 0, 0, {UBYTE}, 1..4: no IDX of bytes")
    sizes, need = needed(head)
    if size != need:
        raise ValueError(
            f"{path}: {size} bytes, but dimensions {sizes} need {need}; "
            "it is truncated or damaged: fetch it again"
        )
    return sizes, need - math.prod(sizes)
