"""One run: the product's own learner on a biased stream, then what came of it.

Shapes: C classes, N reference images, Q test images, F features.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.study.arms import Run
from benchmarks.study.streams import CLASSES, STRIDE, frames
from memory import WorkingMemory
from stream_ssl import evaluation
from stream_ssl.learning.encoder import Projector
from stream_ssl.learning.learner import Learner
from stream_ssl.learning.optimiser import OptimiserSettings
from stream_ssl.learning.pace import Pace
from stream_ssl.learning.randomness import seed_everything
from stream_ssl.learning.records import StepRecord
from stream_ssl.learning.views import Views
from stream_ssl.losses import InfoNCE
from stream_ssl.methods import Method, MoCo
from stream_ssl.reproduction.data import Images
from stream_ssl.reproduction.network import ConvNet
from stream_ssl.reproduction.training import NEIGHBOURS, features

EVERY = 20  # steps between two looks at the memory, in the second half of a run


def _option(default: Any, says: str) -> Any:
    return field(default=default, metadata={"help": says})


@dataclass(frozen=True)
class Settings:
    """What all runs of a study share; results of other settings are not mixed with them."""

    steps: int = _option(600, "updates of a run")
    batch: int = _option(128, "samples an update")
    capacity: int = _option(2048, "slots of the memory")
    dim: int = _option(128, "dimensions of an embedding")
    temperature: float = _option(0.2, "of InfoNCE")
    momentum: float = _option(0.99, "of the key encoder")
    learning_rate: float = _option(1e-3, "of Adam")
    threads: int = _option(1, "of torch; part of the settings, for sums depend on it")
    references: int = _option(2000, "labelled images of each class that the probes may use")

    def facts(self) -> dict[str, Any]:
        """As JSON holds them."""
        return asdict(self)


@dataclass(frozen=True)
class Data:
    """Training stream, labelled references, test images."""

    train: Images
    reference: Images
    test: Images


def run_once(
    run: Run,
    settings: Settings,
    data: Data,
    tick: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Train, calling `tick` after each update, and evaluate; the numbers of the run."""
    started = time.monotonic()
    views = study_views()
    learner = build(run, settings, data, views)
    watch = Watch(learner.memory, settings.steps, run.arm.anchors)
    stop = threading.Event()
    for record in learner.run(stop):
        assert isinstance(record, StepRecord), "a stream out of RAM never waits"
        if record.skipped is not None:
            continue
        watch.look(record, learner.pace.updates)
        tick()
        if learner.pace.updates == settings.steps:
            stop.set()
    trained = time.monotonic() - started
    found = evaluate(learner.method, views, data.reference, data.test)
    seconds = {"train_s": trained, "evaluate_s": time.monotonic() - started - trained}
    return {**found, **watch.numbers(), "frames": learner.samples, **seconds}


def study_views() -> Views:
    """SimCLR's without a change of hue, which alone costs as much as all the rest."""
    return Views(32, hue=0.0)


def build(run: Run, settings: Settings, data: Data, views: Views) -> Learner:
    """The learner of a run; the same weights and stream for every arm with the same seed."""
    seed_everything(run.seed, settings.threads)
    encoder = ConvNet()
    projector = Projector(encoder.dim, settings.dim)
    method = MoCo(encoder, projector, InfoNCE(settings.temperature), momentum=settings.momentum)
    memory = WorkingMemory(
        settings.capacity,
        settings.dim,
        eviction=run.arm.eviction(),
        image_shape=(3, 32, 32),
        seed=run.seed,
        descriptor=run.arm.describe(),
    )
    return Learner(
        method,
        memory,
        views,
        frames(run.stream, data.train, settings.batch, run.seed),
        optimiser=OptimiserSettings(learning_rate=settings.learning_rate),
        seed=run.seed,
        threads=settings.threads,
        anchors=run.arm.anchors,
        reencode=settings.batch if run.arm.freshness == "reencoded" else 0,
        write_back=run.arm.freshness != "stale",
        draw=run.arm.draw,
        plain_keys=run.arm.plain,
        novelty=run.arm.novelty,
        pace=Pace(run.arm.follow / settings.batch, counts="new") if run.arm.follow else None,
    )


class Watch:
    """Averages over the second half of a run."""

    def __init__(self, memory: WorkingMemory, steps: int, anchors: str) -> None:
        self._memory, self._steps, self._anchors = memory, steps, anchors
        self._seen: dict[str, list[float]] = {}

    def look(self, record: StepRecord, update: int) -> None:
        if 2 * update <= self._steps or (update % EVERY and update != self._steps):
            return
        share_C = torch.bincount(self._memory.labels, minlength=CLASSES).double()
        share_C /= share_C.sum()
        # The chance that an anchor and a slot share their class; anchors are of the stream or,
        # drawn evenly, of the memory itself.
        own = float(share_C.square().sum())
        collision = own if self._anchors == "memory" else record.collision_true
        self._note("entropy", float(torch.special.entr(share_C).sum()))
        self._note("dominant", float(share_C[0]))
        self._note("collision", collision)
        self._note("copies", 1 - distinct(self._memory) / len(self._memory))
        self._note("loss", record.loss)
        self._note("drift", record.diagnostics.get("drift_cosine"))
        self._note("written_back", record.diagnostics.get("written_back_cosine"))

    def numbers(self) -> dict[str, float]:
        means = {name: statistics.fmean(values) for name, values in self._seen.items()}
        stats = self._memory.stats()
        return {
            **means,
            "age_p50": stats.age_p50,
            "age_p90": stats.age_p90,
            "effective_classes": stats.effective_rank,
            "distinct": distinct(self._memory),
        }

    def _note(self, name: str, value: float | None) -> None:
        if value is not None:
            self._seen.setdefault(name, []).append(value)


def distinct(memory: WorkingMemory) -> int:
    """How many different images the slots show, whatever was done to them."""
    return len(torch.unique(memory.ids % STRIDE))


def evaluate(method: Method, views: Views, reference: Images, test: Images) -> dict[str, float]:
    """Accuracy in [0, 1] of each probe, with the labels of `reference`."""
    feature_NF, feature_QF = (features(method, views, part, "cpu") for part in (reference, test))
    label_N, label_Q = (torch.from_numpy(part.label_N) for part in (reference, test))
    return {
        "knn": evaluation.knn_accuracy(
            feature_QF, label_Q, feature_NF, label_N, k=NEIGHBOURS
        ).accuracy,
        "linear": linear_probe(feature_NF, label_N, feature_QF, label_Q),
    }


def linear_probe(feature_NF: Tensor, label_N: Tensor, test_QF: Tensor, label_Q: Tensor) -> float:
    """Accuracy of a logistic regression on frozen features, at its minimum: neither a learning rate
    nor a seed stands between two encoders."""
    found = evaluation.linear_probe(feature_NF, label_N, test_QF, label_Q, evaluation.CONVEX)
    return found.accuracy
