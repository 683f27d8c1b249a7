"""Lists the image files in a folder and its subfolders, and follows links to folders."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from stream_ssl.producers.sources.base import OUT_OF_FILES
from stream_ssl.producers.sources.image_files import OTHER_IMAGES, SUFFIXES

OF_THE_SYSTEM = {
    *("@eadir", "__macosx", "lost+found", "system volume information"),
    *("#recycle", "@recycle", "$recycle.bin"),
}
"""Folders of thumbnails, deleted files and the like that a system makes. Case does not matter."""


def walk(
    root: Path,
    leave_out: Callable[[str, str, object], None],
    hidden: tuple[str, ...] = (),
    disks: dict[str, int] | None = None,
) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield the image files below the root, with their relative paths ("/" as separator).

    Folders of the system are ignored. Links to folders are followed after all real folders. Each
    folder is listed once, so links cannot cause an endless loop.

    Args:
        leave_out: called with (reason, path, why) for each entry that cannot be listed.
        hidden: entries whose names start with one of these prefixes are ignored.
        disks: receives the disk of each folder that is listed; see `is_away`.

    Raises:
        OSError: too many files are open.
    """
    folders, links = [(str(root), "")], list[tuple[str, str]]()
    listed: set[tuple[int, int]] = set()
    while folders or links:
        if not folders:
            links.sort(reverse=True)
            folders.append(links.pop())
        folder, below = folders.pop()
        try:
            stat = os.stat(folder)  # noqa: PTH116
            if (stat.st_dev, stat.st_ino) in listed:
                leave_out("link", below, "a link to a folder that is listed already")
                continue
            listed.add((stat.st_dev, stat.st_ino))
            with os.scandir(folder) as found:
                entries = list(found)
            if disks is not None:
                disks[str(Path(folder))] = stat.st_dev  # without "." at the beginning
        except OSError as error:
            if error.errno in OUT_OF_FILES:
                raise
            leave_out("unlisted", below or folder, f"cannot list it: {error}")
            continue
        for entry in entries:
            path = below + entry.name
            if is_hidden(entry.name, hidden):
                continue
            if is_folder(entry):
                (links if entry.is_symlink() else folders).append((entry.path, path + "/"))
            elif entry.name.lower().endswith((*SUFFIXES, *OTHER_IMAGES)):
                yield path, entry
            elif entry.is_symlink() and not os.path.exists(entry.path):  # noqa: PTH110
                leave_out("link", path, "a link to nothing, or to itself")


def is_hidden(name: str, beginnings: tuple[str, ...]) -> bool:
    """Return whether a name has one of these beginnings, or names a folder of the system."""
    return name.startswith(beginnings) or name.lower() in OF_THE_SYSTEM


def is_away(folder: Path, disk: int) -> bool:
    """Return whether the disk of a folder is away: it was unmounted, or it does not answer.

    A folder that was only deleted is not away: the folder above it is on the same disk.

    `disk` is the number of its device (st_dev) when it was listed.
    """
    for place in (folder, *folder.parents):
        try:
            return place.stat().st_dev != disk
        except (FileNotFoundError, NotADirectoryError):
            continue
        except PermissionError:
            return False
        except OSError:
            return True
    return True


def away(name: str, folder: Path) -> str:
    """Return the sentence about a source whose disk is away."""
    return (
        f"source {name!r}: the disk of {folder} is away: mount it, and start the source again, "
        "which then sends the remaining files"
    )


def check_root(root: Path) -> None:
    """Raise FileNotFoundError or PermissionError if a source's folder is missing or unreadable."""
    if not root.is_dir():
        raise FileNotFoundError(
            f"{root} is a file: give its folder as the root of the source"
            if root.exists()
            else f"no folder {root}: create it, or give another as the root of the source"
        )
    if not os.access(root, os.R_OK | os.X_OK):
        raise PermissionError(
            f"{root} may not be read by this user: change its mode or its owner, or give another "
            "folder as the root of the source"
        )


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Return whether the entry is a folder or a link to a folder."""
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False
