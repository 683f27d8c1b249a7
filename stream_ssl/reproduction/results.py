"""Finished runs, one line of JSON each: a rerun does what is missing."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stream_ssl.bounded_files import read_text
from stream_ssl.reproduction.arms import Experiment, Run


@dataclass(frozen=True)
class Result:
    """Attributes:
    numbers: of the run.
    made: "day", "machine", what it was made on.
    """

    numbers: Mapping[str, Any]
    made: Mapping[str, str]

    def number(self, name: str) -> float | None:
        """None where the run has no such number."""
        value = self.numbers.get(name)
        return None if value is None else float(value)


class Results:
    """The runs of an experiment in a folder, under one set of settings.

    A line is written and synced when its run is finished, so a kill costs the runs that were on
    and no other. Lines of other settings, presets and data stay and are left alone; a torn line is
    no result.

    Args:
        folder: made when the first run is added.
        experiment: whose runs.
        settings: of the preset; what an arm is comes with its run.
        data: name of the data set; null: of any, which must then be one.

    Raises:
        ValueError: runs of several data sets, and it is not said which.
    """

    def __init__(
        self,
        folder: Path,
        experiment: Experiment,
        preset: str,
        settings: Mapping[str, Any],
        data: str | None,
    ) -> None:
        self.path = folder / f"{experiment.name}-{preset}.jsonl"
        self._settings, self.data = dict(settings), data
        self._found: dict[str, Result] = {}
        names: set[str] = set()
        for entry in entries(self.path):
            if not {"data", "arm"} <= set(entry["settings"]) or not self._fits(entry["settings"]):
                continue
            names.add(entry["settings"]["data"])
            self._found[self._key(entry["run"], entry["settings"]["arm"])] = Result(
                entry["numbers"], entry.get("made", {})
            )
        if len(names) > 1:
            raise ValueError(
                f"{self.path} has runs on {', '.join(sorted(names))}: say which with --data"
            )
        self.data = next(iter(names), data)

    def get(self, run: Run) -> Result | None:
        """None where it is not done."""
        return self._found.get(self._key(run.name, _plain(run.arm.facts())))

    def __len__(self) -> int:
        return len(self._found)

    def add(self, run: Run, numbers: Mapping[str, Any], made: Mapping[str, str]) -> None:
        """Durable when this returns."""
        arm = _plain(run.arm.facts())
        settings = {"data": self.data, **self._settings, "arm": arm}
        entry = {"run": run.name, "settings": settings, "numbers": numbers, "made": dict(made)}
        append(self.path, entry)
        self._found[self._key(run.name, arm)] = Result(_plain(numbers), dict(made))

    def _fits(self, settings: Mapping[str, Any]) -> bool:
        rest = {key: value for key, value in settings.items() if key not in ("data", "arm")}
        return rest == _plain(self._settings) and self.data in (None, settings["data"])

    @staticmethod
    def _key(name: str, arm: Mapping[str, Any]) -> str:
        return json.dumps([name, arm], sort_keys=True)


def _plain(value: Any) -> Any:
    """As JSON gives it back: lists for tuples."""
    return json.loads(json.dumps(value))


def entries(path: Path) -> list[dict[str, Any]]:
    """The lines of a file of runs, each with its "run", "settings" and "numbers"; those that a kill
    tore are left out."""
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
    """Add a line; durable when this returns."""
    line = json.dumps(entry, allow_nan=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        if file.tell() and _last_byte(path) != b"\n":
            file.write(b"\n")  # behind what a kill tore
        file.write(line.encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _last_byte(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1)
