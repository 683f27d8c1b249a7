"""Run benchmarks, print their tables and write a dated report: python -m benchmarks [NAME ...]."""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path

from rich.console import Console

from benchmarks.report import Result, path_of, plain, table, write

NAMES = (
    "eviction",
    "growth",
    "duplicates",
    "losses",
    "learner",
    "plain_loop",
    "ranks",
    "page",
    "decode",
    "sources",
    "client",
    "ingest",
)  # "ingest" is last because it leaves the disk busy
BY_NAME = ("gpu",)  # run only if named, because they need special hardware
WIDE = 180  # columns, if the output is not a terminal
REPORTS = Path(__file__).parent / "reports"
GPU_CONFIG = Path(__file__).parent.parent / "deploy/configs/gpu.yaml"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmarks; return 0 if all ran and 1 if one failed.

    A missed target is reported, but does not count as a failure.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "names", nargs="*", choices=[*NAMES, *BY_NAME, []], help=f"default: all but {BY_NAME[0]}"
    )
    parser.add_argument("--reports", type=Path, default=REPORTS, help="folder of the report")
    parser.add_argument(
        "--simulated",
        nargs="?",
        type=Path,
        const=GPU_CONFIG,
        metavar="CONFIG",
        help="with gpu: model a step of this configuration on a CPU (default: %(const)s); "
        "the configuration's options may follow, such as --decoder.size=32",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="with --simulated: its numbers")
    chosen, options = parser.parse_known_args(arguments)
    if (chosen.simulated or chosen.json) and (chosen.names != ["gpu"] or not chosen.simulated):
        parser.error(
            "--simulated models the benchmark gpu, and --json stores its numbers: give "
            "gpu --simulated [CONFIG] [--json FILE]"
        )
    if options and not chosen.simulated:
        parser.error(f"unknown options: {' '.join(options)}")
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDE)
    if chosen.simulated:
        simulated = importlib.import_module("benchmarks.simulated")
        simulated.report(chosen.simulated, chosen.json, console, options)
        return 0
    names = chosen.names or list(NAMES)
    path = path_of(chosen.reports, date.today(), gpu="gpu" in names)
    results = [
        measure(name, number, len(names), console, path) for number, name in enumerate(names, 1)
    ]
    write(path, results, " ".join(["python -m benchmarks", *chosen.names]))
    console.print(f"report: {path}", soft_wrap=True)
    return 1 if any(result.error for result in results) else 0


def measure(name: str, number: int, total: int, console: Console, report: Path) -> Result:
    """Run one benchmark and print its table. An error becomes part of the result.

    If the module has a function `plot`, its picture is written next to the report.
    """
    start, picture, rows, error = time.monotonic(), None, [], ""
    with console.status(f"benchmark {number} of {total}: {name}"):
        try:
            module = importlib.import_module(f"benchmarks.{name}")
            for row in module.run():
                rows.append(plain(row))
                if not console.is_terminal:  # a run that is ended leaves what it measured
                    console.print(rows[-1], soft_wrap=True)
            if hasattr(module, "plot"):
                picture = report.with_name(f"{report.stem}-{name}.png")
                picture.parent.mkdir(parents=True, exist_ok=True)
                module.plot(rows, picture)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
    result = Result(name, rows, time.monotonic() - start, error, picture.name if picture else "")
    console.print(table(result))
    return result


if __name__ == "__main__":
    sys.exit(main())
