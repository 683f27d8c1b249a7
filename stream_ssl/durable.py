"""Atomic writes of small files and of sealed folders, which survive a power cut.

Samples do not use this module: `Journal.append` in stream_ssl/journal/journal.py makes them
durable.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, BinaryIO

from stream_ssl.bounded_files import open_binary, read_map

MANIFEST = "manifest.json"

UNREADABLE = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    OverflowError,
    RecursionError,
)
"""The errors that reading an untrusted manifest can raise."""

UNREAD = (
    *(errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE),
    *(errno.ENODEV, errno.ENOLCK),  # a file system that cannot map or lock files
)
"""System errors that do not show whether the content of a file is damaged."""

NO_FOLDER_SYNC = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)
"""The errors of file systems that cannot flush a folder, such as some Windows shares."""


@contextmanager
def replacing(path: Path, mode: int = 0o644, wait: bool = True) -> Iterator[BinaryIO]:
    """Yield a file that replaces `path` at the end of the block; see `write`.

    An error in the block leaves the old file.
    """
    fresh = path.with_name(f"{path.name}.part")
    fresh.unlink(missing_ok=True)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    handle = os.open(fresh, flags, mode)  # an error leaves the file of another process
    try:
        with os.fdopen(handle, "w+b") as file:
            yield file
            file.flush()
            if wait:
                os.fsync(handle)
            ours = os.fstat(handle)
        if not fresh.exists() or not os.path.samestat(fresh.stat(), ours):
            raise OSError(errno.EBUSY, "another process writes it at the same time", str(path))
        fresh.replace(path)
    except BaseException as error:
        if getattr(error, "errno", None) != errno.EBUSY:
            fresh.unlink(missing_ok=True)
        raise
    if wait:
        sync(path.parent)


def write(
    path: Path, content: str | bytes | memoryview, mode: int = 0o644, wait: bool = True
) -> None:
    """Replace a file atomically: a reader finds either the old file or the new file.

    Args:
        path: the file.
        content: the new content.
        mode: the mode of the new file, which it also has while it is being written.
        wait: wait until the file is on the disk. Otherwise a power cut may leave the old file or
            an empty file.

    Raises:
        OSError: the write failed, or another process wrote the file meanwhile. This process has
            then not changed it.
    """
    with replacing(path, mode, wait) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def entries(folder: Path, pattern: str) -> list[Path]:
    """Return the entries of a folder whose names fit a pattern, in no order.

    A folder that does not exist, or that this user may not read, has none. `Path.glob` hides every
    error since Python 3.13, so that the folders of a failing disk would look empty.

    Raises:
        OSError: the folder cannot be listed for another reason, such as too many open files.
    """
    try:
        return [path for path in folder.iterdir() if fnmatchcase(path.name, pattern)]
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []


def make_folder(path: Path, mode: int = 0o777) -> None:
    """Create a folder and its missing parents, so that they survive a power cut.

    Raises:
        OSError: the folder cannot be created, or a file has this name.
    """
    if (why := dangling(path)) is not None:
        raise FileNotFoundError(why)
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True, mode=mode)
    for folder in missing:
        sync(folder.parent)


def dangling(path: Path) -> str | None:
    """Return a sentence if the path is a link to a place that does not exist, else None."""
    if path.is_symlink() and not path.exists():
        target = path.readlink()
        return f"{path} is a link to {target}, which does not exist: mount its disk, or make it"
    return None


def sync(path: Path) -> None:
    """Flush a file, or the directory entries of a folder, to the disk.

    A folder is left as it is if its file system has no such operation.

    Raises:
        OSError: the path does not exist, or the flush failed.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in NO_FOLDER_SYNC or not stat.S_ISDIR(os.fstat(handle).st_mode):
            raise
    finally:
        os.close(handle)


# Sealed folders: a folder gets its name after all its files and their hashes are on the disk.


def write_json(path: Path, content: Any) -> None:
    """Write readable JSON to a file.

    Raises:
        ValueError: the content has a number that is not finite, which JSON cannot represent.
    """
    path.write_text(json.dumps(content, indent=1, sort_keys=True, allow_nan=False) + "\n")


def seal(folder: Path) -> int:
    """Write the manifest of a folder, flush all its files, and return its size in bytes."""
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": _hash(path)}
        for path in sorted(folder.iterdir())
    }
    write_json(folder / MANIFEST, {"files": files})
    for path in folder.iterdir():
        sync(path)
    sync(folder)
    return sum(path.stat().st_size for path in folder.iterdir())


def listed(folder: Path, links: bool = False) -> dict[str, dict[str, Any]]:
    """Return the sizes and hashes of the files in a sealed folder's manifest, by file name.

    Args:
        folder: the sealed folder.
        links: follow the manifest if it is a link.

    Raises:
        UNREADABLE: the manifest is missing or damaged.
    """
    files: dict[str, dict[str, Any]] = read_map(folder / MANIFEST, links=links)["files"]
    return {name: dict(entry) for name, entry in files.items()}


def damage(folder: Path, links: bool = False) -> str | None:
    """Return a description of the damage in a sealed folder, or None if every file is intact.

    Args:
        folder: the sealed folder.
        links: follow files that are links, as tools for large files create them.

    Raises:
        OSError: the check is not possible, for lack of permission, descriptors or memory.
    """
    try:
        for name, entry in listed(folder, links).items():
            path = folder / name
            if Path(name).name != name or not path.is_file():
                return f"{MANIFEST} lists {name!r}, which is no file of it"
            if path.stat().st_size != entry["bytes"]:
                return f"{name} has {path.stat().st_size} bytes instead of {entry['bytes']}"
            if _hash(path, links) != entry["sha256"]:
                return f"{name} does not have the hash it was written with"
    except UNREADABLE as error:
        return damage_of(error)
    return None


def damage_of(error: Exception) -> str:
    """Describe the damage that a read error shows.

    Raises:
        OSError: `error` itself, if it is one of UNREAD and so does not show any damage.
    """
    if isinstance(error, OSError) and error.errno in UNREAD:
        raise error
    if isinstance(error, KeyError):
        return f"the entry {error} is missing"
    return f"{type(error).__name__}: {error}"


def publish(folder: Path, target: Path) -> None:
    """Rename a sealed folder to its final name, and flush the rename to the disk."""
    folder.rename(target)
    sync(target.parent)


def point(link: Path, target: str) -> None:
    """Point a symbolic link to `target` atomically: it names the old target or the new one."""
    fresh = link.with_name(f".{link.name}.new")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(target)
    fresh.replace(link)
    sync(link.parent)


def discard(folder: Path) -> None:
    """Delete a folder. It is renamed first, so that no reader finds it half deleted."""
    doomed = folder.with_name(f".discarded-{folder.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    move(folder, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def move(folder: Path, target: Path) -> Path:
    """Rename a folder of files to a name that does not exist, and return this name.

    The overlay file system of a container renames no folder that comes from the image. The files of
    such a folder are renamed one by one, the manifest first, so that no reader takes it for whole.

    Raises:
        OSError: the folder cannot be renamed. It is then unchanged if the target is on another
            disk.
    """
    try:
        return folder.rename(target)
    except OSError as error:
        if error.errno != errno.EXDEV or folder.is_symlink() or not folder.is_dir():
            raise
    target.mkdir(mode=stat.S_IMODE(folder.stat().st_mode))
    try:
        for path in sorted(folder.iterdir(), key=lambda path: path.name != MANIFEST):
            path.rename(target / path.name)
    except OSError:
        with contextlib.suppress(OSError):
            target.rmdir()  # it is empty if the target is on another disk
        raise
    folder.rmdir()
    return target


def _hash(path: Path, links: bool = False) -> str:
    with open_binary(path, links) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
