"""The checkpoints of a run, as the page lists them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from stream_ssl.learning.checkpoint_layout import LATEST, facts_in, size_of, steps_in
from stream_ssl.observe.page.questions import Refused

_CHECKPOINTS: dict[Path, tuple[int, dict[str, Any]]] = {}  # with the time of the folder's change
_CHECKPOINTS_LOCK = threading.Lock()


def checkpoints(folder: Path) -> list[dict[str, Any]]:
    """Return the checkpoints of a run, the newest first.

    An unreadable checkpoint has an `error` with the reason.
    """
    try:
        latest = (folder / LATEST).resolve().name
        found = steps_in(folder)[::-1]
    except OSError as error:
        raise Refused(503, f"cannot list the checkpoints: {error}") from None
    with _CHECKPOINTS_LOCK:
        for path in set(_CHECKPOINTS) - set(found):
            if path.parent == folder:
                del _CHECKPOINTS[path]
        return [{**_checkpoint(path), "latest": path.name == latest} for path in found]


def _checkpoint(path: Path) -> dict[str, Any]:
    try:
        changed = path.stat().st_mtime_ns
        known = _CHECKPOINTS.get(path)
        if known is None or known[0] != changed:
            facts = facts_in(path)
            told = {
                "name": path.name,
                "step": int(facts["step"]),
                "samples": int(facts["samples"]),
                "created": float(facts["created"]),
                "bytes": size_of(path),
            }
            known = _CHECKPOINTS[path] = changed, told
        return known[1]
    except (OSError, ValueError, LookupError, TypeError) as error:
        return {"name": path.name, "error": f"{type(error).__name__}: {error}"}
