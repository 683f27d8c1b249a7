"""One run of a paper's experiment."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from benchmarks.experiments.data import Biased, LabelledData, first_of_each
from benchmarks.experiments.network import encoder
from benchmarks.experiments.papers.arms import Experiment, PaperArm, PaperRun
from benchmarks.experiments.papers.presets import Preset
from benchmarks.experiments.papers.watch import LOOKS, measure
from benchmarks.experiments.training import Measurements, evaluate, quick_accuracy, train
from stream_ssl.encoder.network import Projector
from stream_ssl.evaluation.linear import CONVEX, PROBES
from stream_ssl.learning.learner import Learner
from stream_ssl.learning.optimiser import OptimiserSettings
from stream_ssl.learning.randomness import seed_everything
from stream_ssl.learning.schedule import Constant, Cosine
from stream_ssl.learning.settings import LearnerSettings
from stream_ssl.learning.views import Colour, Views
from stream_ssl.losses import LOSSES
from stream_ssl.memory import WorkingMemory
from stream_ssl.memory.eviction import MostDuplicated, Oldest, Policy
from stream_ssl.memory.scores import Gaussian, Linear, Quadratic, Score, VonMisesFisher
from stream_ssl.methods import METHODS, Method

SOME = 100  # images per class for the accuracy during a run
MOMENTUM_METHODS = ("moco", "self-labeling", "byol")

SCORES: dict[str, Score] = {
    "linear": Linear(),
    "quadratic": Quadratic(),
    "gaussian": Gaussian(1.0),
    "vmf0.1": VonMisesFisher(0.1),
    "vmf0.3": VonMisesFisher(0.3),
}


def run_once(
    experiment: Experiment, preset: Preset, run: PaperRun, data: LabelledData
) -> dict[str, float | list[tuple[int, float]]]:
    """Train and evaluate; return the numbers of the run, and its traces as "trace.NAME"."""
    started = time.monotonic()
    settings = preset.of(experiment.name)
    views = views_of(run.arm, settings)
    learner = build(run, settings, data, views)
    batch = run.arm.batch or settings["batch"]
    steps = round(run.arm.share * settings["samples"] / batch)
    accuracy = None
    if "accuracy" in experiment.traces:
        some = first_of_each(data.train, SOME), first_of_each(data.test, SOME)
        accuracy = partial(quick_accuracy, learner.method, views, *some, settings["device"])
    looks = partial(measure, learner.method, learner.memory, data.classes, accuracy)
    watch = Measurements(looks, steps, max(1, steps // LOOKS))
    took = train(learner, watch, steps) if steps else []
    trained = time.monotonic() - started
    probe = CONVEX if settings["probe"] == "convex" else PROBES[experiment.probe]
    reference = first_of_each(data.train, settings["references"])
    found = evaluate(learner.method, views, reference, data.test, settings["device"], probe)
    cost = {"step_ms": 1e3 * statistics.median(took)} if took else {}
    return {
        **found,
        **watch.numbers(),
        **cost,
        **{f"trace.{name}": trace for name, trace in watch.traces.items()},
        "steps": steps,
        "train_s": trained,
        "evaluate_s": time.monotonic() - started - trained,
    }


def views_of(arm: PaperArm, settings: Mapping[str, Any]) -> Views:
    """Return SimCLR's augmentation, without crops if neither the arm nor the preset has them."""
    crop = (0.2, 1.0) if arm.crop or settings.get("crop") else None
    return Views(32, crop=crop, colour=Colour(hue=settings["hue"]), blur=arm.blur)


def build(run: PaperRun, settings: Mapping[str, Any], data: LabelledData, views: Views) -> Learner:
    """Return the learner of a run.

    Arms with the same network, batch, bias and seed start with the same weights and stream.
    """
    arm, seed = run.arm, run.seed
    seed_everything(seed, threads=1 if settings["device"] == "cpu" else None)
    batch = arm.batch or settings["batch"]
    steps = max(1, round(arm.share * settings["samples"] / batch))
    method = method_of(arm, settings, steps)
    memory = WorkingMemory(
        settings["raw_capacity"] if arm.raw else arm.capacity or settings["capacity"],
        settings["dim"],
        eviction=policy_of(arm.memory),
        image_shape=(3, 32, 32) if arm.raw or arm.anchors == "memory" else None,
        device=settings["device"],
        seed=seed,
        measured_by=None if arm.prior_by is None else SCORES[arm.prior_by],
    )
    return Learner(
        method,
        memory,
        views,
        Biased(data.train, data.classes, arm.bias, batch, seed),
        LearnerSettings(
            device=settings["device"],
            precision=settings["precision"],
            seed=seed,
            threads=1 if settings["device"] == "cpu" else None,
            anchors=arm.anchors,
            write_back=arm.anchors == "memory",
            plain_keys=arm.anchors == "memory",
        ),
        OptimiserSettings(learning_rate=settings["learning_rate"]),
        Cosine(steps, repeat=False) if arm.cosine else Constant(),
    )


def method_of(arm: PaperArm, settings: Mapping[str, Any], steps: int) -> Method:
    """Return a method with new weights from torch's generator.

    Soft labels rise over the first half of the steps.
    """
    network, features = encoder(settings["network"])
    cls = METHODS[arm.method]
    projector = Projector(features, settings["dim"], batchnorm="none" if cls.contrasts else "all")
    options = dict(arm.method_options)
    if arm.method in MOMENTUM_METHODS:
        options.setdefault("momentum", settings["momentum"])
    rise = {"rise": max(1, steps // 2)} if arm.loss == "self-labeling" else {}
    loss = LOSSES[arm.loss](**arm.loss_options, **rise)
    return cls(network, projector, loss, **options)


def policy_of(name: str) -> Policy:
    """Return a new policy: "queue", or DUEL's policy with the score of that name."""
    return Oldest() if name == "queue" else MostDuplicated(SCORES[name])
