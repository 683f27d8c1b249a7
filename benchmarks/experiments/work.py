"""The work of an experiment: make the missing runs, then report all finished runs."""

from __future__ import annotations

import signal
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Generic, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from benchmarks.experiments.data import LabelledData, store
from benchmarks.experiments.pool import finished
from benchmarks.experiments.results import AnyRun, Results
from stream_ssl.demo import machine
from stream_ssl.process.threads import cores

R = TypeVar("R", bound=AnyRun)

MACHINE = f"{machine.processor()}, {cores()} cores"
"""The name of this machine in reports."""


class ExperimentWork(ABC, Generic[R]):
    """An experiment with its results in a folder. Worker processes receive a pickled copy."""

    name: str
    folder: Path
    device: str = "cpu"
    results: Results

    @abstractmethod
    def planned(self) -> list[R]:
        """Return all runs, the most informative first."""

    @abstractmethod
    def once(self) -> Callable[[R, LabelledData], dict[str, Any]]:
        """Return a function that makes a run in a worker."""

    @abstractmethod
    def report(self, console: Console) -> None:
        """Print tables and write the report of the finished runs."""

    def runs(self, only: Sequence[str]) -> list[R]:
        """Return the planned runs whose name contains all texts of `only`."""
        runs = [run for run in self.planned() if all(part in run.name for part in only)]
        if not runs:
            raise ValueError(
                f"no run's name holds all of {list(only)}: --list names the runs of {self.name}"
            )
        return runs

    def train(
        self,
        runs: Sequence[R],
        load: Callable[[], LabelledData],
        workers: int,
        minutes: float | None,
        console: Console,
    ) -> bool:
        """Make the missing runs, in order; return True if the user interrupted.

        Args:
            load: reads the images. It is called only if a run is missing.
            minutes: no run begins that would end later; None: no limit.
        """
        missing = [run for run in runs if self.results.get(run) is None]
        if not missing:
            console.print(
                f"nothing to train: all {len(runs)} runs are done, in {self.folder}; choose "
                "another --out to make them again",
                soft_wrap=True,
            )
            return False
        with tempfile.TemporaryDirectory() as place, _progress(console) as progress:
            try:
                with _terminating():
                    store(load(), Path(place))
                    self._train(missing, Path(place), workers, minutes, progress)
            except KeyboardInterrupt:
                progress.console.print("stopped: the same command goes on with the missing runs")
                return True
        return False

    def _train(
        self,
        missing: Sequence[R],
        place: Path,
        workers: int,
        minutes: float | None,
        progress: Progress,
    ) -> None:
        # The bar counts the cost of the runs, so that the remaining time is right for unequal runs.
        whole = progress.add_task("", total=sum(run.cost for run in missing))
        made = {"day": datetime.now(UTC).date().isoformat(), "machine": MACHINE}
        if self.device != "cpu":
            made["device"] = self.device
        ends = finished(self.once(), missing, place, workers, minutes, on_cpu=self.device == "cpu")
        with closing(ends):  # closing it stops the workers
            for done, (run, numbers) in enumerate(ends, start=1):
                self.results.add(run, numbers, made)
                progress_text = f"{self.name}: {done} of {len(missing)} runs"
                progress.update(whole, advance=run.cost, description=progress_text)
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
    """Let SIGTERM interrupt as Ctrl-C does, so that no worker process remains."""

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
