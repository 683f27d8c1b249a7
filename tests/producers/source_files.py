"""Tiny files in the formats that the sources read."""

import gzip
import io
import os
import tarfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from PIL import Image

from stream_ssl.wire import Sample


def idx_bytes(array: np.ndarray) -> bytes:
    head = bytes([0, 0, 8, array.ndim])
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return head + sizes + array.astype(np.uint8).tobytes()


def write_idx(raw: Path, stem: str, images: np.ndarray, labels: np.ndarray, packed: bool) -> None:
    raw.mkdir(parents=True, exist_ok=True)
    for name, array in (("images-idx3", images), ("labels-idx1", labels)):
        data = idx_bytes(array)
        path = raw / f"{stem}-{name}-ubyte"
        if packed:
            path.with_name(path.name + ".gz").write_bytes(gzip.compress(data))
        else:
            path.write_bytes(data)


def named(sample: Sample) -> str:
    """Return a sample's id without the digest of the content."""
    name, _, digest = sample.id.rpartition("#")
    assert len(digest) == 16
    return name


def pixels(count: int, *shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), dtype=np.uint8)


def write_cifar(path: Path, image_NHWC: np.ndarray, *labels: Iterable[int]) -> None:
    planes = image_NHWC.transpose(0, 3, 1, 2).reshape(len(image_NHWC), -1)
    heads = [np.asarray(column, np.uint8)[:, None] for column in labels]
    path.write_bytes(np.concatenate([*heads, planes], axis=1).tobytes())


def encoded(image_HWC: np.ndarray, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.fromarray(image_HWC.squeeze()).save(file, kind)
    return file.getvalue()


def write_images(folder: Path, count: int, kind: str = "PNG", seed: int = 0) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    suffix = {"PNG": "png", "JPEG": "jpg", "WEBP": "webp"}[kind]
    paths = []
    for number, image_HWC in enumerate(pixels(count, 6, 5, 3, seed=seed)):
        paths.append(folder / f"{number:03d}.{suffix}")
        paths[-1].write_bytes(encoded(image_HWC, kind))
    return paths


def age(path: Path, seconds: float) -> None:
    """Set the time of a file, in seconds after the epoch."""
    os.utime(path, ns=(int(seconds * 1e9), int(seconds * 1e9)))


def write_tar(path: Path, members: Iterable[tuple[str, bytes]], mode: str = "w") -> None:
    with tarfile.open(path, mode) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def shard_members(first: int, count: int) -> list[tuple[str, bytes]]:
    members = []
    for number, image_HWC in enumerate(pixels(count, 6, 5, 3, seed=first), start=first):
        members += [
            (f"{number:06d}.png", encoded(image_HWC)),
            (f"{number:06d}.cls", str(number % 3).encode()),
            (f"{number:06d}.json", b'{"n": %d, "box": [1, 2]}' % number),
        ]
    return members
