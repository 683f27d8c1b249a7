"""Finished runs in a file of JSON lines, so that a second call makes only the missing runs."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from stream_ssl.bounded_files import read_text

Cell = tuple[str, str]
"""(arm, condition): the row and the column of a table."""


class AnyRun(Protocol):
    """An arm under a condition with a seed, which draws the weights, the stream and the views."""

    @property
    def name(self) -> str:
        """A unique name among the runs of an experiment."""

    @property
    def cost(self) -> float:
        """The expected duration, relative to other runs."""

    def facts(self) -> Mapping[str, Any]:
        """Return the settings that this run does not share with all others."""


@dataclass(frozen=True)
class RunResult:
    """The numbers of a finished run.

    Attributes:
        made: "day" and "machine" of the run, and the "device" if it is no CPU; empty in old files.
    """

    numbers: Mapping[str, Any]
    made: Mapping[str, str]

    @property
    def device(self) -> str:
        """The device of the run. Runs of one seed draw other views on another device."""
        return self.made.get("device", "cpu").partition(":")[0]

    def number(self, name: str) -> float | None:
        """Return a measurement, or None if the run has no measurement of this name."""
        value = self.numbers.get(name)
        return None if value is None else float(value)


class Results:
    """The runs of a file under one set of settings.

    Each line is written and synced when its run ends, so a kill loses only unfinished runs. Lines
    with other settings stay in the file and are ignored, as are truncated lines.

    Args:
        path: the file. The first added run creates it.
        settings: the settings that all runs share; see `AnyRun.facts` for the others.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path, self.settings = path, dict(settings)
        self._found = {
            _key(entry["run"], entry["settings"]): (
                entry["run"],
                entry["settings"],
                RunResult(entry["numbers"], entry.get("made", {})),
            )
            for entry in entries(path)
        }

    def get(self, run: AnyRun) -> RunResult | None:
        """Return the result of a run, or None if the run is not finished."""
        found = self._found.get(_key(run.name, self._settings(run)))
        return None if found is None else found[2]

    def by_name(self) -> dict[str, RunResult]:
        """Return the runs that have exactly the shared settings, planned or not."""
        shared = _key("", self.settings)
        return {
            name: result
            for name, settings, result in self._found.values()
            if _key("", settings) == shared
        }

    def add(self, run: AnyRun, numbers: Mapping[str, Any], made: Mapping[str, str]) -> None:
        """Append a run. The line is durable when this method returns."""
        settings = self._settings(run)
        entry = {"run": run.name, "settings": settings, "numbers": numbers, "made": dict(made)}
        append(self.path, entry)
        result = RunResult(json.loads(json.dumps(numbers)), dict(made))
        self._found[_key(run.name, settings)] = (run.name, settings, result)

    def _settings(self, run: AnyRun) -> dict[str, Any]:
        return {**self.settings, **run.facts()}


def _key(name: str, settings: Mapping[str, Any]) -> str:
    return json.dumps([name, settings], sort_keys=True)


def entries(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file of runs, each with "run", "settings" and "numbers".

    Truncated lines are left out.
    """
    found = []
    for line in read_text(path, 256 << 20, links=True).splitlines() if path.exists() else ():
        try:
            entry = json.loads(line)
            entry["run"], entry["settings"], entry["numbers"]
        except (ValueError, KeyError, TypeError):
            continue
        found.append(entry)
    return found


def append(path: Path, entry: Mapping[str, Any]) -> None:
    """Append a line. It is durable when this function returns."""
    line = json.dumps(entry, allow_nan=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        if file.tell() and _last_byte(path) != b"\n":
            file.write(b"\n")  # a kill truncated the previous line
        file.write(line.encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _last_byte(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1)
