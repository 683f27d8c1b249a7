"""Two configurations, and where they differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

ABSENT = object()


def diff(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """One line per value that differs, as "memory.capacity: 2048 -> 4096".

    On resume the run's own configuration wins; pass it first and the new one second, and log the
    lines as what was not taken over. Keys are sorted; lists are compared as wholes.
    """
    return list(_diff("", ours, theirs))


def _diff(path: str, ours: Any, theirs: Any) -> Iterator[str]:
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        for key in sorted({*ours, *theirs}, key=str):
            below = f"{path}.{key}" if path else str(key)
            yield from _diff(below, ours.get(key, ABSENT), theirs.get(key, ABSENT))
    elif _plain(ours) != _plain(theirs):
        yield f"{path}: {_show(ours)} -> {_show(theirs)}"


def _plain(value: Any) -> Any:
    # JSON has no tuples: one that was stored comes back as a list.
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _show(value: Any) -> str:
    return "absent" if value is ABSENT else repr(_plain(value))
