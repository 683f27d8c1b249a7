"""A growing file of rows, which goes back to its last saved length after a crash."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stream_ssl.durable import sync


class Rows:
    """The rows in a file, one JSON map a line.

    Every method raises OSError if the disk is full or failed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._waiting: list[str] = []

    def add(self, row: Any) -> None:
        """Add a dataclass as a row, which `write` appends to the file."""
        self._waiting.append(json.dumps(asdict(row)) + "\n")

    def write(self) -> None:
        """Append the added rows to the file."""
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(self._waiting)
        self._waiting.clear()

    def sync(self) -> int:
        """Make the file durable, and return its length in bytes."""
        sync(self._path)
        return self._path.stat().st_size

    def go_back(self, length: int) -> None:
        """Cut the file to the length that `sync` returned. The file may be missing for length 0."""
        self._path.touch()
        if (found := self._path.stat().st_size) < length:
            raise OSError(
                f"{self._path} has {found} bytes, and {length} were saved: it was damaged. Delete "
                f"{self._path.parent}, and begin again"
            )
        os.truncate(self._path, length)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the written rows, in order."""
        with self._path.open(encoding="utf-8") as file:
            yield from map(json.loads, file)
