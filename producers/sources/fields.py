"""Functions that make the fields of a sample fit the rules of the wire."""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgpack

from stream_ssl.producers.sources.base import Skipped
from stream_ssl.wire.sample import (
    MAX_ID_BYTES,
    MAX_LABEL,
    MAX_META_BYTES,
    MAX_SOURCE_BYTES,
    Scalar,
    is_capture_time,
)

DIGEST_CHARS = 16
OLDEST = 631_152_000  # 1990: an earlier time is of a clock or a field that was not set
PROBE = 2**16  # bytes


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
    """Return a function for `fitting_meta` that counts a fact without room as `bad facts`."""
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
    """Return the label in a value, as `class_in` does; None for a value that is no label.

    `skipped` counts such a value as `bad label`, and logs it with the sample `what`.
    """
    try:
        return class_in(value)
    except ValueError as error:
        skipped.note("bad label", f"the label of {what}", error)
        return None
