"""The checkpoints of a run, as the page lists them."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from stream_ssl.learning.checkpoint_layout import LATEST, facts_in, size_of, steps_in
from stream_ssl.observe.page.questions import Refused


def checkpoints(folder: Path) -> list[dict[str, Any]]:
    """Return the checkpoints of a run, the newest first.

    An unreadable checkpoint has an `error` with the reason.
    """
    try:
        latest = (folder / LATEST).resolve().name
        found = steps_in(folder)[::-1]
    except OSError as error:
        raise Refused(503, f"cannot list the checkpoints: {error}") from None
    return [{**_checkpoint(path), "latest": path.name == latest} for path in found]


def _checkpoint(path: Path) -> dict[str, Any]:
    try:
        return _read(path, path.stat().st_mtime_ns)
    except (OSError, ValueError, LookupError, TypeError) as error:
        return {"name": path.name, "error": f"{type(error).__name__}: {error}"}


@lru_cache(maxsize=1024)
def _read(path: Path, changed: int) -> dict[str, Any]:
    """Return the facts of a checkpoint. Read them once for each change of its folder."""
    del changed
    facts = facts_in(path)
    return {
        "name": path.name,
        "step": int(facts["step"]),
        "samples": int(facts["samples"]),
        "created": float(facts["created"]),
        "bytes": size_of(path),
    }
