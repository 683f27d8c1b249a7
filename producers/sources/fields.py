"""The fields of a sample, made to fit the wire's rules."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from stat import S_ISREG

import msgpack

from stream_ssl.wire.sample import MAX_ID_BYTES, MAX_META_BYTES, Scalar

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
OTHER_IMAGES = (
    *(".jpe", ".jfif", ".bmp", ".dib", ".tif", ".tiff", ".gif", ".avif", ".heic", ".heif"),
    *(".jp2", ".jxl", ".ppm", ".pgm", ".pnm"),
)
"""Names of images that folders list too: the bytes decide, and what is not sent is counted."""
MAGIC = {
    b"BM": "BMP",
    b"II*\0": "TIFF",
    b"MM\0*": "TIFF",
    b"GIF8": "GIF",
    b"\0\0\0\x0cjP": "JPEG 2000",
    b"\0\0\0\x0cJXL": "JPEG XL",
    b"\xff\x0a": "JPEG XL",
    b"P5": "PGM",
    b"P6": "PPM",
}
DIGEST_CHARS = 16
PROBE = 2**16  # bytes
MAX_FILE = 256 * 2**20  # bytes; far above any packet


def codec_of(data: bytes) -> str | None:
    """The codec by the first bytes, since names lie; None: not one that the wire carries."""
    if data.startswith(b"\xff\xd8\xff"):
        return "jpeg"
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "png"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "webp"
    return None


def no_image(data: bytes) -> str:
    """Return why bytes without a codec are not sent, and the remedy if there is one."""
    kind = next((kind for magic, kind in MAGIC.items() if data.startswith(magic)), None)
    if data[4:12] in (b"ftypavif", b"ftypheic", b"ftypmif1"):
        kind = "AVIF or HEIF"
    return f"neither JPEG, PNG nor WebP by its first bytes{f': {kind}; convert it' * bool(kind)}"


def read_image(path: Path) -> bytes:
    """The content of an image's file.

    Raises:
        OSError: it cannot be read, or is a pipe or device, or larger than any image.
    """
    stat = path.stat()  # opening a pipe would wait for its other end
    if not S_ISREG(stat.st_mode):
        raise OSError("not a regular file")
    if stat.st_size > MAX_FILE:
        raise OSError(f"{stat.st_size} bytes, more than the {MAX_FILE} that are read")
    with path.open("rb") as file:
        return file.read(MAX_FILE + 1)  # of a file that grows meanwhile, a part


def digest(parts: Iterable[bytes | memoryview]) -> str:
    """64 bits of blake2b over the parts, as hexadecimal digits."""
    state = hashlib.blake2b(digest_size=DIGEST_CHARS // 2)
    for part in parts:
        state.update(part)
    return state.hexdigest()


def file_name(path: Path) -> str:
    """Return NAME~DIGEST, which names a file's content wherever the file lies.

    Files of one name in several folders differ by the digest, which is of the size and of 64 KiB
    at the beginning, in the middle and at the end. The digest of a folder is that of its files.

    Raises:
        OSError: the file cannot be read.
    """
    state = hashlib.blake2b(digest_size=DIGEST_CHARS // 2)
    parts = sorted(part for part in path.iterdir() if part.is_file()) if path.is_dir() else [path]
    for part in parts:
        size = part.stat().st_size
        state.update(size.to_bytes(8, "big"))
        with part.open("rb") as file:
            for at in (0, max(0, (size - PROBE) // 2), max(0, size - PROBE)):
                file.seek(at)
                state.update(file.read(PROBE))
    return f"{path.name}~{state.hexdigest()}"


def content_id(name: str, data: bytes | memoryview) -> str:
    """Return NAME#DIGEST as an id: the same name and content have the same id, others have not."""
    return short_id(f"{name}#{digest([data])}")


def short_id(text: str) -> str:
    """`text`, or where it is too long for an id its beginning and a digest of the whole."""
    # Names of files need not be UTF-8; the wire's ids are.
    raw = text.encode(errors="surrogateescape")
    if len(raw) <= MAX_ID_BYTES and raw == text.encode(errors="replace"):
        return text
    head = raw[: MAX_ID_BYTES - DIGEST_CHARS - 1].decode(errors="ignore")
    return f"{head}#{digest([raw])}"


def fitting_meta(*facts: Mapping[str, object]) -> dict[str, Scalar] | None:
    """The scalars among the facts, as many as the wire's limit allows, first come first."""
    meta: dict[str, Scalar] = {}
    room = MAX_META_BYTES - 8  # the map's own head
    for key, value in (item for part in facts for item in part.items()):
        if key in meta or not isinstance(value, str | int | float | bool):
            continue
        try:
            size = len(msgpack.packb({key: value}))
        except (OverflowError, UnicodeEncodeError):  # beyond 64 bits; a lone surrogate
            continue
        if size <= room:
            room -= size
            meta[key] = value
    return meta or None


def check_ranges(*rules: tuple[str, float, float, float]) -> None:
    """Refuses a value outside its range; each rule is name, value, lowest, highest.

    Raises:
        ValueError: names the first that is.
    """
    for what, value, low, high in rules:
        if not low <= value <= high or math.isnan(value):
            raise ValueError(f"{what} {value}: must lie in [{low:g}, {high:g}]")
