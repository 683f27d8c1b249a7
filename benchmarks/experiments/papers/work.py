"""The work of one experiment of the papers at one preset."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.experiments import tables
from benchmarks.experiments.data import LabelledData
from benchmarks.experiments.findings import FinishedRuns
from benchmarks.experiments.papers import report
from benchmarks.experiments.papers.arms import Experiment, PaperRun
from benchmarks.experiments.papers.presets import Preset
from benchmarks.experiments.papers.training import run_once
from benchmarks.experiments.papers.verdicts import verdicts
from benchmarks.experiments.results import Results, entries
from benchmarks.experiments.work import ExperimentWork


class Reproduction(ExperimentWork[PaperRun]):
    """An experiment at a preset.

    Args:
        size: the name of the preset.
        data: the name of the data set; None: the data set of the stored results.

    Raises:
        ValueError: `data` is None, and the stored results use several data sets.
    """

    def __init__(
        self,
        experiment: Experiment,
        size: str,
        preset: Preset,
        folder: Path,
        data: str | None = None,
    ) -> None:
        self.experiment, self.size, self.preset = experiment, size, preset
        self.name, self.folder, self.device = experiment.name, folder, preset.device
        path, settings = folder / f"{experiment.name}-{size}.jsonl", preset.of(experiment.name)
        self.results = Results(path, {"data": data or _data_of(path, settings), **settings})

    def planned(self) -> list[PaperRun]:
        return self.experiment.plan(self.preset.seeds, self.preset.repeat_all)

    def once(self) -> Callable[[PaperRun, LabelledData], dict[str, Any]]:
        return partial(run_once, self.experiment, self.preset)

    def found(self) -> FinishedRuns:
        """Return the planned runs that are finished."""
        done = ((run, self.results.get(run)) for run in self.planned())
        return FinishedRuns.of(
            (run.arm.cell, run.seed, one) for run, one in done if one is not None
        )

    def report(self, console: Console) -> None:
        found = self.found()
        if not found.results:
            console.print(f"no run is finished in {self.folder}: nothing to report", soft_wrap=True)
            return
        judged = verdicts(self.experiment, found)
        for table in report.tables_of(self.experiment, found, judged):
            console.print(tables.console(table))
        planned, settings = len(self.planned()), self.results.settings
        path = report.write(self.experiment, found, planned, self.size, settings, self.folder)
        console.print(f"report and plots: {path}", soft_wrap=True)


def _data_of(path: Path, settings: Mapping[str, Any]) -> str | None:
    """Return the data set of the results with these settings, or None if there are none."""
    stored = [entry["settings"] for entry in entries(path)]
    names = {one["data"] for one in stored if one.items() >= settings.items() and "data" in one}
    if len(names) > 1:
        raise ValueError(f"{path} has runs on {', '.join(sorted(names))}: say which with --data")
    return next(iter(names), None)
