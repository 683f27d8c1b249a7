"""The command python -m benchmarks.experiments NAME, which trains, compares and reports."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentParser, Namespace

from stream_ssl.process import logs
from stream_ssl.process.failures import DONE, INTERRUPTED, Failure, configuring, reported
from stream_ssl.process.threads import cores, share_cores

if TYPE_CHECKING:
    from benchmarks.experiments.data import LabelledData
    from benchmarks.experiments.work import ExperimentWork

NAMES = {
    "duel": "methods under bias x1 to x27, the score h, entropy of the memory",
    "debiased": "biased, negative- and positive-debiased, HCL, oracle; tau+; blur",
    "negatives": "62 to 510 negatives, and a biased loss that trains half as long again",
    "aggregation": "M = 1, 2, 4 positives at equal batch, two ways to aggregate them",
    "decoupled": "batches of 32 to 512 with and without DCL",
    "self-labeling": "one-hot labels, refinement, mixup, both",
    "prior": "ours: the memory's own tau+ against a constant, under bias",
    "study": "memories on the streams of a robot, a camera, a video, a crawler",
}
PRESETS = ("cpu-small", "cpu", "gpu")
REPORTS = Path(__file__).parents[1] / "reports"

DESCRIPTION = """Train encoders, compare them, and report. Each finished run is one line of a .jsonl
file in --out, and the same command goes on with the missing runs. docs/reproduction.md describes
the papers' experiments, docs/study.md the study."""

EXAMPLES = """examples:
  python -m benchmarks.experiments duel --data cifar:data/cifar10
  python -m benchmarks.experiments prior --data cifar:data/cifar10 --minutes 30 --only x27
  python -m benchmarks.experiments decoupled --preset gpu --data cifar:data/cifar10
  python -m benchmarks.experiments study --data cifar:data/cifar10 --only parked seed0
  python -m benchmarks.experiments study --list      the runs in their order, and the finished ones
  python -m benchmarks.experiments duel --report     tables and plots again, without training"""

SUCH_DATA = """a labelled set of 32 x 32 images, such as cifar:FOLDER with CIFAR-10's
data_batch_*.bin and test_batch.bin, the "binary version" of
https://www.cs.toronto.edu/~kriz/cifar.html"""

NO_DATA = f"--data is missing: {SUCH_DATA};\n--list and --report need none"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and report; return the exit status, which is 130 when interrupted."""
    share_cores()
    logs.configure()
    from stream_ssl.evaluation import sets

    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = parser_of(next((word for word in words if word in NAMES), ""))
    source = sets.add_source(parser, words)
    settings = parser.parse_args(words)
    if settings.experiment not in NAMES:
        parser.error(f"{settings.experiment!r} is no experiment: choose of {', '.join(NAMES)}")
    if source is None and not (settings.list or settings.report):
        parser.error(NO_DATA)
    return reported(lambda: experiment(settings, source))


def parser_of(name: str) -> ArgumentParser:
    """Return the parser of all options except those of the source."""
    lines = [f"  {name:<14} {line}" for name, line in NAMES.items()]
    parser = ArgumentParser(
        prog="python -m benchmarks.experiments",
        usage="python -m benchmarks.experiments NAME --data cifar:FOLDER [OPTIONS]",
        description=DESCRIPTION,
        epilog="\n".join(["names:", *lines, "", EXAMPLES]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("experiment", metavar="NAME", help="the experiment, see below")
    add(
        "--data",
        type=str | None,
        default=None,
        help="labelled set, NAME:PLACE as for `stream-ssl evaluate`; images become 32 x 32",
    )
    add("--out", type=Path | None, default=None, help="folder of results and reports")
    add("--only", nargs="+", default=[], metavar="TEXT", help="runs whose name holds all of these")
    add("--minutes", type=float | None, default=None, help="begin no run that would end later")
    add("--workers", type=int | None, default=None, help="processes; default: cores, 1 on a GPU")
    add("--list", action="store_true", help="name the runs and end")
    add("--report", action="store_true", help="tables and plots of the finished runs, no training")
    if name == "study":
        from benchmarks.experiments.study.training import StudySettings

        add("--streams", type=Path | None, default=None, help="draw the streams here and end")
        for field in fields(StudySettings):
            kind, says = type(field.default), field.metadata["help"]
            add(f"--{field.name}", type=kind, default=field.default, help=says)
        return parser
    add(
        "--preset",
        default="cpu-small",
        choices=PRESETS,
        help="cpu-small: 15 minutes on two cores; cpu: a night on eight; gpu: the papers' networks",
    )
    add("--seeds", type=int | None, default=None, help="repeats; default: the preset's")
    add("--device", type=str | None, default=None, help="default: the preset's")
    return parser


def experiment(settings: Namespace, source: str | None) -> int:
    """Do what the command line asks; return 0, or 130 when interrupted."""
    from rich.console import Console

    from stream_ssl.config.build import check_device

    with configuring():
        for name in ("seeds", "workers", "minutes"):
            value = settings.get(name)
            if value is not None and value <= 0:
                raise ValueError(f"--{name} {value}: must be above 0")
        chosen = (study if settings.experiment == "study" else reproduction)(settings, source)
        if source is not None:
            check_device(chosen.device)
        runs = chosen.runs(settings.only)
    if settings.list:
        for run in runs:
            print(f"{'    ' if chosen.results.get(run) is None else 'done'}  {run.name}")
        return DONE
    if settings.get("streams"):
        from benchmarks.experiments.study import plots

        plots.streams(load(settings, source).train, settings.streams)
        return DONE
    console = Console(width=None if sys.stdout.isatty() else 180)
    stopped = False
    if not settings.report:
        workers = settings.workers or (cores() if chosen.device == "cpu" else 1)
        stopped = chosen.train(
            runs, lambda: load(settings, source), workers, settings.minutes, console
        )
    chosen.report(console)
    return INTERRUPTED if stopped else DONE


def study(settings: Namespace, source: str | None) -> ExperimentWork[Any]:
    """Return the study with the settings of the command line."""
    from benchmarks.experiments.study.training import StudySettings
    from benchmarks.experiments.study.work import Study

    if source is not None:
        data_of(settings, source)
    chosen = StudySettings(**{field.name: settings[field.name] for field in fields(StudySettings)})
    return Study(chosen, settings.out or REPORTS / "study")


def reproduction(settings: Namespace, source: str | None) -> ExperimentWork[Any]:
    """Return an experiment of the papers with the preset of the command line."""
    from benchmarks.experiments.papers import EXPERIMENTS
    from benchmarks.experiments.papers.presets import PRESETS as SIZES
    from benchmarks.experiments.papers.work import Reproduction

    preset = SIZES[settings.preset]
    if settings.seeds is not None:
        preset = replace(preset, seeds=settings.seeds)
    if settings.device is not None:
        preset = replace(preset, device=settings.device)
    return Reproduction(
        EXPERIMENTS[settings.experiment],
        settings.preset,
        preset,
        settings.out or REPORTS / "reproduction",
        None if source is None else data_of(settings, source),
    )


def load(settings: Namespace, source: str | None) -> LabelledData:
    """Read the training and test images, as 32 x 32 in colour."""
    from benchmarks.experiments.data import gather
    from stream_ssl.evaluation import sets
    from stream_ssl.evaluation.labelled import Division
    from stream_ssl.feed.decode import Decoder

    assert source is not None
    options = settings.source.as_dict()
    with configuring():
        readers = sets.readers(source, options, None, Decoder(32), Division(0.2), 500, seed=0)
        return gather(part for reader in readers for part in reader)


def data_of(settings: Namespace, source: str) -> str:
    """Return the name of the data set in results, which does not contain its path."""
    from stream_ssl.evaluation import sets

    options = settings.source.as_dict()
    split = {"split": "test"} if sets.has_splits(source, options) else {}
    try:
        return str(sets.make(source, options, seed=0, **split).name)
    except FileNotFoundError as error:
        raise Failure(f"{error}. --data is {SUCH_DATA}") from error


if __name__ == "__main__":
    sys.exit(main())
