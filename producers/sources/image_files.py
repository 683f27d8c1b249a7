"""Image files: their formats by their first bytes, and how they become samples."""

from __future__ import annotations

import errno
import re
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import Any

from stream_ssl.producers.sources.base import BrokenFileError, Skipped
from stream_ssl.producers.sources.fields import PROBE, content_id
from stream_ssl.wire.sample import Sample

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
OTHER_IMAGES = (
    *(".jpe", ".jfif", ".bmp", ".dib", ".tif", ".tiff", ".gif", ".avif", ".heic", ".heif"),
    *(".jp2", ".jxl", ".ppm", ".pgm", ".pnm"),
)
"""Extensions that folders also list. The first bytes decide; unsupported files are counted."""
MAGIC = {
    b"BM": "BMP",
    b"II*\0": "TIFF",
    b"MM\0*": "TIFF",
    b"II+\0": "BigTIFF",
    b"MM\0+": "BigTIFF",
    b"GIF8": "GIF",
    b"\0\0\0\x0cjP": "JPEG 2000",
    b"\0\0\0\x0cJXL": "JPEG XL",
    b"\xff\x0a": "JPEG XL",
    b"P5": "PGM",
    b"P6": "PPM",
    b"%PDF": "PDF",
    b"\0\0\1\0": "ICO",
    b"8BPS": "PSD",
}
LFS = b"version https://git-lfs.github.com/"
POINTER = "a pointer of Git LFS and not the file itself: run `git lfs pull` where it was cloned"
HEIF = {
    *(b"avif", b"avis", b"mif1", b"msf1"),
    *(b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs"),
}
"""Brands of AVIF and HEIF files, as telephones write them."""
MAX_FILE = 256 * 2**20  # bytes; far larger than any packet


def codec_of(data: bytes) -> str | None:
    """Return the codec that the first bytes show, since names may be wrong; None: not supported."""
    if data.startswith(b"\xff\xd8\xff"):
        return "jpeg"
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "png"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "webp"
    return None


def no_image(data: bytes) -> str:
    """Return why bytes of an unsupported format are not sent, and the remedy if there is one."""
    if not data:
        return "empty: it has 0 bytes"
    if data.startswith(LFS):
        return POINTER
    if re.match(rb"\s*<(!doctype html|html)", data[:PROBE], re.IGNORECASE):
        return "a web page, and not an image: fetch it again"
    kind = next((kind for magic, kind in MAGIC.items() if data.startswith(magic)), None)
    if data[4:8] == b"ftyp" and data[8:12] in HEIF:
        kind = "AVIF or HEIF"
    if re.match(rb"\s*<(\?xml|!--|!DOCTYPE svg|svg)", data[:PROBE]) and b"<svg" in data[:PROBE]:
        kind = "SVG"
    begins = f"{kind}; convert it" if kind else data[:8].hex(" ")
    return f"neither JPEG, PNG nor WebP by its first bytes: {begins}"


def check_pulled(path: Path) -> None:
    """Check that a file is not a pointer of Git LFS, which stands in place of a large file.

    Raises:
        BrokenFileError: the file is a pointer of Git LFS.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        if file.read(len(LFS)) == LFS:
            raise BrokenFileError(f"{path} is {POINTER}")


def read_image(path: Path) -> bytes:
    """Return the content of an image file.

    Raises:
        OSError: the file cannot be read, is a pipe or a device, or exceeds `MAX_FILE` bytes.
    """
    stat = path.stat()  # opening a pipe would block
    if S_ISDIR(stat.st_mode):
        why = "a folder, and one image is needed: give a file of the folder"
        raise IsADirectoryError(errno.EISDIR, why, str(path))
    if not S_ISREG(stat.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    if stat.st_size > MAX_FILE:
        why = f"{stat.st_size} bytes, more than the {MAX_FILE} that are read"
        raise OSError(errno.EFBIG, why, str(path))
    with path.open("rb") as file:
        return file.read(MAX_FILE + 1)  # the file may grow while it is read


def image_sample(name: str, data: bytes, skipped: Skipped, **more: Any) -> Sample | None:
    """Return the sample of an image file, with the id NAME#DIGEST.

    The result is None if the data is in another format; `skipped` counts it. `more` are further
    fields of the sample.
    """
    codec = codec_of(data)
    if codec is None:
        skipped.note("no image", name, no_image(data))
        return None
    return Sample(content_id(name, data), data, codec, source=skipped.source, **more)
