"""Training and evaluation with the product's own learner, on a stream in RAM.

Shapes: N references, Q queries, F features.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.experiments.data import LabelledImages
from stream_ssl.evaluation.geometry import class_similarity
from stream_ssl.evaluation.linear import CONVEX, linear_probe
from stream_ssl.evaluation.neighbours import knn_accuracy, retrieval
from stream_ssl.learning.learner import Learner
from stream_ssl.learning.records import StepRecord
from stream_ssl.learning.views import Views
from stream_ssl.methods import Method

CHUNK = 500  # images encoded at once
NEIGHBOURS = 20

Measure = Callable[[StepRecord], Mapping[str, float]]


class Measurements:
    """Measurements of a run while it learns, every few updates.

    Args:
        measure: returns the measurements of a step. Values that are not finite are left out.
        every: updates between two measurements. The last update is always measured.
    """

    def __init__(self, measure: Measure, steps: int, every: int) -> None:
        self._measure, self._steps, self._every = measure, steps, every
        self.traces: dict[str, list[tuple[int, float]]] = {}

    def look(self, record: StepRecord, update: int) -> None:
        """Measure after an update, if this update is due."""
        if update % self._every and update != self._steps:
            return
        for name, value in self._measure(record).items():
            if math.isfinite(value):
                self.traces.setdefault(name, []).append((update, value))

    def numbers(self) -> dict[str, float]:
        """Return the means over the second half of the run."""
        return {
            name: statistics.fmean(value for update, value in trace if 2 * update > self._steps)
            for name, trace in self.traces.items()
            if 2 * trace[-1][0] > self._steps
        }


def train(learner: Learner, watch: Measurements, steps: int) -> list[float]:
    """Make `steps` updates, and return the seconds of each step except the first few.

    On a CPU these are processor seconds, which do not depend on other work of the machine.
    """
    on_cpu = learner.device.type == "cpu"
    clock: Callable[[], float] = time.process_time if on_cpu else time.monotonic
    stop, took = threading.Event(), []
    before = clock()
    for record in learner.run(stop):
        assert isinstance(record, StepRecord), "a stream in RAM never waits"
        if not on_cpu:
            torch.cuda.synchronize(learner.device)
        took.append(clock() - before)
        if record.skipped is None:
            watch.look(record, learner.pace.updates)
        if learner.pace.updates >= steps:
            stop.set()
        before = clock()
    return took[min(5, len(took) - 1) :]


def evaluate(
    method: Method,
    views: Views,
    reference: LabelledImages,
    test: LabelledImages,
    device: str = "cpu",
    probe: Any = CONVEX,
) -> dict[str, float]:
    """Return accuracies in [0, 1] on the test images, and mean cosines of their features."""
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
    method: Method, views: Views, reference: LabelledImages, test: LabelledImages, device: str
) -> float:
    """Return the kNN accuracy on a few images."""
    feature_NF, feature_QF = (features(method, views, part, device) for part in (reference, test))
    label_N, label_Q = (torch.from_numpy(part.label_N).to(device) for part in (reference, test))
    return knn_accuracy(feature_QF, label_Q, feature_NF, label_N, NEIGHBOURS).accuracy


def features(method: Method, views: Views, images: LabelledImages, device: str) -> Tensor:
    """Return the encoder's features [N, F] of images without augmentation."""
    parts = []
    for start in range(0, len(images), CHUNK):
        image_NHWC = torch.tensor(images.image_NHWC[start : start + CHUNK])
        parts.append(method.features(views.plain(image_NHWC.permute(0, 3, 1, 2).to(device))))
    return torch.cat(parts)
