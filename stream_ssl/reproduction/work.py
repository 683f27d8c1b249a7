"""The work of `stream-ssl reproduce`: what is missing is run, then all of it reported."""

from __future__ import annotations

import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from stream_ssl.reproduction import report, tables
from stream_ssl.reproduction.arms import Experiment, Run
from stream_ssl.reproduction.data import Data, store
from stream_ssl.reproduction.findings import Found, verdicts
from stream_ssl.reproduction.pool import cost_of, finished
from stream_ssl.reproduction.presets import Preset
from stream_ssl.reproduction.results import Results


@dataclass(frozen=True)
class Reproduction:
    """An experiment at a preset, with its results in a folder.

    Args:
        experiment: what is compared.
        name: of the preset.
        preset: its settings.
        folder: of results and reports.
        machine: what a report calls this one.
        data: name of the data set; null: that of the results there are.
        only: parts of names; what is run are runs whose name holds all of them. The report is of
            all runs there are.

    Raises:
        ValueError: no run's name holds them.
    """

    experiment: Experiment
    name: str
    preset: Preset
    folder: Path
    machine: str
    data: str | None = None
    only: Sequence[str] = ()

    def planned(self) -> list[Run]:
        """All runs, in order."""
        return self.experiment.plan(self.preset.seeds, self.preset.repeat_all)

    def runs(self) -> list[Run]:
        """Those that are asked for, in order."""
        runs = [run for run in self.planned() if all(part in run.name for part in self.only)]
        if not runs:
            raise ValueError(
                f"no run's name holds all of {list(self.only)}: --list names the runs of "
                f"{self.experiment.name}"
            )
        return runs

    def results(self) -> Results:
        """Those there are, under these settings."""
        settings = self.preset.of(self.experiment.name)
        return Results(self.folder, self.experiment, self.name, settings, self.data)

    def train(
        self, load: Callable[[], Data], workers: int, minutes: float | None, console: Console
    ) -> bool:
        """Do the runs that are missing, in order; True if it was interrupted.

        Args:
            load: reads the images; called where a run is missing.
            workers: processes.
            minutes: no run is begun that would end later; null: no limit.
            console: where progress is shown.
        """
        results = self.results()
        missing = [run for run in self.runs() if results.get(run) is None]
        if not missing:
            console.print(
                f"nothing to train: all {len(self.runs())} runs are done, in {self.folder}; "
                "with another --out they are made anew",
                soft_wrap=True,
            )
            return False
        with tempfile.TemporaryDirectory() as place, _progress(console) as progress:
            try:
                with _terminating():
                    store(load(), Path(place))
                    self._train(missing, results, Path(place), workers, minutes, progress)
            except KeyboardInterrupt:
                progress.console.print("stopped: the same command goes on with what is missing")
                return True
        return False

    def report(self, console: Console) -> Path | None:
        """Tables on the console, the report in the folder; None where no run is finished."""
        results, runs = self.results(), self.planned()
        found = Found.of(self.experiment, runs, results)
        if not found.results:
            console.print(f"no run is finished in {self.folder}: nothing to report", soft_wrap=True)
            return None
        for table in tables.tables(found, verdicts(found)):
            console.print(tables.console(table))
        settings = {"data": results.data, **self.preset.of(self.experiment.name)}
        path = report.write(found, runs, self.name, settings, self.folder)
        console.print(f"report and plots: {path}", soft_wrap=True)
        return path

    def _train(
        self,
        missing: Sequence[Run],
        results: Results,
        place: Path,
        workers: int,
        minutes: float | None,
        progress: Progress,
    ) -> None:
        # The bar moves by what runs cost, so that the time left is right for unequal ones.
        whole = progress.add_task("", total=sum(map(cost_of, missing)))
        made = {"day": datetime.now(UTC).date().isoformat(), "machine": self.machine}
        ends = finished(self.experiment, missing, self.preset, place, workers, minutes)
        with closing(ends):  # which ends the workers
            for done, (run, numbers) in enumerate(ends, start=1):
                results.add(run, numbers, made)
                told = f"{self.experiment.name}: {done} of {len(missing)} runs"
                progress.update(whole, advance=cost_of(run), description=told)
                progress.console.print(
                    f"{run.name}: linear {numbers['linear']:.1%}, kNN {numbers['knn']:.1%}, "
                    f"{numbers['train_s'] + numbers['evaluate_s']:.0f} s",
                    highlight=False,
                )


def _progress(console: Console) -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console)


@contextmanager
def _terminating() -> Iterator[None]:
    """SIGTERM interrupts as Ctrl-C does, so that no worker is left behind."""

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
