"""Compare memories by what an encoder learns from streams as users have them.

Trains a small encoder on CIFAR-10 as a parked robot, a stalling camera, a video, a crawler or a
shifting world would send it, with each memory policy, where duplicates are counted on embeddings
or on thumbnails, with training batches from the stream or from the memory; then measures kNN and
linear accuracy on the balanced test images, and what of the memory are near-copies. A run of 600
updates takes two to five minutes on one core. Runs come in order of what they tell, so the study
may be ended at any time: each finished run is one line in RESULTS/runs.jsonl, and the same command
goes on where it stopped.

examples:
  python -m benchmarks.study --data ~/cifar-10-batches-bin
  python -m benchmarks.study --data ... --runs 5              five more, then the tables
  python -m benchmarks.study --data ... --only parked --only seed0
  python -m benchmarks.study --data ... --steps 20 --results /tmp/study     does it run at all
  python -m benchmarks.study --list                           the order, and what is done
  python -m benchmarks.study --report /tmp/study              tables and plot, no training
  python -m benchmarks.study --data ... --streams streams.jpg what the streams look like

A run is named "parked vmf0.1/memory/written/plain/thumbnail seed0": stream, policy / anchors /
freshness / options, seed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from benchmarks.study import plots, tables
from benchmarks.study.arms import NOVEL, Run, plan
from benchmarks.study.results import Results
from benchmarks.study.streams import load
from benchmarks.study.training import Data, Settings, run_once
from stream_ssl.reproduction.data import first_of_each

RESULTS = Path(__file__).parents[1] / "reports" / "study"


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0; 2 for arguments that cannot work, 130 when interrupted."""
    parser = _parser()
    chosen = parser.parse_args(arguments)
    settings = Settings(**{f.name: getattr(chosen, f.name) for f in fields(Settings)})
    results = Results(chosen.results, settings.facts())
    console = Console(width=None if sys.stdout.isatty() else 160)
    runs = [run for run in plan() if all(part in run.name for part in chosen.only)]
    if not runs:
        parser.error(f"no run's name holds all of {chosen.only}: see --list")
    if chosen.list:
        for run in runs:
            print(f"{'done' if run.name in results else '    '}  {run.name}")
        return 0
    stopped = False
    if chosen.report is None:
        if chosen.data is None:
            parser.error("--data FOLDER is due: where the CIFAR-10 binary batches lie")
        if chosen.streams is not None:
            plots.streams(load(chosen.data, "train"), chosen.streams)
            return 0
        missing = [run for run in runs if run.name not in results][: chosen.runs]
        stopped = train(missing, results, settings, chosen.data, console)
    _report(results, chosen.report or chosen.results, console)
    return 130 if stopped else 0


def _parser() -> argparse.ArgumentParser:
    summary, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.study",
        description=f"{summary}\n{rest}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", type=Path, help="folder of data_batch_*.bin, test_batch.bin")
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="default: the study in this repository"
    )
    parser.add_argument("--runs", type=int, help="end after so many runs; default: all")
    parser.add_argument(
        "--only", action="append", default=[], metavar="TEXT", help="runs whose name holds it"
    )
    parser.add_argument("--list", action="store_true", help="name the runs and end")
    parser.add_argument(
        "--report", type=Path, metavar="FOLDER", help="write tables and plots there and end"
    )
    parser.add_argument(
        "--streams", type=Path, metavar="PICTURE", help="draw the streams there and end"
    )
    group = parser.add_argument_group("settings; runs of other settings are kept apart")
    for field in fields(Settings):
        group.add_argument(
            f"--{field.name}",
            type=type(field.default),
            default=field.default,
            help=f"{field.metadata['help']} (default: {field.default})",
        )
    return parser


def train(
    runs: Sequence[Run],
    results: Results,
    settings: Settings,
    root: Path,
    console: Console,
) -> bool:
    """Do the runs in order; True if the user stopped it."""
    if not runs:
        return False
    with console.status("reading images"):
        images = load(root, "train")
        data = Data(images, first_of_each(images, settings.references), load(root, "test"))
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        # Counted in steps, so that the time that remains is known from the first run on.
        whole = progress.add_task(f"{len(runs)} runs, steps", total=len(runs) * settings.steps)
        try:
            for run in runs:
                started = time.monotonic()
                progress.update(whole, description=run.name)
                numbers = run_once(run, settings, data, lambda: progress.advance(whole))
                results.add(run.name, numbers)
                progress.console.print(
                    f"{run.name}: kNN {numbers['knn']:.1%}, linear {numbers['linear']:.1%}, "
                    f"{time.monotonic() - started:.0f} s"
                )
        except KeyboardInterrupt:
            console.print("stopped: the same command goes on with the run that was cut short")
            return True
    return False


def _report(results: Results, folder: Path, console: Console) -> None:
    found = tables.rows(results)
    if not found:
        console.print("no run is finished: nothing to report")
        return
    for table in tables.tables(found):
        console.print(table)
    folder.mkdir(parents=True, exist_ok=True)
    text = f"{tables.summary(found)}\n\nIn brackets: seeds, where there are several.\n\n"
    (folder / "tables.md").write_text(text + tables.markdown(found))
    plots.accuracies(found, folder / "accuracy.svg", NOVEL.name)
    console.print(f"{len(results.names())} runs; tables and plot: {folder}", soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
