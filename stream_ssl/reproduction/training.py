"""One run: the product's own learner on a biased stream, then what came of it.

Shapes: B batch, N references, Q queries, F features, D embedding.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from memory import WorkingMemory
from memory.eviction import MostDuplicated, Oldest, Policy
from memory.scores import Gaussian, Linear, Quadratic, Score, VonMisesFisher
from stream_ssl.evaluation.geometry import class_similarity
from stream_ssl.evaluation.linear import CONVEX, PROBES, linear_probe
from stream_ssl.evaluation.neighbours import knn_accuracy, retrieval
from stream_ssl.learning.encoder import Projector
from stream_ssl.learning.learner import Learner
from stream_ssl.learning.optimiser import OptimiserSettings
from stream_ssl.learning.randomness import seed_everything
from stream_ssl.learning.records import StepRecord
from stream_ssl.learning.schedule import Constant, Cosine
from stream_ssl.learning.views import Views
from stream_ssl.losses import LOSSES
from stream_ssl.methods import METHODS, Method
from stream_ssl.reproduction.arms import Arm, Experiment, Run
from stream_ssl.reproduction.data import Biased, Data, Images, first_of_each
from stream_ssl.reproduction.network import encoder
from stream_ssl.reproduction.presets import Preset
from stream_ssl.reproduction.watch import Watch

CHUNK = 500  # images encoded at once
SOME = 100  # images of each class for the accuracy while a run learns
NEIGHBOURS = 20
MOMENTUM_METHODS = ("moco", "self-labeling", "byol")

SCORES: dict[str, Score] = {
    "linear": Linear(),
    "quadratic": Quadratic(),
    "gaussian": Gaussian(1.0),
    "vmf0.1": VonMisesFisher(0.1),
    "vmf0.3": VonMisesFisher(0.3),
}


def run_once(
    experiment: Experiment, run: Run, preset: Preset, data: Data
) -> dict[str, float | list[tuple[int, float]]]:
    """Train and evaluate: the numbers of the run, and by "trace.NAME" what changed over it."""
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
    watch = Watch(learner.method, learner.memory, data.classes, steps, accuracy)
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


def views_of(arm: Arm, settings: Mapping[str, Any]) -> Views:
    """The augmentation: SimCLR's, for DUEL without crops unless the preset has them."""
    crop = (0.2, 1.0) if arm.crop or settings.get("crop") else None
    return Views(32, crop=crop, hue=settings["hue"], blur=arm.blur)


def build(run: Run, settings: Mapping[str, Any], data: Data, views: Views) -> Learner:
    """The learner of a run; the same weights and stream for every arm of the same network, batch,
    bias and seed."""
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
        optimiser=OptimiserSettings(learning_rate=settings["learning_rate"]),
        schedule=Cosine(steps, repeat=False) if arm.cosine else Constant(),
        device=settings["device"],
        precision=settings["precision"],
        seed=seed,
        threads=1 if settings["device"] == "cpu" else None,
        anchors=arm.anchors,
        write_back=arm.anchors == "memory",
        plain_keys=arm.anchors == "memory",
    )


def method_of(arm: Arm, settings: Mapping[str, Any], steps: int) -> Method:
    """With new weights, drawn from torch's generator. Soft labels rise over the first half of the
    steps."""
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
    """A new policy: "queue", or DUEL's under the score of that name."""
    return Oldest() if name == "queue" else MostDuplicated(SCORES[name])


def train(learner: Learner, watch: Watch, steps: int) -> list[float]:
    """So many steps; seconds of each but the first few. On a CPU those of the process, so that
    they do not tell of the machine's other work."""
    on_cpu = learner.device.type == "cpu"
    clock: Callable[[], float] = time.process_time if on_cpu else time.monotonic
    stop, took = threading.Event(), []
    before = clock()
    for record in learner.run(stop):
        assert isinstance(record, StepRecord), "a stream out of RAM never waits"
        if not on_cpu:
            torch.cuda.synchronize(learner.device)
        took.append(clock() - before)
        watch.look(record)
        if record.step == steps:
            stop.set()
        before = clock()
    return took[min(5, len(took) - 1) :]


def evaluate(
    method: Method, views: Views, reference: Images, test: Images, device: str, probe: Any
) -> dict[str, float]:
    """Accuracies in [0, 1] on the balanced test, and mean cosines of features."""
    feature_NF, feature_QF = (features(method, views, part, device) for part in (reference, test))
    label_N, label_Q = (torch.from_numpy(part.label_N).to(device) for part in (reference, test))
    neighbours = min(NEIGHBOURS, len(label_N))
    top = retrieval(feature_QF, label_Q, ks=(1, min(10, len(label_Q) - 1)))
    similar = class_similarity(feature_QF, label_Q)
    return {
        "linear": linear_probe(feature_NF, label_N, feature_QF, label_Q, probe).accuracy,
        "knn": knn_accuracy(feature_QF, label_Q, feature_NF, label_N, neighbours).accuracy,
        "top1": top[1],
        "top10": top[max(top)],
        "intra": similar.intra,
        "inter": similar.inter,
        "queries": len(label_Q),
    }


def quick_accuracy(
    method: Method, views: Views, reference: Images, test: Images, device: str
) -> float:
    """kNN accuracy on few images."""
    feature_NF, feature_QF = (features(method, views, part, device) for part in (reference, test))
    label_N, label_Q = (torch.from_numpy(part.label_N).to(device) for part in (reference, test))
    return knn_accuracy(feature_QF, label_Q, feature_NF, label_N, NEIGHBOURS).accuracy


def features(method: Method, views: Views, images: Images, device: str) -> Tensor:
    """The encoder's features [N, F] of images as they are."""
    parts = []
    for start in range(0, len(images), CHUNK):
        image_NHWC = torch.tensor(images.image_NHWC[start : start + CHUNK])
        parts.append(method.features(views.plain(image_NHWC.permute(0, 3, 1, 2).to(device))))
    return torch.cat(parts)
