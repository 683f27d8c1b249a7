"""The command python -m benchmarks.experiments.footage, which trains, compares and reports."""

from __future__ import annotations

import argparse
import itertools
import logging
import sys
from collections.abc import Sequence
from dataclasses import fields
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

from rich.console import Console

from benchmarks.experiments import tables
from benchmarks.experiments.footage import report
from benchmarks.experiments.footage.recordings import RECORDINGS, Recording
from benchmarks.experiments.footage.training import ARMS, FootageRun, FootageSettings, run_once
from benchmarks.experiments.results import Results
from benchmarks.experiments.work import MACHINE
from stream_ssl.process.failures import (
    DONE,
    INTERRUPTED,
    USAGE,
    Failure,
    configuring,
    reported,
)

SEEDS = 5

DESCRIPTION = """Train on recordings, measure what each memory holds, and report. Each finished run
is one line of runs.jsonl in --out, and the same command goes on with the missing runs.
docs/duplicates.md has the results; benchmarks/experiments/footage/recordings.py describes the
folder of recordings."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and report; return the exit status, which is 130 when interrupted."""
    return reported(lambda: _run(_parser().parse_args(arguments)))


def _run(settings: argparse.Namespace) -> int:
    with configuring():
        chosen = FootageSettings(
            **{field.name: getattr(settings, field.name) for field in fields(FootageSettings)}
        )
    results = Results(settings.out / "runs.jsonl", chosen.facts())
    console = Console()
    logging.getLogger("faiss").setLevel(logging.WARNING)
    try:
        if settings.folder is not None:
            _train(settings.folder, chosen, results, settings.only, console)
    except KeyboardInterrupt:
        console.print("stopped: the same command goes on with the missing runs")
        return INTERRUPTED
    made = report.tables(report.found_in(results.by_name()))
    if not made:
        console.print(f"no run is finished in {settings.out}: give the folder of recordings")
        return USAGE
    for name, rows in made.items():
        console.print(tables.console(rows._replace(title=name)))
    (settings.out / "tables.md").write_text(report.text(made), encoding="utf-8")
    if settings.out == report.RUNS.parent:
        for page in report.PAGES:
            file = report.ROOT / page
            file.write_text(report.written(file.read_text(encoding="utf-8"), made), "utf-8")
    return DONE


def _train(
    folder: Path, chosen: FootageSettings, results: Results, only: Sequence[str], console: Console
) -> None:
    runs = [
        FootageRun(recording, arm, seed)
        for seed, recording, arm in itertools.product(range(SEEDS), ("cameras", "crawl"), ARMS)
    ]
    missing = [
        run for run in runs if all(part in run.name for part in only) and not results.get(run)
    ]

    @cache
    def recording(name: str) -> Recording:
        try:
            return RECORDINGS[name](folder, chosen.size)
        except FileNotFoundError as error:
            raise Failure(
                f"{folder} is no folder of recordings ({error}): "
                "benchmarks/experiments/footage/recordings.py describes it"
            ) from error

    for number, run in enumerate(missing, start=1):
        made = {"day": datetime.now(UTC).date().isoformat(), "machine": MACHINE}
        numbers = run_once(chosen, run, recording(run.recording))
        results.add(run, numbers, made)
        seconds = numbers["train_s"] + numbers["evaluate_s"]
        console.print(f"{number} of {len(missing)}: {run.name}, {seconds:.0f} s", highlight=False)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.experiments.footage", description=DESCRIPTION
    )
    add = parser.add_argument
    add("folder", nargs="?", type=Path, help="folder of the recordings; without it, only report")
    add("--out", type=Path, default=report.RUNS.parent, help="folder of results and tables")
    add("--only", nargs="+", default=[], metavar="TEXT", help="runs whose name holds all of these")
    for field in fields(FootageSettings):
        says = f"{field.metadata['help']} (default: {field.default})"
        add(f"--{field.name}", type=int, default=field.default, help=says)
    return parser


if __name__ == "__main__":
    sys.exit(main())
