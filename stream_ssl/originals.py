"""Original files by content, so that the same bytes are stored once."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path

from stream_ssl.bounded_files import read_bytes
from stream_ssl.durable import make_folder, sync

MOST_BYTES = 256 << 20
"""Most bytes of a file that is read; an image within `decoder.max_pixels` has fewer."""
_NAME = re.compile("[0-9a-f]{32}")
AT_ONCE = 8
"""Files that are flushed at a time. The file system commits them together."""


class Originals:
    """Files named by the hash of their content, in 256 folders.

    A file is durable after `flush`. Two samples with the same bytes share a file. Several threads
    may call `put` at the same time.

    Args:
        folder: the folder of the files.
        create: create the folder. It need not exist for reading.

    Raises:
        OSError: the folder cannot be created.

    >>> import tempfile
    >>> originals = Originals(Path(tempfile.mkdtemp()))
    >>> name = originals.put(b"pixels")
    >>> originals.read(name), name == originals.put(b"pixels")
    (b'pixels', True)
    >>> originals.keep_only([])
    >>> originals.names()
    set()
    """

    def __init__(self, folder: Path, create: bool = True) -> None:
        self._folder = folder
        self._unflushed: set[str] = set()
        if create:
            make_folder(folder)

    def put(self, data: bytes | memoryview) -> str:
        """Store bytes, and return the name under which `read` returns them."""
        name = name_of(data)
        path = self._path(name)
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            fresh = path.with_suffix(f".{threading.get_ident()}.part")
            try:
                fresh.write_bytes(data)
                fresh.replace(path)
            except OSError:
                fresh.unlink(missing_ok=True)
                raise
            self._unflushed.add(name)
        return name

    def read(self, name: str) -> bytes:
        """Return the bytes that `put` stored.

        Raises:
            OSError: the file is gone, unreadable or larger than MOST_BYTES, or a power cut has
                damaged it.
        """
        try:
            data = read_bytes(self._path(name), MOST_BYTES, links=True)
        except ValueError as error:
            raise OSError(str(error)) from None
        if name_of(data) != name:
            raise OSError(f"{self._path(name)} does not have the content that its name states")
        return data

    def size(self, name: str) -> int:
        """Return the number of bytes that `put` stored under this name."""
        return self._path(name).stat().st_size

    def names(self) -> set[str]:
        """Return the names of all files that `put` has stored."""
        found = (path.name for path in self._folder.glob("*/*") if _NAME.fullmatch(path.name))
        return {name for name in found if self._path(name).exists()}

    def flush(self, held: Iterable[str]) -> None:
        """Flush to the disk the files with these names that were stored since the last call."""
        fresh = self._unflushed.intersection(held)
        paths = [self._path(name) for name in fresh]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for places in (paths, {path.parent for path in paths}):
                list(pool.map(sync, places))  # raises the first error
        if fresh:
            sync(self._folder)
        self._unflushed -= fresh

    def keep_only(self, held: Iterable[str]) -> None:
        """Delete all files but these, and what an interrupted `put` has left."""
        for path in self._folder.glob("*/*.part"):
            path.unlink(missing_ok=True)
        for name in self.names() - set(held):
            self.remove(name)
        self._unflushed.intersection_update(held)

    def remove(self, name: str) -> None:
        """Delete a file; no error if there is none."""
        self._path(name).unlink(missing_ok=True)
        self._unflushed.discard(name)

    def _path(self, name: str) -> Path:
        if not _NAME.fullmatch(name):  # a checkpoint of others may name any path
            raise OSError(f"{name!r:.80} is no name of an original")
        return self._folder / name[:2] / name


def codec_in(data: bytes) -> str:
    """Return the codec of a sent picture by its first bytes: jpeg, png or webp."""
    return {b"\xff\xd8": "jpeg", b"\x89P": "png"}.get(data[:2], "webp")


def suffix_of(data: bytes) -> str:
    """Return the suffix of the file of a sent picture: jpg, png or webp."""
    return codec_in(data).replace("jpeg", "jpg")


def name_of(data: bytes | memoryview) -> str:
    """Return the name under which `Originals` stores these bytes."""
    return blake2b(data, digest_size=16).hexdigest()
