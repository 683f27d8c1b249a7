"""Finished runs, one line of JSON each: a rerun does what is missing."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FILE = "runs.jsonl"


class Results:
    """The runs of a study in a folder, under one set of settings.

    A line is written and synced when its run is finished, so a kill costs the run that was on and
    no other. Lines of other settings stay and are left alone; a torn line is no result.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / FILE
        self._settings = dict(settings)
        self._found: dict[str, dict[str, Any]] = {}
        for line in self.path.read_text().splitlines() if self.path.exists() else ():
            entry = _parse(line)
            if entry is not None and entry["settings"] == self._settings:
                self._found[entry["run"]] = entry["numbers"]

    def __contains__(self, name: str) -> bool:
        return name in self._found

    def __getitem__(self, name: str) -> Mapping[str, Any]:
        return self._found[name]

    def names(self) -> list[str]:
        """Of the runs that are done: stream, arm and seed, with a space between."""
        return list(self._found)

    def add(self, name: str, numbers: Mapping[str, Any]) -> None:
        """Durable when this returns."""
        entry = {"run": name, "settings": self._settings, "numbers": dict(numbers)}
        with self.path.open("a+b") as file:
            if file.tell() and _last_byte(self.path) != b"\n":
                file.write(b"\n")  # behind what a kill tore
            file.write(json.dumps(entry, allow_nan=False).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self._found[name] = dict(numbers)


def _parse(line: str) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
        return {key: entry[key] for key in ("run", "settings", "numbers")}
    except (ValueError, KeyError, TypeError):
        return None


def _last_byte(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1)
