"""Small files that are whole at any moment, also after a power cut.

Samples are not kept here: they become durable in `Journal.append`, stream_ssl/ingest/journal.py.
"""

from __future__ import annotations

import os
from pathlib import Path


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
