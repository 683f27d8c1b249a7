"""Small files, and sealed folders, that are whole at any moment, also after a power cut.

Samples are not kept here: they become durable in `Journal.append`, stream_ssl/journal/journal.py.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

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
"""What a manifest raises that anybody may have written."""

UNREAD = (errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE)
"""Errors that say nothing of what a file holds."""


def write(
    path: Path, content: str | bytes | memoryview, mode: int = 0o644, wait: bool = True
) -> None:
    """Replace a file: whoever reads it finds the old one or the new one.

    Args:
        mode: of the new file, which is never open to more, not even while it is written.
        wait: until it is on the disk; else a power cut may leave it as it was, or empty.

    Raises:
        OSError: the disk does not take it; the old file stays.
    """
    fresh = path.with_name(f"{path.name}.part")
    fresh.unlink(missing_ok=True)
    try:
        handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            if wait:
                os.fsync(handle)
        fresh.replace(path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
    if wait:
        sync(path.parent)


def make_folder(path: Path, mode: int = 0o777) -> None:
    """Make a folder, and those above it, whose names a power cut does not take away again.

    Raises:
        OSError: it cannot be made, or there is a file of this name.
    """
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True, mode=mode)
    for folder in missing:
        sync(folder.parent)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk.

    Raises:
        OSError: there is no such path, or the disk does not take it.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# Sealed folders: one gets its name when all of it is on the disk, with a hash of each file.


def write_json(path: Path, content: Any) -> None:
    """Readable JSON; numbers that are not finite raise ValueError, for JSON has none."""
    path.write_text(json.dumps(content, indent=1, sort_keys=True, allow_nan=False) + "\n")


def seal(folder: Path) -> int:
    """Write the manifest of a folder and sync all of it; its size in bytes."""
    entries = {
        path.name: {"bytes": path.stat().st_size, "sha256": _hash(path)}
        for path in sorted(folder.iterdir())
    }
    write_json(folder / MANIFEST, {"files": entries})
    for path in folder.iterdir():
        sync(path)
    sync(folder)
    return sum(path.stat().st_size for path in folder.iterdir())


def listed(folder: Path, links: bool = False) -> dict[str, dict[str, Any]]:
    """Return the files that a sealed folder's manifest lists: their sizes and hashes by name.

    Args:
        folder: the sealed folder.
        links: follow a link in the place of the manifest.

    Raises:
        UNREADABLE: there is no manifest, or it is damaged.
    """
    entries: dict[str, dict[str, Any]] = read_map(folder / MANIFEST, links=links)["files"]
    return {name: dict(entry) for name, entry in entries.items()}


def damage(folder: Path, links: bool = False) -> str | None:
    """Return what is wrong with a sealed folder; None if every file is as it was sealed.

    Args:
        folder: the sealed folder.
        links: follow links in the places of its files, as tools for large files make them.

    Raises:
        OSError: nothing can be said: a file may not be read, or not be opened for now.
    """
    try:
        entries = listed(folder, links)
        for name, entry in entries.items():
            path = folder / name
            if Path(name).name != name or not path.is_file():
                return f"{MANIFEST} lists {name!r}, which is no file of it"
            if path.stat().st_size != entry["bytes"]:
                return f"{name} has {path.stat().st_size} bytes instead of {entry['bytes']}"
            if _hash(path, links) != entry["sha256"]:
                return f"{name} does not have the hash it was written with"
    except UNREADABLE as error:
        return damage_told_by(error)
    return None


def damage_told_by(error: Exception) -> str:
    """What an error of reading says of a folder. Raises it where it says nothing of that."""
    if isinstance(error, OSError) and error.errno in UNREAD:
        raise error
    return f"{type(error).__name__}: {error}"


def publish(folder: Path, target: Path) -> None:
    """Give a sealed folder its name, durably."""
    folder.rename(target)
    sync(target.parent)


def point(link: Path, target: str) -> None:
    """Let a symbolic link name `target`; it names the old or the new one at any moment."""
    fresh = link.with_name(f".{link.name}.new")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(target)
    fresh.replace(link)
    sync(link.parent)


def discard(folder: Path) -> None:
    """Remove a folder under another name first, so that none is seen half empty."""
    doomed = folder.with_name(f".discarded-{folder.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _hash(path: Path, links: bool = False) -> str:
    with open_binary(path, links) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
