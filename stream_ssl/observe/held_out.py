"""A kNN probe on a held-out labelled set, every so many steps while learning goes on.

Shapes: B batch, C channels, H height, W width, F features, N references, Q queries.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stream_ssl.evaluation.labelled import Division, Labelled, Reader, balanced
from stream_ssl.evaluation.neighbours import knn_accuracy
from stream_ssl.evaluation.scores import ProbeResult

if TYPE_CHECKING:
    from stream_ssl.feed.decode import Payloads
    from stream_ssl.learning.records import Idle, StepRecord

log = logging.getLogger(__name__)

BATCH = 250


@dataclass
class HeldOut:
    """A kNN probe on a held-out labelled set, every so many steps.

    Args:
        source: one of producers.sources, by class_path and init_args; it must end, carry labels,
            and give samples that the stream does not carry.
        every: steps between two probes.
        k: neighbours that vote.
        references_per_class: labelled neighbours that are sought among.
        queries_per_class: samples whose class must be found; as many of each.
    """

    source: Labelled
    every: int = 500
    k: int = 20
    references_per_class: int = 200
    queries_per_class: int = 100

    def __post_init__(self) -> None:
        for name in ("every", "k", "references_per_class", "queries_per_class"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)}: must be at least 1")


@dataclass(frozen=True, slots=True)
class HeldOutRecord:
    """What a probe found, at which step, and how long it took."""

    step: int
    result: ProbeResult
    seconds: float


class HeldOutProbe:
    """Keeps the set as uint8 images, and encodes all of it at each probe.

    Args:
        settings: what is probed, and when.
        decoder: of the run.
        features: features [B, F] of uint8 images [B, C, H, W], in evaluation mode.

    Raises:
        ValueError: a sample without label, one class only, or fewer than k references.
    """

    def __init__(
        self, settings: HeldOut, decoder: Payloads, features: Callable[[Tensor], Tensor]
    ) -> None:
        self.settings, self._features = settings, features
        share = settings.queries_per_class / (
            settings.queries_per_class + settings.references_per_class
        )
        division = Division(share, settings.references_per_class, settings.queries_per_class)
        parts: dict[str, list[tuple[NDArray[Any], NDArray[Any]]]] = {"reference": [], "query": []}
        for batch in Reader(settings.source, decoder, division, BATCH):
            parts[batch.part].append((batch.image_BHWC, batch.label_B))
        for part, found in parts.items():
            if not found:
                raise ValueError(
                    f"held_out: source {settings.source.name!r} gave no {part}; give more samples "
                    "of each class"
                )
        (self._reference_NCHW, self._label_N), (image_QCHW, label_Q) = map(_joined, parts.values())
        rows = balanced(label_Q)
        self._query_QCHW, self._label_Q = image_QCHW[rows], label_Q[rows]
        self._check()

    def consume(self, record: StepRecord | Idle) -> HeldOutRecord | None:
        """Probe when a step asks for it."""
        step = getattr(record, "step", 0)
        return self.probe(step) if step and step % self.settings.every == 0 else None

    def probe(self, step: int) -> HeldOutRecord:
        """Encode and classify now."""
        begun = time.monotonic()
        feature_NF, feature_QF = map(self._encode, (self._reference_NCHW, self._query_QCHW))
        if not bool(torch.isfinite(feature_NF).all() and torch.isfinite(feature_QF).all()):
            log.warning("step %d: the features of the held-out set are not finite", step)
            feature_NF, feature_QF = feature_NF.nan_to_num(), feature_QF.nan_to_num()
        result = knn_accuracy(feature_QF, self._label_Q, feature_NF, self._label_N, self.settings.k)
        record = HeldOutRecord(step, result, time.monotonic() - begun)
        log.info(
            "step %d: kNN accuracy %.1f %% on the held-out set (%.1f s)",
            step,
            100 * result.accuracy,
            record.seconds,
        )
        return record

    def _encode(self, image_NCHW: Tensor) -> Tensor:
        with torch.inference_mode():
            parts = [self._features(part).float().cpu() for part in torch.split(image_NCHW, BATCH)]
        return torch.cat(parts)

    def _check(self) -> None:
        name = self.settings.source.name
        classes = set(self._label_Q.tolist())
        if len(classes) < 2:
            raise ValueError(
                f"held_out: source {name!r} has class {min(classes)} alone; give at least two"
            )
        if self.settings.k > len(self._label_N):
            raise ValueError(
                f"held_out: {len(self._label_N)} references of source {name!r} are fewer than k = "
                f"{self.settings.k}; give more, or a smaller k"
            )


def _joined(parts: list[tuple[NDArray[Any], NDArray[Any]]]) -> tuple[Tensor, Tensor]:
    image_NHWC = np.concatenate([image for image, _ in parts])
    label_N = np.concatenate([label for _, label in parts])
    return torch.from_numpy(image_NHWC).permute(0, 3, 1, 2), torch.from_numpy(label_N)
