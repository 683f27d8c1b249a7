"""New paths of classes that moved, for configurations and checkpoints with the old paths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MOVED = {
    "memory": "stream_ssl.memory",
    "producers": "stream_ssl.producers",
    "stream_ssl.ingest.decode": "stream_ssl.feed.decode",
    "stream_ssl.learning.efficientnet_lite": "stream_ssl.encoder.efficientnet_lite",
    "stream_ssl.learning.encoder": "stream_ssl.encoder.network",
}
"""Old module or package -> its present path."""


def current(path: str) -> str:
    """Return the present path of the class at `path`."""
    for before, now in MOVED.items():
        if path.startswith(f"{before}."):
            return now + path.removeprefix(before)
    return path


def with_current_names(value: Any) -> Any:
    """Return a copy of plain settings with each `class_path` replaced by its present path."""
    if isinstance(value, (list, tuple)):
        return [with_current_names(part) for part in value]
    if not isinstance(value, Mapping):
        return value
    found = {name: with_current_names(part) for name, part in value.items()}
    if isinstance(path := found.get("class_path"), str):
        found["class_path"] = current(path)
    return found
