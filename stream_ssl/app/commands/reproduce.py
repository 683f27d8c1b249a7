"""stream-ssl reproduce: the papers' experiments, run again, beside their figures."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from jsonargparse import ArgumentParser, Namespace

from stream_ssl.app.failures import DONE, Failure, configuring, reported
from stream_ssl.app.threads import share_cores

if TYPE_CHECKING:
    from stream_ssl.evaluation.labelled import Reader

NAMES = {
    "duel": "methods under bias x1 to x27, the score h, entropy of the memory",
    "debiased": "biased, negative- and positive-debiased, HCL, oracle; tau+; blur",
    "aggregation": "M = 1, 2, 4 positives at equal batch, two ways to aggregate them",
    "decoupled": "batches of 32 to 512 with and without DCL",
    "self-labeling": "one-hot labels, refinement, mixup, both",
    "prior": "ours: the memory's own tau+ against a constant, under bias",
}
PRESETS = ("cpu-small", "cpu", "gpu")
IN_REPOSITORY = Path("benchmarks/reports")

DESCRIPTION = """Run an experiment of the papers through this learner, at the size of your machine,
and report our figures beside the papers'. Each finished run is one line of a .jsonl file in --out,
and the same command goes on where it stopped. docs/reproduction.md tells what each compares."""

EXAMPLES = """examples:
  stream-ssl reproduce duel --data cifar:data/cifar10
  stream-ssl reproduce prior --data cifar:data/cifar10 --minutes 30 --only x27
  stream-ssl reproduce decoupled --preset gpu --data cifar:data/cifar10
  stream-ssl reproduce duel --list         the runs in their order, and which are done
  stream-ssl reproduce duel --report       tables and plots again, without training"""

SUCH_DATA = """a labelled set of 32 x 32 images, such as cifar:FOLDER with CIFAR-10's
data_batch_*.bin and test_batch.bin, the "binary version" of
https://www.cs.toronto.edu/~kriz/cifar.html"""

NO_DATA = f"--data is due: {SUCH_DATA};\n--list and --report need none"


def main(arguments: Sequence[str]) -> int:
    """Run and report; returns the exit status, 130 when interrupted."""
    share_cores()
    from stream_ssl.app.evaluate import sets

    parser = reproduce_parser()
    name = sets.add_source(parser, arguments)
    settings = parser.parse_args(list(arguments))
    if settings.experiment not in NAMES:
        parser.error(f"{settings.experiment!r} is no experiment: choose of {', '.join(NAMES)}")
    if settings.preset not in PRESETS:
        parser.error(f"--preset {settings.preset!r}: choose of {', '.join(PRESETS)}")
    if name is None and not (settings.list or settings.report):
        parser.error(NO_DATA)
    status = DONE

    def work() -> None:
        nonlocal status
        status = reproduce(settings, name)

    return reported(work) or status


def reproduce_parser() -> ArgumentParser:
    """The parser of all options but the source's own."""
    lines = [f"  {name:<14} {line}" for name, line in NAMES.items()]
    parser = ArgumentParser(
        prog="stream-ssl reproduce",
        usage="stream-ssl reproduce NAME --data cifar:FOLDER [OPTIONS]",
        description=DESCRIPTION,
        epilog="\n".join(["names:", *lines, "", EXAMPLES]),
        formatter_class=_Help,
    )
    add = parser.add_argument
    add("experiment", metavar="NAME", help="of the experiment, see below")
    add(
        "--data",
        type=str | None,
        default=None,
        help="labelled set, NAME:PLACE as for `stream-ssl evaluate`; images become 32 x 32",
    )
    add(
        "--preset",
        default="cpu-small",
        help="cpu-small: 15 minutes on two cores; cpu: a night on eight; gpu: the papers' networks",
    )
    add("--out", type=Path | None, default=None, help="folder of results and reports")
    add("--only", nargs="+", default=[], metavar="TEXT", help="runs whose name holds all of these")
    add("--seeds", type=int | None, default=None, help="repeats; default: the preset's")
    add("--minutes", type=float | None, default=None, help="begin no run that would end later")
    add("--workers", type=int | None, default=None, help="processes; default: cores, 1 on a GPU")
    add("--device", type=str | None, default=None, help="default: the preset's")
    add("--list", action="store_true", help="name the runs and end")
    add("--report", action="store_true", help="tables and plots of what is done, no training")
    return parser


def reproduce(settings: Namespace, source: str | None) -> int:
    """Do what the command line asks; 0, or 130 when interrupted.

    Raises:
        Misconfigured, Failure: what the user can mend.
    """
    from rich.console import Console

    from stream_ssl.app.build import check_device
    from stream_ssl.app.demo import machine
    from stream_ssl.reproduction.data import Data, gather
    from stream_ssl.reproduction.experiments import EXPERIMENTS
    from stream_ssl.reproduction.presets import PRESETS as SIZES
    from stream_ssl.reproduction.work import Reproduction

    with configuring():
        for name in ("seeds", "workers", "minutes"):
            value = settings[name]
            if value is not None and value <= 0:
                raise ValueError(f"--{name} {value}: must be above 0")
        preset = SIZES[settings.preset]
        if settings.seeds is not None:
            preset = replace(preset, seeds=settings.seeds)
        if settings.device is not None:
            preset = replace(preset, device=settings.device)
        if not (settings.list or settings.report):
            check_device(preset.device)
        whole = Reproduction(
            EXPERIMENTS[settings.experiment],
            settings.preset,
            preset,
            folder_of(settings.out),
            f"{machine.processor()}, {machine.cores()} cores",
            None if source is None else data_of(settings, source),
            settings.only,
        )
        results = whole.results()
        runs = whole.runs()
    if settings.list:
        for run in runs:
            print(f"{'    ' if results.get(run) is None else 'done'}  {run.name}")
        return DONE
    console = Console(width=None if sys.stdout.isatty() else 180)

    def load() -> Data:
        with configuring():
            return gather(part for reader in readers(settings, source) for part in reader)

    stopped = False
    if not settings.report:
        workers = settings.workers or (machine.cores() if preset.device == "cpu" else 1)
        stopped = whole.train(load, workers, settings.minutes, console)
    whole.report(console)
    return 130 if stopped else DONE


def readers(settings: Namespace, source: str | None) -> list[Reader]:
    """Of training and test images, 32 x 32 in colour."""
    from stream_ssl.app.evaluate import sets
    from stream_ssl.evaluation.labelled import Division
    from stream_ssl.ingest.decode import Decoder

    assert source is not None
    options = settings.source.as_dict()
    return sets.readers(source, options, None, Decoder(32), Division(0.2), 500, seed=0)


def data_of(settings: Namespace, source: str) -> str:
    """What results call the data: the set's own name, not where it lies.

    Raises:
        Failure: it is not there.
    """
    from stream_ssl.app.evaluate import sets

    options = settings.source.as_dict()
    split = {"split": "test"} if sets.has_splits(source, options) else {}
    try:
        return str(sets.make(source, options, seed=0, **split).name)
    except FileNotFoundError as error:
        raise Failure(f"{error}. --data is {SUCH_DATA}") from error


def folder_of(out: Path | None) -> Path:
    """Where results lie by default: beside the repository's others, or here."""
    if out is not None:
        return out
    return IN_REPOSITORY / "reproduction" if IN_REPOSITORY.is_dir() else Path("reproduction")


class _Help(argparse.RawDescriptionHelpFormatter):
    """Keeps names and examples as they are."""
