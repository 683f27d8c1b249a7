"""Finished runs, one line of JSON each: a rerun does what is missing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stream_ssl.reproduction.results import append, entries

FILE = "runs.jsonl"


class Results:
    """The runs of a study in a folder, under one set of settings.

    A line is written and synced when its run is finished, so a kill costs the run that was on and
    no other. Lines of other settings stay and are left alone; a torn line is no result.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.path = folder / FILE
        self._settings = dict(settings)
        self._found: dict[str, dict[str, Any]] = {
            entry["run"]: entry["numbers"]
            for entry in entries(self.path)
            if entry["settings"] == self._settings
        }

    def __contains__(self, name: str) -> bool:
        return name in self._found

    def __getitem__(self, name: str) -> Mapping[str, Any]:
        return self._found[name]

    def names(self) -> list[str]:
        """Of the runs that are done: stream, arm and seed, with a space between."""
        return list(self._found)

    def add(self, name: str, numbers: Mapping[str, Any]) -> None:
        """Durable when this returns."""
        append(self.path, {"run": name, "settings": self._settings, "numbers": dict(numbers)})
        self._found[name] = dict(numbers)
