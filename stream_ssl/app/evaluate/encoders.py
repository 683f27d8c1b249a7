"""From a path that a user names to a checkpoint, and what it says of itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stream_ssl.learning.checkpoint import FORMAT, LATEST, STATE, damage


def find(path: Path) -> Path:
    """The checkpoint folder that a path names: itself, or the newest of a run's folder.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is damaged, or written by a newer version.
    """
    candidates = [path, path / LATEST, path / "checkpoints" / LATEST]
    found = next((place for place in candidates if (place / STATE).is_file()), None)
    if found is None:
        told = "is no folder" if not path.is_dir() else f"holds neither {STATE} nor {LATEST}"
        raise FileNotFoundError(
            f"no checkpoint at {path}: it {told}. Name a run's folder (the one with checkpoints/ "
            "in it) once its first checkpoint is written, or a checkpoint's own (step-...)"
        )
    found = found.resolve()
    if (reason := damage(found)) is not None:
        raise ValueError(f"checkpoint {found} is damaged ({reason}); name the one before")
    version = facts(found)["version"]
    if version > FORMAT:
        raise ValueError(
            f"checkpoint {found} has format {version}, this program reads up to {FORMAT}: upgrade "
            "stream-ssl"
        )
    return found


def facts(checkpoint: Path) -> Mapping[str, Any]:
    """What a checkpoint says of itself: step, samples, created, config."""
    stored: Mapping[str, Any] = json.loads((checkpoint / STATE).read_text())
    return stored
