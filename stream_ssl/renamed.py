"""Classes that moved: configurations and checkpoints of before name them by their old paths."""

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
"""The module or package of before, and where it is now."""


def current(path: str) -> str:
    """Return the class path that `path` has today."""
    for before, now in MOVED.items():
        if path.startswith(f"{before}."):
            return now + path.removeprefix(before)
    return path


def with_current_names(value: Any) -> Any:
    """Return plain settings in which each `class_path` is the one of today."""
    if isinstance(value, (list, tuple)):
        return [with_current_names(part) for part in value]
    if not isinstance(value, Mapping):
        return value
    found = {name: with_current_names(part) for name, part in value.items()}
    if isinstance(path := found.get("class_path"), str):
        found["class_path"] = current(path)
    return found
