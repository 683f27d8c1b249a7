"""Functions that make the fields of a sample fit the rules of the wire."""

from __future__ import annotations

import errno
import hashlib
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from stat import S_ISDIR, S_ISREG

import msgpack

from stream_ssl.producers.sources.base import BrokenFileError, Skipped
from stream_ssl.wire.sample import (
    MAX_ID_BYTES,
    MAX_LABEL,
    MAX_META_BYTES,
    MAX_SOURCE_BYTES,
    Scalar,
    is_capture_time,
)

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
}
LFS = b"version https://git-lfs.github.com/"
POINTER = "a pointer of Git LFS and not the file itself: run `git lfs pull` where it was cloned"
HEIF = {
    *(b"avif", b"avis", b"mif1", b"msf1"),
    *(b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs"),
}
"""Brands of AVIF and HEIF files, as telephones write them."""
DIGEST_CHARS = 16
USER = re.compile(r"(//)([^/?#@\s]+)(?=@)")
PARAMETER = re.compile(r"(?<=[?&;])([^=?&;#\s]*=)([^&;#\s]+)")
FIELD = re.compile(r"[?&;]([^=?&;]*)[^&;]*")
SECRETS = ("sig", "key", "auth", "jwt", "pwd", "pass", "hmac", "policy", "sas")
SECRET_PARTS = ("signature", "token", "secret", "password", "credential", "apikey", "accesskey")
SIGNING = ("xamz", "xgoog", "xoss")
"""Beginnings of the parameters with which Amazon, Google and Alibaba sign URLs."""
GRANTS = ("expires", "expiry", "exp", "keypairid", "googleaccessid", "ossaccesskeyid")
"""Parameters beside a signature or a token, which say for whom and until when it is valid."""
AZURE = {
    *("sv", "ss", "srt", "sp", "st", "se", "spr", "sip", "sr", "si", "sdd"),
    *("skoid", "sktid", "skt", "ske", "sks", "skv"),
}
"""Parameters of a shared access signature, whose signature is `sig`."""
OLDEST = 631_152_000  # 1990: an earlier time is of a clock or a field that was not set
PROBE = 2**16  # bytes
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


def digest(parts: Iterable[bytes | memoryview]) -> str:
    """Return 64 bits of blake2b over the parts, as hexadecimal digits."""
    state = hashlib.blake2b(digest_size=DIGEST_CHARS // 2)
    for part in parts:
        state.update(part)
    return state.hexdigest()


def files_of(path: Path) -> list[Path]:
    """Return the file, or the files in a folder, in order.

    Hidden files and SQLite's index of a log (-shm) are left out, because programs that only show or
    read the folder make and change them.
    """
    if not path.is_dir():
        return [path]
    parts = (part for part in path.iterdir() if not part.name.endswith("-shm"))
    return sorted(part for part in parts if part.is_file() and not part.name.startswith("."))


def file_name(path: Path) -> str:
    """Return NAME~DIGEST, which identifies a file by name and content, in any folder.

    The digest distinguishes files with the same name in different folders. It covers the size, and
    64 KiB at the beginning, in the middle and at the end. The digest of a folder covers its files.

    Raises:
        OSError: the file cannot be read.
    """
    state = hashlib.blake2b(digest_size=DIGEST_CHARS // 2)
    for part in files_of(path):
        size = part.stat().st_size
        state.update(size.to_bytes(8, "big"))
        with part.open("rb") as file:
            for at in (0, max(0, (size - PROBE) // 2), max(0, size - PROBE)):
                file.seek(at)
                state.update(file.read(PROBE))
    return f"{path.name}~{state.hexdigest()}"


def utf8_name(name: str) -> str:
    """Return the name of a file, which need not be UTF-8, for a position or the wire."""
    return os.fsencode(name).decode(errors="backslashreplace")


def source_name(name: str) -> str:
    """Return the name of a file or folder, cut to the size of a source's name on the wire."""
    return utf8_name(name).encode()[:MAX_SOURCE_BYTES].decode(errors="ignore")


def content_id(name: str, data: bytes | memoryview) -> str:
    """Return the id NAME#DIGEST. Ids are equal only if both name and content are equal."""
    return short_id(f"{name}#{digest([data])}")


def short_id(text: str) -> str:
    """Return `text`, or its beginning and a digest of the whole if it is too long for an id."""
    # File names need not be UTF-8, but ids must be.
    try:
        raw = text.encode(errors="surrogateescape")
    except UnicodeEncodeError:  # a lone surrogate from JSON
        raw = text.encode(errors="surrogatepass")
    if len(raw) <= MAX_ID_BYTES and raw == text.encode(errors="replace"):
        return text
    head = raw[: MAX_ID_BYTES - DIGEST_CHARS - 1].decode(errors="ignore")
    return f"{head}#{digest([raw])}"


def fitting_time(*times: float) -> float:
    """Return the first of the capture times that the wire accepts, or the present time."""
    return next(filter(is_capture_time, times), time.time())


def without_secrets(text: str) -> str:
    """Return a text in which digests replace the passwords, tokens and signatures of its URLs.

    Different secrets have different digests, so URLs stay different.
    """

    def hidden(match: re.Match[str]) -> str:
        secret = match[1] == "//" or _secret(_plain(match[1][:-1]))
        return f"{match[1]}~{digest([match[2].encode(errors='replace')])}" if secret else match[0]

    return PARAMETER.sub(hidden, USER.sub(hidden, text))


def url_id(url: str) -> str:
    """Return what identifies a URL's picture: the URL without its name, password and signature.

    The same picture often has another signature in the next list. A signature and its expiry never
    name a picture, because they are computed from the rest of the URL. A token or a key may name
    the picture, so a digest of it stays, unless the path ends like an image file.
    """
    whole, mark, fragment = url.partition("#")
    head, *queries = re.split(r"(?=\?)", whole, maxsplit=1)
    query = "".join(queries)
    names = [_plain(match[1]) for match in FIELD.finditer(query)]
    signed = any(name.endswith("signature") or name in ("sig", "hmac") for name in names)
    file = head.lower().endswith((*SUFFIXES, *OTHER_IMAGES))
    granted = signed or (file and any(map(_secret, names)))

    def dropped(name: str) -> bool:
        return granted and (
            name.startswith(SIGNING)
            or name in GRANTS
            or (_secret(name) and (file or name != "key"))
            or (name in AZURE and "sig" in names)
        )

    kept = FIELD.sub(lambda match: "" if dropped(_plain(match[1])) else match[0], query)
    if kept[:1] in ("&", ";"):
        kept = f"?{kept[1:]}"
    head = re.sub(r"//[^/?#@\s]+@", "//", head, count=1)
    return short_id(without_secrets(head + kept + mark + fragment))


def _plain(parameter: str) -> str:
    """Return a parameter's name in small letters, without hyphens and dots."""
    return re.sub(r"[-_.]|%2d|%5f|%2e", "", parameter[:MAX_ID_BYTES].lower())


def _secret(name: str) -> bool:
    """Return whether a plain name is that of a password, a token or a signature."""
    return name in SECRETS or any(part in name for part in SECRET_PARTS)


def fitting_meta(
    *facts: Mapping[str, object], too_long: Callable[[str], object] = lambda _: None
) -> dict[str, Scalar] | None:
    """Return the scalars among the facts, in their order, up to the size limit of the wire.

    Args:
        too_long: called with the name of each scalar for which no room is left.
    """
    meta: dict[str, Scalar] = {}
    room = MAX_META_BYTES - 8  # bytes for the map's header
    for key, value in (item for part in facts for item in part.items()):
        if key in meta or not isinstance(value, str | int | float | bool):
            continue
        try:
            size = len(msgpack.packb({key: value}))
        except (OverflowError, UnicodeEncodeError):  # beyond 64 bits, or a lone surrogate
            continue
        if size <= room:
            room -= size
            meta[key] = value
        else:
            too_long(key)
    return meta or None


def note_too_long(skipped: Skipped, what: str) -> Callable[[str], object]:
    """Return a function that counts and logs a fact without room, for `fitting_meta`.

    Args:
        skipped: counts it as `bad facts`.
        what: the sample, for the log.
    """
    limit = f"too long: all facts of a sample may have {MAX_META_BYTES} bytes"
    return lambda name: skipped.note("bad facts", f"{name!r} of {what}", limit)


def class_in(value: object) -> int | None:
    """Return the label in a cell, a header or a file, or None for an empty value or -1.

    A table with gaps has whole numbers as "3.0", and its gaps may be "nan". Editors of Windows
    begin a file with a byte-order mark.

    Raises:
        ValueError: the value is something else, or a number that no label has.

    >>> [class_in(value) for value in (3, " 3 ", b"3\\n", "3.0", 3.0, b"\\xef\\xbb\\xbf3")]
    [3, 3, 3, 3, 3, 3]
    >>> [class_in(value) for value in ("", " ", None, "nan", -1)]
    [None, None, None, None, None]
    """
    text = value.decode("utf-8-sig", errors="replace") if isinstance(value, bytes) else value
    try:
        number = -1.0 if text is None or not str(text).strip() else float(text)  # type: ignore[arg-type]
        if isinstance(text, str) and "_" in text:  # the name 1_2 is no number, as it is in Python
            number = math.inf
    except (ValueError, TypeError, OverflowError):
        number = math.inf
    if math.isnan(number) or number == -1:
        return None
    if not (0 <= number <= MAX_LABEL and number.is_integer()):
        raise ValueError(f"{text!r:.80} is no whole number from 0 to {MAX_LABEL}")
    return int(number)


def label_of(value: object, skipped: Skipped, what: str) -> int | None:
    """Return the label in a value. A value without a label costs only itself: it is counted.

    Args:
        value: the value; see `class_in`.
        skipped: counts and logs it as `bad label`.
        what: the sample, for the log.
    """
    try:
        return class_in(value)
    except ValueError as error:
        skipped.note("bad label", f"the label of {what}", error)
        return None


def check_above_0(**values: float | None) -> None:
    """Raise ValueError if a value is not above 0. None is accepted."""
    for what, value in values.items():
        if value is not None and not value > 0:
            raise ValueError(f"{what} {value}: must be above 0")


DAY = 86_400.0
"""The longest pause that a source accepts, in seconds; clocks of sockets do not take infinity."""


def check_ranges(*rules: tuple[str, float | None, float, float]) -> None:
    """Check values against ranges; each rule is (name, value, lowest, highest). None is accepted.

    Raises:
        ValueError: a value is outside its range. The message names the first such value.
    """
    for what, value, low, high in rules:
        if value is not None and not low <= value <= high:  # NaN lies in no range
            rule = f"be {low:g} or more" if high == math.inf else f"lie in [{low:g}, {high:g}]"
            raise ValueError(f"{what} {value}: must {rule}")
