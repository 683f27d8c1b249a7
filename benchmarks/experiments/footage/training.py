"""One run: the learner of a configuration on a recording, and what its memory then holds.

Shapes: N frames, K slots, S side, F features.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d, normalize

from benchmarks.experiments.data import LabelledImages
from benchmarks.experiments.footage.recordings import Footage, Recording, rows_by
from benchmarks.experiments.training import features
from benchmarks.full_learner import settings_of
from stream_ssl.batch import START, Batch, Offset, Origin
from stream_ssl.config import build
from stream_ssl.evaluation.linear import CONVEX, linear_probe
from stream_ssl.evaluation.neighbours import knn_accuracy
from stream_ssl.feed.decode import content_hashes
from stream_ssl.learning.learner import Learner
from stream_ssl.learning.randomness import seed_everything
from stream_ssl.learning.records import StepRecord
from stream_ssl.learning.views import Views
from stream_ssl.memory import WorkingMemory
from stream_ssl.memory.index import nearest
from stream_ssl.memory.sketch_distance import ALIKE, distance
from stream_ssl.memory.sketches import key, sketch

CONFIGURATION = Path(__file__).parents[3] / "deploy" / "configs" / "laptop.yaml"
NEIGHBOURS = 20  # of a vote
REFERENCES = 4_000  # frames of the stream that the probes may use
COMPARED = 4  # other slots that a slot is compared with

_BOTH = json.dumps({
    "class_path": "Weighted",
    "init_args": {"parts": [{"class_path": "Embedding"}, {"class_path": "Features"}]},
})  # fmt: skip
_BARE = ("--learner.novelty=null", "--memory.shares=0")


def _rule(eviction: str, descriptor: str | None = None) -> tuple[str, ...]:
    described = () if descriptor is None else (f"--memory.descriptor={descriptor}",)
    return (f"--memory.eviction={eviction}", *described)


def _duel(kappa: float, descriptor: str = "Embedding") -> tuple[str, ...]:
    return (*_rule("duel", descriptor), f"--memory.eviction.kappa={kappa}")


ARMS: Mapping[str, tuple[str, ...]] = {
    "redundant": _rule("redundant", "Thumbnail"),
    "duel": _duel(0.1),
    "duel on features": _duel(0.1, "Features"),
    "duel on features, kappa 0.2": _duel(0.2, "Features"),
    "duel on features, kappa 0.5": _duel(0.5, "Features"),
    "duel on both": _duel(0.1, _BOTH),
    "duel on both, kappa 0.3": _duel(0.3, _BOTH),
    "duel, kappa 0.2": _duel(0.2),
    "duel, kappa 0.3": _duel(0.3),
    "reservoir": _rule("reservoir"),
    "minred": _rule("minimum-redundancy", "Embedding"),
    "queue": _rule("oldest"),
    "duel, no test": (*_duel(0.1), *_BARE),
    "reservoir, no test": (*_rule("reservoir"), *_BARE),
    "queue, no test": (*_rule("oldest"), *_BARE, "--learner.anchors=stream"),
}
"""By name: options over the shipped configuration."""

TITLES: Mapping[str, str] = {
    "redundant": "DUEL on thumbnails while a sample is duplicated, else a random slot",
    "duel": "DUEL on embeddings",
    "duel on features": "DUEL on features",
    "duel on features, kappa 0.2": "DUEL on features, kappa 0.2",
    "duel on features, kappa 0.5": "DUEL on features, kappa 0.5",
    "duel on both": "DUEL on embeddings and features",
    "duel on both, kappa 0.3": "DUEL on embeddings and features, kappa 0.3",
    "duel, kappa 0.2": "DUEL on embeddings, kappa 0.2",
    "duel, kappa 0.3": "DUEL on embeddings, kappa 0.3",
    "reservoir": "reservoir",
    "minred": "MinRed",
    "queue": "queue",
    "duel, no test": "DUEL on embeddings, near-duplicates kept, no shares",
    "reservoir, no test": "reservoir, near-duplicates kept, no shares",
    "queue, no test": "queue, trained on the stream (MoCo)",
}


def _option(default: Any, says: str) -> Any:
    return field(default=default, metadata={"help": says})


@dataclass(frozen=True)
class FootageSettings:
    """The settings that all runs share. Results of other settings are kept apart."""

    size: int = _option(32, "side of an image in pixels")
    capacity: int = _option(1024, "slots of the memory")
    passes: int = _option(1, "times that the recording is shown")
    updates: int = _option(2, "updates for each batch of 128 frames")

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < 1:
                raise ValueError(f"--{name} {value}: must be at least 1")

    def facts(self) -> dict[str, Any]:
        return {**asdict(self), "threads": 1}


@dataclass(frozen=True)
class FootageRun:
    """An arm on a recording with a seed, which draws the weights, the views and the evictions."""

    recording: str
    arm: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.recording} / {self.arm} / seed{self.seed}"

    @property
    def cost(self) -> float:
        return 1.0

    def facts(self) -> dict[str, Any]:
        return {}


class Shown:
    """Batches of a recording that is shown some times. An id is the frame's place in the stream."""

    def __init__(self, frames: Footage, batch: int, passes: int) -> None:
        self._frames, self._batch = frames, batch
        self.batches, self._next = passes * len(frames) // batch, 0

    def next(self, timeout: float) -> Batch[NDArray[Any]]:  # noqa: ARG002
        first = self._next * self._batch
        number_B = np.arange(first, first + self._batch)
        self._next += 1
        row_B = number_B % len(self._frames)
        image_BHWC = self._frames.image_NHWC[row_B]
        return Batch(
            images_BCHW=np.ascontiguousarray(image_BHWC.transpose(0, 3, 1, 2)),
            ids_B=number_B,
            hashes_B=content_hashes(image_BHWC),
            labels_B=np.full(self._batch, -1),
            received_B=number_B.astype(np.float64),
            origins_B=[
                Origin(self._frames.producers[row], "footage", str(number), float(number))
                for row, number in zip(row_B.tolist(), number_B.tolist(), strict=True)
            ],
            offset=Offset(self._next + 1, 0),
        )

    def lag(self) -> float:
        return 0.0


def run_once(settings: FootageSettings, run: FootageRun, recording: Recording) -> dict[str, Any]:
    """Train, and return what the memory holds and how well the encoder tells what it sees."""
    began = time.monotonic()
    learner = _learner(settings, run, recording.stream)
    stop = threading.Event()
    batches = learner.batches
    assert isinstance(batches, Shown)
    admitted = 0
    for record in learner.run(stop):
        assert isinstance(record, StepRecord), "a recording in RAM never waits"
        if not record.replay:
            admitted += record.batch
        if learner.offset.record > batches.batches and not learner.pace.must_update():
            stop.set()
    trained = time.monotonic() - began
    held = recording.stream.at(_held_rows(learner.memory, recording.stream))
    return {
        "received": learner.samples,
        "admitted": admitted,
        "updates": learner.pace.updates,
        **holdings(held, recording.stream),
        **accuracies(learner, recording),
        "train_s": trained,
        "evaluate_s": time.monotonic() - began - trained,
    }


def _learner(settings: FootageSettings, run: FootageRun, frames: Footage) -> Learner:
    seed_everything(run.seed, 1)
    found = settings_of(
        [
            str(CONFIGURATION),
            *ARMS[run.arm],
            f"--decoder.size={settings.size}",
            f"--memory.capacity={settings.capacity}",
            f"--learner.seed={run.seed}",
            "--learner.threads=1",
            f"--pace.updates_per_sample={settings.updates / 128}",
        ]
    )
    stream = Shown(frames, found.batches.batch_size, settings.passes)
    return build.learner(found, stream, START)


def _held_rows(memory: WorkingMemory, frames: Footage) -> NDArray[np.int64]:
    return memory.ids.cpu().numpy() % len(frames)


def holdings(held: Footage, seen: Footage) -> dict[str, float]:
    """Return what a memory with these frames holds of what was seen."""
    count = len(held)
    found = {f"slots {name}": held.producers.count(name) for name in sorted({*seen.producers})}
    share = np.bincount(held.label_N[held.label_N >= 0]) / max(1, (held.label_N >= 0).sum())
    share = share[share > 0]
    shown_NF = _thumbnails(seen.image_NHWC)
    gap_N = _gaps(shown_NF, _thumbnails(held.image_NHWC))
    gap_N[(shown_NF == 0).all(dim=1).numpy()] = 0.0  # a picture of one colour
    return {
        **found,
        "near_duplicates": near_duplicates(held.image_NHWC),
        "copies": 1 - len(np.unique(held.original_N)) / count,
        "classes": float(np.exp(-(share * np.log(share)).sum())),
        "labels": len(np.unique(held.label_N[held.label_N >= 0])),
        "scenes": len(np.unique(held.scene_N)),
        "kinds": len(frozenset().union(*held.kinds)),
        "gap": float(np.mean([gap_N[rows].mean() for rows in rows_by(seen.scene_N)])),
        "worst_gap": float(np.quantile(gap_N, 0.99)),
    }


def near_duplicates(image_KHWC: NDArray[np.uint8]) -> float:
    """Return the share of pictures that have a copy among the others, by the learner's test."""
    image_KCHW = torch.tensor(image_KHWC).permute(0, 3, 1, 2)
    sketch_KD = sketch(image_KCHW)
    key_KA = normalize(key(sketch_KD), dim=1)
    _, row_Kk = nearest(key_KA, key_KA, COMPARED + 1)
    own_K = torch.arange(len(row_Kk))
    near_K = torch.zeros(len(row_Kk), dtype=torch.bool)
    for other_K in row_Kk.unbind(dim=1):
        near_K |= (distance(sketch_KD, sketch_KD[other_K]) < ALIKE) & (other_K != own_K)
    return float(near_K.float().mean())


def _thumbnails(image_NHWC: NDArray[np.uint8]) -> Tensor:
    """Return grey thumbnails of 16 x 16 pixels as unit rows with mean 0."""
    parts = []
    for start in range(0, len(image_NHWC), 2_000):
        grey = torch.tensor(image_NHWC[start : start + 2_000]).float().mean(dim=3, keepdim=True)
        small = adaptive_avg_pool2d(grey.permute(0, 3, 1, 2), 16).flatten(1)
        parts.append(normalize(small - small.mean(dim=1, keepdim=True), dim=1))
    return torch.cat(parts)


def _gaps(row_NF: Tensor, row_KF: Tensor) -> NDArray[np.float64]:
    """Return the Euclidean distance of each row to the nearest slot."""
    cosine_N1, _ = nearest(row_NF, row_KF, 1)
    return (2 - 2 * cosine_N1[:, 0].double()).clamp(min=0).sqrt().numpy()


def accuracies(learner: Learner, recording: Recording) -> dict[str, float]:
    """Return the accuracy of a kNN vote and of a linear probe on the tested frames.

    The classes are labels, rooms and kinds of objects, as far as these are known.
    """
    every = max(1, len(recording.stream) // REFERENCES)
    rows = np.arange(0, len(recording.stream), every)
    seen, tested = recording.stream.at(rows), recording.tested
    names = sorted(frozenset().union(*seen.kinds))
    labels = {
        "": (seen.label_N, tested.label_N),
        "room_": (seen.room_N, tested.room_N),
        "object_": (seen.objects(names), tested.objects(names)),
    }
    found: dict[str, float] = {}
    for of, (seen_N, tested_N) in labels.items():
        if (seen_N >= 0).any():
            found |= _accuracy(learner, seen.images(seen_N), tested.images(tested_N), of)
    return found


def _accuracy(
    learner: Learner, seen: LabelledImages, tested: LabelledImages, of: str
) -> dict[str, float]:
    known = np.isin(tested.label_N, seen.label_N)  # others cannot be recognised
    tested = LabelledImages(tested.image_NHWC[known], tested.label_N[known])
    assert isinstance(learner.views, Views), "recordings are images"
    feature_N, feature_Q = (
        features(learner.method, learner.views, part, "cpu") for part in (seen, tested)
    )
    label_N, label_Q = (torch.from_numpy(part.label_N) for part in (seen, tested))
    vote = knn_accuracy(feature_Q, label_Q, feature_N, label_N, NEIGHBOURS)
    probe = linear_probe(feature_N, label_N, feature_Q, label_Q, CONVEX)
    return {
        f"{of}knn": vote.accuracy,
        f"{of}knn_balanced": vote.balanced,
        f"{of}linear": probe.accuracy,
        f"{of}linear_balanced": probe.balanced,
        f"{of}queries": len(label_Q),
    }
