"""Safe readers for small files that another program may have written.

A file must be a regular file. Its bytes, its nesting depth and its numbers have limits. By default
the last part of a path must not be a link. Files that an operator names may be links, because
Kubernetes and Compose mount keys, tokens and configurations as links.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any, NoReturn

MOST_BYTES = 1 << 20
"""Default limit for the size of a file, in bytes."""
DEPTH = 64
"""Most levels of nested lists and maps in a JSON file."""
LARGEST = 1 << 64
"""Integers in a JSON file must lie between -LARGEST and LARGEST, both excluded."""

_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
    stat.S_IFSOCK: "a socket",
}
_FLAGS = ("O_NONBLOCK", "O_NOCTTY", "O_CLOEXEC", "O_BINARY")
"""Flags of `os.open`. Windows has only some of them, and producers also run on Windows."""
_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)


def open_file(path: Path, flags: int = os.O_RDONLY, links: bool = False, mode: int = 0o600) -> int:
    """Open a regular file and return its descriptor, without waiting for another process.

    Args:
        flags: the flags for `os.open`, such as `os.O_RDWR | os.O_CREAT`.
        links: follow a link in the last part of the path.
        mode: the mode of a file that is created.

    Raises:
        ValueError: the path is a link and `links` is False, or it is not a regular file.
        OSError: the file cannot be opened.
    """
    for name in _FLAGS if links else (*_FLAGS, "O_NOFOLLOW"):
        flags |= getattr(os, name, 0)
    try:
        handle = os.open(path, flags, mode)
    except OSError as error:
        if error.errno == errno.ELOOP:
            where = "a circle of links" if links else "a link, and links are not followed here"
            raise ValueError(f"{path}: is {where}; put a regular file in its place") from None
        if error.errno in (errno.ENXIO, errno.EISDIR):  # a pipe without a reader, a socket
            _check_regular(path, path.stat().st_mode)
        raise
    try:
        _check_regular(path, os.fstat(handle).st_mode)
    except ValueError:
        os.close(handle)
        raise
    return handle


def check_folder(path: Path, mode: int | None = None) -> None:
    """Check that a path is a folder and not a link, and set the mode of the folder.

    A path that does not exist passes the check. If `mode` is None, the folder keeps its mode.

    Raises:
        ValueError: the path is a link.
        OSError: the path is not a folder, it cannot be opened, or its mode cannot be set.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    except OSError:
        if not path.is_symlink():
            raise
        raise ValueError(
            f"{path}: is a link, and links are not followed here; put a folder in its place"
        ) from None
    try:
        if mode is not None:
            os.fchmod(handle, mode)
    finally:
        os.close(handle)


def read_bytes(path: Path, most: int = MOST_BYTES, links: bool = False) -> bytes:
    """Return the content of a regular file of at most `most` bytes.

    Raises:
        ValueError: the file is larger, a link while `links` is False, or not a regular file.
        OSError: the file cannot be read.
    """
    with open_binary(path, links) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"{path}: is larger than {most} bytes, the limit for a file of this kind")
    return content


def read_text(path: Path, most: int = MOST_BYTES, links: bool = False) -> str:
    """Return the UTF-8 text of a file, without a byte order mark; see `read_bytes`."""
    try:
        return read_bytes(path, most, links).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: byte {error.start} is no UTF-8 text") from None


def read_json(path: Path, most: int = MOST_BYTES, links: bool = False) -> Any:
    """Return the value of a JSON file; see `read_bytes` and `parse_json`."""
    text = read_text(path, most, links)
    try:
        return parse_json(text)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def read_map(path: Path, most: int = MOST_BYTES, links: bool = False) -> dict[str, Any]:
    """Return the map of a JSON file; see `read_json`.

    Raises:
        ValueError: `read_json` raises it, or the value is not a map.
        OSError: the file cannot be read.
    """
    found = read_json(path, most, links)
    if not isinstance(found, dict):
        raise ValueError(f"{path}: holds a {type(found).__name__}, and must hold a map: {{...}}")
    return found


def parse_json(text: str) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: the text is not JSON, its nesting exceeds DEPTH, it has a duplicate key, a
            number is not finite, or an integer exceeds LARGEST.
    """
    deepest = level = 0
    for bracket in re.findall(r"[\[\]{}]", _STRING.sub("", text)):
        level += 1 if bracket in "[{" else -1
        deepest = max(deepest, level)
    if deepest > DEPTH:
        raise ValueError(f"is nested {deepest} levels deep; at most {DEPTH} are read")
    try:
        return json.loads(
            text,
            parse_int=_integer,
            parse_float=_real,
            parse_constant=_constant,
            object_pairs_hook=_map,
        )
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON: {error}") from None


@contextmanager
def named(what: str, path: Path, remedy: str = "") -> Iterator[None]:
    """Turn errors of reading a file into a ValueError that says what the file is, and a remedy."""
    remedy = remedy and f"; {remedy}"
    try:
        yield
    except OSError as error:
        if isinstance(error, PermissionError):  # the file itself needs no change
            remedy = "; let this user read it (chown), or start the program as its owner"
        raise ValueError(f"{what} {path}: {error.strerror or error}{remedy}") from None
    except ValueError as error:
        raise ValueError(f"{what} {error}{remedy}") from None


def check_private(what: str, path: Path, content: str = "this secret") -> None:
    """Raise ValueError if every user of the machine may read a secret file."""
    mode = path.stat().st_mode
    if mode & 0o007:
        raise ValueError(
            f"{what} {path}: everybody may read {content} (mode {mode & 0o777:04o}); "
            f"{private_remedy(path)}"
        )


def private_remedy(path: Path) -> str:
    """Return how to make a file private."""
    return (
        f"run: chmod 600 {path}. If the mode stays as it is, the disk keeps no modes, such as "
        "/mnt/c of WSL, a FAT disk or a share: move the folder to another disk"
    )


def _check_regular(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "no file")
        raise ValueError(f"{path}: is {kind}; put a regular file in its place")


def open_binary(path: Path, links: bool = False) -> BufferedReader:
    """Open a regular file for reading. Raises the errors of `open_file`."""
    return open(open_file(path, links=links), "rb")


def _integer(digits: str) -> int:
    if len(digits) > 21 or not -LARGEST < (number := int(digits)) < LARGEST:
        raise ValueError(f"holds the number {digits[:30]}; numbers are below 2^64")
    return number


def _real(digits: str) -> float:
    if not math.isfinite(number := float(digits)):
        raise ValueError(f"holds the number {digits[:30]}, which is not finite")
    return number


def _constant(name: str) -> NoReturn:
    raise ValueError(f"holds {name}, which is not a finite number")


def _map(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        twice = next(key for key, count in counts.items() if count > 1)
        raise ValueError(f"has the key {twice[:80]!r} twice; remove one")
    return found
