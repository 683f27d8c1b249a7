"""The study: memories compared by what an encoder learns from realistic streams."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.experiments import tables
from benchmarks.experiments.data import LabelledData
from benchmarks.experiments.results import Results
from benchmarks.experiments.study import claims, plots, report
from benchmarks.experiments.study.arms import NOVEL, StudyRun, plan
from benchmarks.experiments.study.training import StudySettings, run_once
from benchmarks.experiments.work import ExperimentWork


class Study(ExperimentWork[StudyRun]):
    """The study under some settings, with its runs in FOLDER/runs.jsonl."""

    name = "study"

    def __init__(self, settings: StudySettings, folder: Path) -> None:
        self.settings, self.folder, self.device = settings, folder, settings.device
        self.results = Results(folder / "runs.jsonl", settings.facts())

    def planned(self) -> list[StudyRun]:
        return plan()

    def once(self) -> Callable[[StudyRun, LabelledData], dict[str, Any]]:
        return partial(run_once, self.settings)

    def report(self, console: Console) -> None:
        found = report.found_in(self.results.by_name())
        if not found.results:
            console.print(f"no run is finished in {self.folder}: nothing to report", soft_wrap=True)
            return
        deviation = report.deviations(self.results.path)
        for table in report.tables(found, deviation):
            console.print(tables.console(table))
        (self.folder / "tables.md").write_text(report.text(found, deviation))
        plots.accuracies(found, self.folder / "accuracy.png", NOVEL.name)
        if self.folder == claims.RUNS.parent:
            claims.write()
        console.print(f"tables and plot: {self.folder}", soft_wrap=True)
