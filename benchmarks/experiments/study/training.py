"""One run of the study: the product's own learner on a stream, with measurements of its memory."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch

from benchmarks.experiments.data import LabelledData, first_of_each
from benchmarks.experiments.network import ConvNet
from benchmarks.experiments.study.arms import StudyRun
from benchmarks.experiments.study.baselines import METHODS, MultiPatches, Replaying
from benchmarks.experiments.study.streams import CLASSES, STRIDE, frames
from benchmarks.experiments.training import Measurements, evaluate, train
from stream_ssl.encoder.network import Projector
from stream_ssl.learning.learner import Learner
from stream_ssl.learning.optimiser import OptimiserSettings
from stream_ssl.learning.pace import Pace
from stream_ssl.learning.randomness import seed_everything
from stream_ssl.learning.records import StepRecord
from stream_ssl.learning.settings import LearnerSettings
from stream_ssl.learning.views import Colour, Views
from stream_ssl.losses import InfoNCE
from stream_ssl.memory import WorkingMemory

EVERY = 20  # updates between two measurements of the memory
THREADS = 1  # threads of torch


def _option(default: Any, says: str) -> Any:
    return field(default=default, metadata={"help": says})


@dataclass(frozen=True)
class StudySettings:
    """The settings that all runs of a study share. Results of other settings are kept apart."""

    steps: int = _option(600, "updates of a run")
    batch: int = _option(128, "samples of an update")
    capacity: int = _option(2048, "slots of the memory")
    dim: int = _option(128, "dimensions of an embedding")
    temperature: float = _option(0.2, "temperature of InfoNCE")
    momentum: float = _option(0.99, "momentum of the key encoder")
    learning_rate: float = _option(1e-3, "learning rate of Adam")
    references: int = _option(2000, "labelled images of each class that the probes may use")
    device: str = _option("cpu", "device of the runs")

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "capacity", "dim", "references"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"--{name} {value}: must be at least 1")

    def facts(self) -> dict[str, Any]:
        """Return the settings as results store them, with the threads, which affect sums.

        The device is not one of them, because the views and the stream of a seed are the same on
        every device. Compare runs of one device, whose sums are alike.
        """
        values = {**asdict(self), "threads": THREADS}
        del values["device"]
        return values


def run_once(settings: StudySettings, run: StudyRun, data: LabelledData) -> dict[str, Any]:
    """Train and evaluate; return the numbers of the run."""
    started = time.monotonic()
    views = Views(32, colour=Colour(hue=0.0))  # the stored results have no changes of hue
    learner = build(run, settings, data, views)
    memory = learner.memory
    watch = Measurements(partial(measure, memory, run.arm.anchors), settings.steps, EVERY)
    train(learner, watch, settings.steps)
    trained = time.monotonic() - started
    reference = first_of_each(data.train, settings.references)
    found = evaluate(learner.method, views, reference, data.test, settings.device)
    stats = memory.stats()
    return {
        **found,
        **watch.numbers(),
        "age_p50": stats.age_p50,
        "age_p90": stats.age_p90,
        "effective_classes": stats.effective_rank,
        "distinct": distinct(memory),
        "frames": learner.samples,
        "train_s": trained,
        "evaluate_s": time.monotonic() - started - trained,
    }


def build(run: StudyRun, settings: StudySettings, data: LabelledData, views: Views) -> Learner:
    """Return the learner of a run. Arms with the same seed share weights and stream."""
    seed_everything(run.seed, THREADS)
    encoder = ConvNet()
    projector = Projector(encoder.dim, settings.dim)
    loss, kind = InfoNCE(settings.temperature), METHODS[run.arm.method]
    replay: dict[str, Any] = {}
    if issubclass(kind, Replaying):
        # A bound function, because a module would become a part of the method.
        replay = {"augment": views.forward, "replayed": settings.batch // 2}
    method = kind(encoder, projector, loss, momentum=settings.momentum, **replay)
    samples = settings.batch
    if isinstance(method, MultiPatches):  # which encodes as many views as the other arms
        samples = max(1, samples // method.views)
    memory = WorkingMemory(
        settings.capacity,
        settings.dim,
        eviction=run.arm.eviction(),
        image_shape=(3, 32, 32),
        device=settings.device,
        seed=run.seed,
        descriptor=run.arm.describe(),
    )
    return Learner(
        method,
        memory,
        views,
        frames(run.stream, data.train, settings.batch, run.seed, used=samples),
        LearnerSettings(
            device=settings.device,
            seed=run.seed,
            threads=THREADS,
            anchors=run.arm.anchors,
            reencode=settings.batch if run.arm.freshness == "reencoded" else 0,
            write_back=run.arm.freshness != "stale",
            draw=run.arm.draw,
            plain_keys=run.arm.plain,
            novelty=run.arm.novelty,
        ),
        OptimiserSettings(learning_rate=settings.learning_rate),
        pace=Pace(run.arm.follow / settings.batch, counts="new") if run.arm.follow else None,
    )


def measure(memory: WorkingMemory, anchors: str, record: StepRecord) -> dict[str, float]:
    """Return the measurements of a step."""
    share_C = torch.bincount(memory.labels, minlength=CLASSES).double()
    share_C /= share_C.sum()
    # The probability that an anchor and a slot have the same class. Anchors come from the stream,
    # or uniformly from the memory itself.
    own = float(share_C.square().sum())
    collision = own if anchors == "memory" else record.collision_true
    found = {
        "entropy": float(torch.special.entr(share_C).sum()),
        "dominant": float(share_C[0]),
        "collision": collision,
        "copies": 1 - distinct(memory) / len(memory),
        "loss": record.loss,
        "drift": record.diagnostics.get("drift_cosine"),
        "written_back": record.diagnostics.get("written_back_cosine"),
    }
    return {name: value for name, value in found.items() if value is not None}


def distinct(memory: WorkingMemory) -> int:
    """Return the number of different original images in the slots."""
    return len(torch.unique(memory.ids % STRIDE))
