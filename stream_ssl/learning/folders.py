"""Folders that are whole or absent: what is named has been synced, and its hashes say so."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from stream_ssl.durable import sync

MANIFEST = "manifest.json"
BLOCK = 1 << 20


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


def damage(folder: Path) -> str | None:
    """What is wrong with a sealed folder; None if every file is as it was sealed."""
    try:
        entries = json.loads((folder / MANIFEST).read_text())["files"]
        for name, entry in entries.items():
            path = folder / name
            if path.stat().st_size != entry["bytes"]:
                return f"{name} has {path.stat().st_size} bytes instead of {entry['bytes']}"
            if _hash(path) != entry["sha256"]:
                return f"{name} does not have the hash it was written with"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


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


def _hash(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()
