"""A kNN and a linear probe on a held-out labelled set, at regular steps of the learner.

Shapes: B batch, C channels, H height, W width, F features, N references, Q queries, P pictures that
the page shows, n nearest references of each.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import normalize

from stream_ssl import durable
from stream_ssl.bounded_files import read_map
from stream_ssl.evaluation.labelled import Division, Labelled, Reader, balanced
from stream_ssl.evaluation.linear import CONVEX, LinearProbe
from stream_ssl.evaluation.neighbours import knn_classify
from stream_ssl.evaluation.scores import ProbeResult, paired_error, score
from stream_ssl.memory.index import nearest
from stream_ssl.observe.facts import TREND_SECONDS

if TYPE_CHECKING:
    from stream_ssl.feed.decode import Payloads
    from stream_ssl.learning.records import Idle, StepRecord

log = logging.getLogger(__name__)

BATCH = 250
FILE = "held_out.json"
PICTURES, NEAREST = 10, 5
"""The queries whose nearest references the page shows, and the number of these references."""
MOST_BYTES = 4096


@dataclass
class HeldOut:
    """Settings of a kNN and a linear probe on a held-out labelled set.

    Args:
        source: a source of producers.sources, by class_path and init_args. The source must end and
            have labels. Its samples must not be in the stream.
        every: steps between two probes, at least 1.
        k: number of neighbours that vote, at least 1.
        references_per_class: labelled images of each class among which neighbours are searched.
        queries_per_class: images of each class that the probe classifies.

    Raises:
        ValueError: a number is below 1.
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
    """The results of a probe, the step at which it was made, and its duration in seconds.

    `result` is the result of kNN, and `linear` is the accuracy of a linear layer. `rise_error` is
    the standard error of the change of kNN within TREND_SECONDS; None: no earlier probe.
    """

    step: int
    result: ProbeResult
    linear: float
    seconds: float
    rise_error: float | None = None


@dataclass(frozen=True, slots=True)
class Answered:
    """The findings of one probe on the queries.

    Attributes:
        at: monotonic seconds.
        found_Q: the class of each query by kNN.
        near_Pn: the references nearest to the pictures that the page shows, the nearest first.
    """

    at: float
    step: int
    found_Q: Tensor
    near_Pn: Tensor


class HeldOutProbe:
    """A probe that keeps the set as uint8 images and encodes all of it each time.

    Args:
        features: maps uint8 images [B, C, H, W] to features [B, F], in evaluation mode.

    Attributes:
        first: the accuracy at the start of the run; None if it is unknown.
        names: the names of the classes by label; None if the source has none.
        references, queries: the images, and their labels.
        shown_P: the queries whose neighbours the page shows, of as many classes as possible.
        past: what the probes within TREND_SECONDS found, the newest last.

    Raises:
        ValueError: a sample has no label, there is only one class, or there are fewer than k
            references.
    """

    first: float | None = None

    def __init__(
        self, settings: HeldOut, decoder: Payloads, features: Callable[[Tensor], Tensor]
    ) -> None:
        self.settings, self._features = settings, features
        share = settings.queries_per_class / (
            settings.queries_per_class + settings.references_per_class
        )
        division = Division(share, settings.references_per_class, settings.queries_per_class)
        parts: dict[str, list[tuple[NDArray[Any], NDArray[Any]]]] = {"reference": [], "query": []}
        reader = Reader(settings.source, decoder, division, BATCH)
        self.names = reader.class_names
        for batch in reader:
            parts[batch.part].append((batch.image_BHWC, batch.label_B))
        for part, found in parts.items():
            if not found:
                raise ValueError(
                    f"held_out: source {settings.source.name!r} has no {part}; use more "
                    "samples of each class"
                )
        self.references, (image_QCHW, label_Q) = map(_joined, parts.values())
        rows = balanced(label_Q)
        self.queries = image_QCHW[rows], label_Q[rows]
        self.shown_P = _spread(self.queries[1], PICTURES)
        self._rounds: int | None = None  # steps // every at the last step; None: no step yet
        self.past: deque[Answered] = deque()
        self._check()

    def begin(self, folder: Path | None) -> HeldOutRecord:
        """Probe a new run before its first update, and keep the accuracy.

        An encoder without any update is often far above chance. Only the comparison with it shows
        that a run learns.

        Args:
            folder: the run's folder, in which a file keeps the accuracy; None: no file.
        """
        record = self.probe(0)
        self.first = record.result.accuracy
        if folder is not None:
            try:
                durable.write(folder / FILE, json.dumps({**self._set(), "accuracy": self.first}))
            except OSError as error:
                log.warning("%s; a restart will not know the accuracy at the start", error)
        return record

    def resume(self, folder: Path) -> None:
        """Read the accuracy at the start of this run, if it was measured on this set."""
        try:
            saved = read_map(folder / FILE, MOST_BYTES)
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            log.warning("%s; the accuracy at the start of the run is unknown", error)
            return
        accuracy, due = saved.pop("accuracy", None), self._set()
        saved = {"digest": due["digest"], **saved}  # older files have none
        if saved == due and type(accuracy) in (int, float) and 0 <= accuracy <= 1:
            self.first = float(accuracy)

    def _set(self) -> dict[str, Any]:
        """Return what must be equal for two accuracies to be comparable, as JSON."""
        numbers = {"references": len(self.references[1]), "queries": len(self.queries[1])}
        source, digest = self.settings.source.name, _digest(*self.references, *self.queries)
        return {"source": source, "digest": digest, "k": self.settings.k, **numbers}

    def consume(self, record: StepRecord | Idle) -> HeldOutRecord | None:
        """Probe after every `settings.every` steps; return None at all other steps."""
        step, every = getattr(record, "step", 0), self.settings.every
        if not step:
            return None
        before = (step - 1) // every if self._rounds is None else self._rounds
        self._rounds = step // every
        return self.probe(step) if self._rounds > before else None

    def probe(self, step: int) -> HeldOutRecord:
        """Encode and classify the set now, and log the accuracy."""
        begun = time.monotonic()
        (reference_NCHW, label_N), (query_QCHW, label_Q) = self.references, self.queries
        feature_NF, feature_QF = map(self._encode, (reference_NCHW, query_QCHW))
        if not bool(torch.isfinite(feature_NF).all() and torch.isfinite(feature_QF).all()):
            log.warning("step %d: the features of the held-out set are not finite", step)
            feature_NF, feature_QF = feature_NF.nan_to_num(), feature_QF.nan_to_num()
        found_Q = knn_classify(feature_QF, feature_NF, label_N, self.settings.k)
        unit_NF, unit_PF = normalize(feature_NF), normalize(feature_QF[self.shown_P])
        near_Pn = nearest(unit_PF, unit_NF, min(NEAREST, len(unit_NF)))[1]
        error = self._rise_error(Answered(begun, step, found_Q, near_Pn))
        result = score(found_Q, label_Q)
        linear_Q = LinearProbe(feature_NF, label_N, CONVEX).predict(feature_QF)
        linear = score(linear_Q, label_Q).accuracy
        record = HeldOutRecord(step, result, linear, time.monotonic() - begun, error)
        log.info(
            "step %d: accuracy on the held-out set: kNN %.1f %%, linear %.1f %% (%.1f s)",
            step,
            100 * result.accuracy,
            100 * linear,
            record.seconds,
        )
        return record

    def _rise_error(self, newest: Answered) -> float | None:
        """Keep the newest answers, and return the standard error of the change of accuracy.

        It compares the two answers to each query, now and up to TREND_SECONDS ago. Most queries get
        the same answer again, so it is smaller than the error for two independent sets of queries.
        """
        past = self.past
        while len(past) > 1 and past[1].at <= newest.at - TREND_SECONDS:
            past.popleft()
        past.append(newest)
        if len(past) == 1:
            return None
        before_Q, now_Q = (answered.found_Q == self.queries[1] for answered in (past[0], newest))
        return paired_error(before_Q, now_Q)

    def _encode(self, image_NCHW: Tensor) -> Tensor:
        with torch.inference_mode():
            parts = [self._features(part).float().cpu() for part in torch.split(image_NCHW, BATCH)]
        return torch.cat(parts)

    def _check(self) -> None:
        name = self.settings.source.name
        classes = set(self.queries[1].tolist())
        references = len(self.references[1])
        if len(classes) < 2:
            raise ValueError(
                f"held_out: source {name!r} has only class {min(classes)}; use at least two classes"
            )
        if self.settings.k > references:
            raise ValueError(
                f"held_out: {references} references of source {name!r} are fewer "
                f"than k = {self.settings.k}; use more references, or a smaller k"
            )


def _joined(parts: list[tuple[NDArray[Any], NDArray[Any]]]) -> tuple[Tensor, Tensor]:
    image_NHWC = np.concatenate([image for image, _ in parts])
    label_N = np.concatenate([label for _, label in parts])
    return torch.from_numpy(image_NHWC).permute(0, 3, 1, 2), torch.from_numpy(label_N)


def _digest(*parts: Tensor) -> str:
    """Return a digest of the numbers in these tensors."""
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        for rows in torch.split(part, BATCH):  # a copy of all rows may be large
            found.update(rows.numpy().tobytes())
    return found.hexdigest()


def _spread(label_Q: Tensor, count: int) -> Tensor:
    """Return the rows of at most `count` queries, evenly spaced in the order of their classes."""
    order_Q = torch.argsort(label_Q, stable=True)
    count = min(count, len(order_Q))
    return order_Q[(torch.arange(count) * len(order_Q)) // count]
