"""Original files by content, so that the same bytes are stored once."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path

from stream_ssl.durable import make_folder, sync


class Originals:
    """Files named by the hash of their content, in 256 folders.

    A file is durable after `flush`. Two samples with the same bytes share a file.

    Args:
        folder: the folder of the files, which is created.

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

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._unflushed: set[str] = set()
        make_folder(folder)

    def put(self, data: bytes | memoryview) -> str:
        """Store bytes, and return the name under which `read` returns them."""
        name = blake2b(data, digest_size=16).hexdigest()
        path = self._path(name)
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            fresh = path.with_suffix(".part")
            fresh.write_bytes(data)
            fresh.replace(path)
            self._unflushed.add(name)
        return name

    def read(self, name: str) -> bytes:
        """Return the bytes that `put` stored.

        Raises:
            OSError: the file is gone or unreadable.
        """
        return self._path(name).read_bytes()

    def size(self, name: str) -> int:
        """Return the number of bytes that `put` stored under this name."""
        return self._path(name).stat().st_size

    def names(self) -> set[str]:
        """Return the names of all files."""
        return {path.name for path in self._folder.glob("*/*") if path.suffix != ".part"}

    def flush(self, held: Iterable[str]) -> None:
        """Flush those of the named files to the disk that were stored since the last flush."""
        fresh = self._unflushed.intersection(held)
        for name in fresh:
            sync(self._path(name))
        for folder in {self._path(name).parent for name in fresh}:
            sync(folder)
        if fresh:
            sync(self._folder)
        self._unflushed -= fresh

    def keep_only(self, held: Iterable[str]) -> None:
        """Delete all files but these."""
        for name in self.names() - set(held):
            self._path(name).unlink(missing_ok=True)
        self._unflushed.intersection_update(held)

    def _path(self, name: str) -> Path:
        return self._folder / name[:2] / name
