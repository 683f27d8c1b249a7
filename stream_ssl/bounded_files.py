"""Readers of small files that others may have written, with bounds on everything they claim.

A file must be regular. It has a limit in bytes, in depth, and in the size of its numbers. The last
part of a path is not followed where it is a link, unless the caller says that an operator named the
file: Kubernetes and Compose mount keys, tokens and configurations as links.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
from collections import Counter
from io import BufferedReader
from pathlib import Path
from typing import Any, NoReturn

MOST_BYTES = 1 << 20
"""The most bytes of a file whose reader names no other limit."""
DEPTH = 64
"""Levels of lists and maps within each other."""
LARGEST = 1 << 64
"""Integers are smaller, and larger than its negative."""

_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
    stat.S_IFSOCK: "a socket",
}
_FLAGS = ("O_NONBLOCK", "O_NOCTTY", "O_CLOEXEC", "O_BINARY")
"""Of `os.open`, where the system has them: producers run on Windows too."""
_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)


def open_file(path: Path, flags: int = os.O_RDONLY, links: bool = False, mode: int = 0o600) -> int:
    """Open a regular file and return its descriptor; never wait for another process.

    Args:
        path: the file.
        flags: as for `os.open`, such as `os.O_RDWR | os.O_CREAT`.
        links: follow a link in the last part of the path.
        mode: of a file that is created.

    Raises:
        ValueError: it is a link, or no regular file.
        OSError: it cannot be opened.
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
    """Check that a path is a folder and no link, and set the folder's mode.

    A path where nothing is passes the check.

    Raises:
        ValueError: it is a link.
        OSError: it is no folder, cannot be opened, or its mode cannot be set.
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
    """Return what a regular file of at most `most` bytes holds.

    Raises:
        ValueError: it is larger, a link that is not followed, or no regular file.
        OSError: it cannot be read.
    """
    with open_binary(path, links) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"{path}: is larger than {most} bytes, the limit for a file of this kind")
    return content


def read_text(path: Path, most: int = MOST_BYTES, links: bool = False) -> str:
    """Return the UTF-8 text that a file holds; see `read_bytes`."""
    try:
        return read_bytes(path, most, links).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: byte {error.start} is no UTF-8 text") from None


def read_json(path: Path, most: int = MOST_BYTES, links: bool = False) -> Any:
    """Return the value that a JSON file holds; see `read_bytes` and `parse_json`."""
    text = read_text(path, most, links)
    try:
        return parse_json(text)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def read_map(path: Path, most: int = MOST_BYTES, links: bool = False) -> dict[str, Any]:
    """Return the map that a JSON file holds; see `read_json`.

    Raises:
        ValueError: as `read_json`; or it holds something else.
        OSError: it cannot be read.
    """
    found = read_json(path, most, links)
    if not isinstance(found, dict):
        raise ValueError(f"{path}: holds a {type(found).__name__}, and must hold a map: {{...}}")
    return found


def parse_json(text: str) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: it is not JSON; or it is nested more than DEPTH levels deep, has a key twice, or
            a number that is not finite or not below LARGEST.
    """
    deepest = level = 0
    for sign in re.findall(r"[\[\]{}]", _STRING.sub("", text)):
        level += 1 if sign in "[{" else -1
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


def _check_regular(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "no file")
        raise ValueError(f"{path}: is {kind}; put a regular file in its place")


def open_binary(path: Path, links: bool = False) -> BufferedReader:
    """Open a regular file for reading; raises as `open_file`."""
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
