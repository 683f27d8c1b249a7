"""IDX files: the layout of MNIST, Fashion-MNIST and their kin.

Shapes: N images, H x W pixels, C channels.
"""

from __future__ import annotations

import math
import zlib
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from stream_ssl.producers.sources.fields import digest
from stream_ssl.producers.sources.finite import Finite
from stream_ssl.producers.sources.tar import GZIP, ShardError, unpacked
from stream_ssl.wire.sample import Sample

UBYTE = 0x08
STEMS = {"train": "train", "test": "t10k"}


class IdxDataset(Finite):
    """Images of an IDX file, with their labels; mapped, or where gzipped unpacked into memory.

    Sample ids are "FILE/INDEX", with FILE the images' file name up to "-images".

    Args:
        root: folder as torchvision lays it out (ROOT/FashionMNIST/raw/...), or the raw folder.
        split: which of its two pairs of files.
        images: instead of a root, the file of images.
        labels: and the file of labels; null: the samples carry none.
        name: the source's name; null: that of the data set's folder.

    Raises:
        ValueError: a file is not IDX or not whole, or images and labels do not match in number.
        FileNotFoundError: no such files.
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
        self._image_NHWC = read_images(images)
        self._label_N = None if labels is None else read_labels(Path(labels), len(self._image_NHWC))
        self._prefix = images.name.partition("-images")[0].partition(".")[0]
        content = digest(
            [
                str(self._image_NHWC.shape).encode(),
                self._image_NHWC[:1].tobytes(),
                self._image_NHWC[-1:].tobytes(),
                b"" if self._label_N is None else self._label_N.tobytes(),
            ]
        )
        folder = images.absolute().parent
        name = name or (folder.parent if folder.name == "raw" else folder).name
        super().__init__(name, len(self._image_NHWC), content, **passes)

    def _sample(self, index: int) -> Sample:
        image_HWC = self._image_NHWC[index]
        height, width, channels = image_HWC.shape
        return Sample(
            id=f"{self._prefix}/{index}",
            data=image_HWC.tobytes(),
            shape=(height, width, channels),
            source=self.name,
            label=None if self._label_N is None else int(self._label_N[index]),
        )


def find_pair(root: Path, split: str) -> tuple[Path, Path]:
    """Files of images and labels under ROOT, ROOT/raw or ROOT/*/raw.

    Raises:
        FileNotFoundError: none there.
        ValueError: several data sets there.
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
    """`path` or its compressed form, whichever is there."""
    packed = path.with_name(path.name + ".gz")
    return next((candidate for candidate in (path, packed) if candidate.is_file()), None)


def read_images(path: Path) -> NDArray[np.uint8]:
    """Pixels [N, H, W, C] of an IDX file of N x H x W or N x H x W x C bytes."""
    array = read_idx(path)
    if array.ndim == 3:
        array = array[..., None]
    if array.ndim != 4 or array.shape[-1] not in (1, 3, 4):
        raise ValueError(
            f"{path}: dimensions {array.shape} are no images; need N x H x W or N x H x W x C"
        )
    return array


def read_labels(path: Path, count: int) -> NDArray[np.uint8]:
    """Labels [N] of an IDX file, one for each of `count` images."""
    label_N = read_idx(path)
    if label_N.shape != (count,):
        raise ValueError(
            f"{path}: dimensions {label_N.shape} are not one label for each of {count} images; "
            "pass the labels of the same split"
        )
    return label_N


def read_idx(path: Path) -> NDArray[np.uint8]:
    """The array of unsigned bytes in an IDX file, gzipped or not.

    Raises:
        ValueError: the file is not IDX, not of bytes, or longer or shorter than it says.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    body: NDArray[np.uint8]
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    if packed:
        try:
            body = np.frombuffer(unpack(path), dtype=np.uint8)
        except (EOFError, OSError, zlib.error, ShardError) as error:
            raise ValueError(f"{path}: cannot be unpacked ({error}); fetch it again") from error
    elif path.stat().st_size == 0:
        raise ValueError(f"{path}: the file is empty; fetch it again")
    else:
        # Indexing a memmap costs ten times what indexing an array does, and maps no less.
        body = np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
    return parse_idx(body, path)


def unpack(path: Path) -> bytearray:
    """Return the content of a gzipped IDX file, or a little more than its sizes need."""
    body = bytearray()
    with path.open("rb") as file:
        for part in unpacked(file, GZIP, lambda: False):
            body += part
            if len(body) > needed(body)[1]:
                break
    return body


def needed(body: bytearray | bytes) -> tuple[tuple[int, ...], int]:
    """Return the sizes that an IDX file's head tells, and how many bytes the file needs."""
    head = 4 + 4 * body[3] if len(body) > 3 else 4
    sizes = tuple(int.from_bytes(body[at : at + 4], "big") for at in range(4, head, 4))
    return sizes, head + math.prod(sizes)


def parse_idx(body: NDArray[np.uint8], path: Path) -> NDArray[np.uint8]:
    """The array that an IDX file's bytes describe: 0, 0, type, rank, sizes (big-endian), values."""
    magic = body[:4].tolist()
    if magic[:3] != [0, 0, UBYTE] or not magic[3:] or not 1 <= magic[3] <= 4:
        raise ValueError(f"{path}: begins with {magic}, not 0, 0, {UBYTE}, 1..4: no IDX of bytes")
    sizes, need = needed(body[:20].tobytes())
    if len(body) != need:
        raise ValueError(
            f"{path}: {len(body)} bytes, but dimensions {sizes} need {need}; "
            "it is truncated or damaged: fetch it again"
        )
    return body[need - math.prod(sizes) :].reshape(sizes)
