"""Compare memories, and what they count duplicates on, on the stream of a robot that is parked.

Trains a small encoder on CIFAR-10 as a robot would send it: 95 % of the frames show one of 16
scenes, jittered as a camera does; the others are new images. Then tells what part of the memory
near-copies take, how many distinct images it holds, and kNN and linear accuracy on the test images.
The ceiling is the same images shuffled, each as frequent as any other. Nets, settings and probes
are those of benchmarks.memory_policies. A run takes two to five minutes on one core; each finished
run is one line in RESULTS/runs.jsonl, and the same command goes on where it stopped.

examples:
  python -m benchmarks.parked --data ~/cifar-10-batches-bin
  python -m benchmarks.parked --data ... --only seed0 --only thumbnail
  python -m benchmarks.parked --data ... --steps 20 --results /tmp/parked    does it run at all
  python -m benchmarks.parked --list                                         the order
  python -m benchmarks.parked                                                the table, no training
  python -m benchmarks.parked --figure docs/parked.svg                       its bars, as a picture

A run is named "parked vmf0.1/memory/written/plain/thumbnail seed0": policy / anchors / freshness /
descriptor, where that is not the embedding.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
from matplotlib import rc_context
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from benchmarks.memory_policies.__main__ import train
from benchmarks.memory_policies.arms import BASE, DESCRIPTORS, SEEDS, Arm, Run
from benchmarks.memory_policies.results import Results
from benchmarks.memory_policies.training import Settings, Watch
from memory import WorkingMemory
from producers.shaping import Parked
from producers.sources import Source
from producers.sources.fields import digest
from producers.sources.finite import Finite
from stream_ssl.batch import Batch, Offset
from stream_ssl.learning.records import StepRecord
from stream_ssl.reproduction.data import Images
from stream_ssl.reproduction.spread import Spread
from stream_ssl.wire.sample import Sample

RESULTS = Path(__file__).parent / "reports" / "parked"
STRIDE = 1_000  # an id is the frame's number times this, and its scene's number from 1; 0: new
SCENES = 16


class InMemory(Finite):
    """Images in RAM as a source, in passes without end."""

    def __init__(self, images: Images, seed: int) -> None:
        super().__init__("cifar", len(images), "in memory", seed=seed, epochs=None)
        self._images = images

    def _sample(self, index: int) -> Sample:
        label = int(self._images.label_N[index])
        return Sample.from_array(self._images.image_NHWC[index], f"{index}", label=label)


class Frames:
    """Batches of a source's frames."""

    def __init__(self, source: Source, batch: int) -> None:
        self._samples, self._batch, self._count = source.samples(), batch, 0

    def next(self, timeout: float) -> Batch:  # noqa: ARG002
        frames = [sample for sample, _ in itertools.islice(self._samples, self._batch)]
        scene_B = np.array([(frame.meta or {}).get("scene", -1) for frame in frames], np.int64)
        self._count += 1
        zeros_B = np.zeros(self._batch)
        return Batch(
            images_BCHW=np.stack(
                [np.frombuffer(f.data, np.uint8).reshape(32, 32, 3) for f in frames]
            ).transpose(0, 3, 1, 2),
            ids_B=(np.arange(self._batch) + self._batch * self._count) * STRIDE + scene_B + 1,
            # As the receiver does: near-copies have other contents.
            hashes_B=np.array([int(digest([f.data])[:15], 16) + 1 for f in frames]),
            labels_B=np.array([frame.label for frame in frames], np.int64),
            times_B=zeros_B,
            received_B=zeros_B,
            offset=Offset(self._count, 0),
            rejected={},
        )

    def lag(self) -> float:
        return 0.0


@dataclass(frozen=True)
class Robot:
    """The stream, as a run names it."""

    shift: int = 2

    @property
    def name(self) -> str:
        return "parked" if self.shift == 2 else f"parked-shift{self.shift}"

    def stream(self, images: Images, batch: int, seed: int) -> Frames:
        source = InMemory(images, seed)
        return Frames(Parked(source, scenes=SCENES, shift=self.shift, seed=seed), batch)


@dataclass(frozen=True)
class Shuffled:
    """The ceiling: no frame resembles another more than its class makes it."""

    name: str = "shuffled"

    def stream(self, images: Images, batch: int, seed: int) -> Frames:
        return Frames(InMemory(images, seed), batch)


class Copies(Watch):
    """Besides, what part of the memory shows a scene that another slot shows already."""

    def look(self, record: StepRecord) -> None:
        super().look(record)
        if 2 * record.step > self._steps:
            self._note("copies_mean", near_copies(self._memory) / len(self._memory))

    def numbers(self) -> dict[str, float]:
        copies = near_copies(self._memory)
        held = len(self._memory)
        return {**super().numbers(), "copies": copies / held, "distinct": held - copies}


def near_copies(memory: WorkingMemory) -> int:
    """Slots beyond the first of each scene."""
    scene_k = memory.ids.cpu() % STRIDE
    held_S = torch.bincount(scene_k, minlength=SCENES + 1)[1:]
    return int((held_S - 1).clamp(min=0).sum())


def arm(policy: str, descriptor: str = "embedding") -> Arm:
    """Trained on draws from the memory, with fresh keys written back."""
    return Arm(policy, "memory", "written", plain=True, descriptor=descriptor)


TITLES = {
    BASE: "queue, trained on the stream (MoCo)",
    arm("vmf0.1"): "DUEL on embeddings",
    arm("reservoir"): "reservoir",
    arm("minred"): "MinRed",
    arm("vmf0.1", "weighted"): "DUEL on embeddings and thumbnails",
    arm("vmf0.1", "thumbnail"): "DUEL on thumbnails (the default)",
}
"""The arms of the picture, and what a reader calls them."""


def plan() -> list[Run]:
    """Every run once, the most telling first."""
    return list(dict.fromkeys(_by_worth()))


def _by_worth() -> Iterator[Run]:
    rest = (
        *(arm("vmf0.1", name) for name in DESCRIPTORS),
        arm("queue"),
        *(arm("minred", name) for name in DESCRIPTORS),
    )
    shifted = (arm("vmf0.1"), arm("vmf0.1", "thumbnail"), arm("vmf0.1", "weighted"), arm("queue"))
    for seed in SEEDS:
        yield Run(Shuffled(), BASE, seed)  # type: ignore[arg-type]
        yield from (Run(Robot(), one, seed) for one in TITLES)  # type: ignore[arg-type]
    for seed in SEEDS:
        yield from (Run(Robot(), one, seed) for one in rest)  # type: ignore[arg-type]
        yield from (Run(Robot(1), one, seed) for one in shifted)  # type: ignore[arg-type]


COLUMNS = (
    ("near-copies, %", "copies", 100.0),
    ("mean of 2nd half", "copies_mean", 100.0),
    ("distinct images", "distinct", 1.0),
    ("kNN, %", "knn", 100.0),
    ("linear, %", "linear", 100.0),
)


def table(results: Results, runs: Sequence[Run]) -> Table:
    """A row for each stream and arm with a finished run; means and deviations over seeds."""
    made = Table(title="a parked robot's stream", title_justify="left")
    made.add_column("stream, memory / anchors / freshness / descriptor", no_wrap=True)
    for heading in ("seeds", *(heading for heading, _, _ in COLUMNS)):
        made.add_column(heading, justify="right")
    done: dict[str, list[Run]] = {}
    for run in runs:
        if run in results:
            done.setdefault(f"{run.shape.name} {run.arm.name}", []).append(run)
    for name, those in done.items():
        cells = [
            Spread(tuple(results[run][key] for run in those)).text(scale)
            for _, key, scale in COLUMNS
        ]
        made.add_row(name.replace("/", " / "), str(len(those)), *cells)
    return made


def draw(results: Results, runs: Sequence[Run], where: Path) -> None:
    """kNN accuracy of each arm as a bar, and the ceiling as a line; errors are deviations."""
    found: dict[str, list[float]] = {}
    for run in runs:
        if run in results:
            name = "" if run.shape.name == "shuffled" else TITLES.get(run.arm, "other")
            found.setdefault(name, []).append(100 * results[run]["knn"])
    shown = [title for title in TITLES.values() if title in found]
    chart = Figure(figsize=(7.2, 2.6), layout="constrained")
    FigureCanvasSVG(chart)
    axes = chart.subplots()
    for place, title in enumerate(reversed(shown)):
        values = found[title]
        mean, spread = float(np.mean(values)), float(np.std(values, ddof=1)) if values[1:] else 0.0
        axes.barh(place, mean, color="#2a78d6" if "default" in title else "#9aa5b1", xerr=spread)
        axes.text(1, place, title, va="center", color="white", fontsize=9)
        axes.text(mean + spread + 0.7, place, f"{mean:.1f}", va="center", fontsize=9)
    if "" in found:
        axes.axvline(ceiling := float(np.mean(found[""])), color="#444", linestyle="--")
        axes.set_title(f"dashed: the same images, shuffled ({ceiling:.1f})", fontsize=9)
    axes.set(yticks=[], xlabel="kNN accuracy after 600 updates, %")
    axes.spines[["top", "right", "left"]].set_visible(False)
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "parked"}):  # text stays text
        chart.savefig(where, metadata={"Date": None})


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0; 2 for arguments that cannot work, 130 when interrupted."""
    parser = _parser()
    chosen = parser.parse_args(arguments)
    settings = Settings(**{f.name: getattr(chosen, f.name) for f in fields(Settings)})
    results = Results(chosen.results, settings.facts())
    runs = [run for run in plan() if all(part in run.name for part in chosen.only)]
    if not runs:
        parser.error(f"no run's name holds all of {chosen.only}: see --list")
    if chosen.list:
        for run in runs:
            print(f"{'done' if run in results else '    '}  {run.name}")
        return 0
    console = Console(width=None if sys.stdout.isatty() else 160)
    stopped = False
    if chosen.data is not None:
        missing = [run for run in runs if run not in results][: chosen.runs]
        stopped = train(missing, results, settings, chosen.data, console, Copies)
    console.print(table(results, runs))
    if chosen.figure is not None:
        draw(results, runs, chosen.figure)
    return 130 if stopped else 0


def _parser() -> argparse.ArgumentParser:
    summary, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.parked",
        description=f"{summary}\n{rest}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", type=Path, help="folder of data_batch_*.bin, test_batch.bin")
    parser.add_argument("--results", type=Path, default=RESULTS, help=f"default: {RESULTS}")
    parser.add_argument("--runs", type=int, help="end after so many runs; default: all")
    parser.add_argument(
        "--only", action="append", default=[], metavar="TEXT", help="runs whose name holds it"
    )
    parser.add_argument("--figure", type=Path, help="draw the arms of the README as SVG")
    parser.add_argument("--list", action="store_true", help="name the runs and end")
    group = parser.add_argument_group("settings; runs of other settings are kept apart")
    for field in fields(Settings):
        group.add_argument(
            f"--{field.name}",
            type=type(field.default),
            default=field.default,
            help=f"{field.metadata['help']} (default: {field.default})",
        )
    return parser


if __name__ == "__main__":
    sys.exit(main())
