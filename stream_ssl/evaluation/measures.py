"""All measures of one encoder's features.

Shapes: N references, Q queries, F features, C classes, T tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stream_ssl.evaluation.encoding import Encoded
from stream_ssl.evaluation.geometry import (
    ClassSimilarity,
    alignment,
    class_similarity,
    rank_me,
    uniformity,
)
from stream_ssl.evaluation.linear import PROBES, LinearProbe
from stream_ssl.evaluation.neighbours import Neighbours
from stream_ssl.evaluation.scores import ProbeResult, confusion, score

RETRIEVED = (1, 10)
"""The values of k in the DUEL paper."""

MOST_CONFUSED = 1000
"""The most classes of a confusion, which needs memory for each pair of classes."""

Tell = Callable[[str, int, int], None]
"""Progress callback: (stage, parts done, total parts)."""


@dataclass(frozen=True)
class Measures:
    """The quality and the geometry of one encoder's features.

    Attributes:
        knn: results of weighted nearest neighbours, by k.
        linear: results of linear probes, by the name of their settings.
        retrieval: share of queries with a reference of their class among the k nearest, by k.
        similarity, alignment, uniformity, rank_me: geometry of the queries' features.
        dim: F, the number of features.
        confusion_CC: number of queries by true class (row) and predicted class (column), for the
            largest k. None with more than MOST_CONFUSED classes.
        classes: the C classes, in order of the confusion's rows.
    """

    knn: Mapping[int, ProbeResult]
    linear: Mapping[str, ProbeResult]
    retrieval: Mapping[int, float]
    similarity: ClassSimilarity
    alignment: float
    uniformity: float
    rank_me: float
    dim: int
    confusion_CC: Tensor | None
    classes: tuple[int, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the measures as plain values."""
        return {
            "knn": {str(k): _json(result) for k, result in self.knn.items()},
            "linear": {name: _json(result) for name, result in self.linear.items()},
            "retrieval": {str(k): value for k, value in self.retrieval.items()},
            "intra_class_similarity": self.similarity.intra,
            "inter_class_similarity": self.similarity.inter,
            "intra_class_similarity_by_class": _named(self.similarity.per_class),
            "alignment": self.alignment,
            "uniformity": self.uniformity,
            "rank_me": self.rank_me,
            "dim": self.dim,
            "classes": list(self.classes),
            "confusion": None if self.confusion_CC is None else self.confusion_CC.tolist(),
        }


def check(encoded: Encoded, ks: Sequence[int]) -> None:
    """Check that a labelled set can be measured, before anything expensive is computed.

    Raises:
        ValueError: there is only one class, or a class has queries but no references. Or there are
            fewer references than neighbours, or each class has only one query in a balanced test.
    """
    references, queries = (set(label.tolist()) for label in (encoded.label_N, encoded.label_Q))
    if len(queries) < 2:
        raise ValueError(
            f"all queries are of class {min(queries)}: accuracy and similarity compare classes; "
            "give a set of at least two"
        )
    if missing := sorted(queries - references):
        raise ValueError(
            f"queries are of classes {missing[:10]} that no reference has; give references of the "
            "same classes"
        )
    count = len(encoded.label_N)
    if max(RETRIEVED) > count:
        raise ValueError(
            f"{count} references are too few for retrieval of the {max(RETRIEVED)} nearest; give "
            "more"
        )
    if max(ks) > count:
        raise ValueError(
            f"{count} references are fewer than k = {max(ks)}: give more references, or ask for "
            "fewer neighbours with --k"
        )
    if len(encoded.label_Q) <= len(queries):
        raise ValueError(
            f"{len(encoded.label_Q)} queries of {len(queries)} classes: the rarest class has one, "
            "and a balanced test takes no more of the others; give at least two of each"
        )


def measure(
    encoded: Encoded,
    ks: Sequence[int] = (20, 200),
    probes: Sequence[str] = ("duel", "debiased"),
    device: str = "cpu",
    tell: Tell | None = None,
) -> Measures:
    """Return all measures of one encoder's features.

    Args:
        ks: numbers of neighbours of the kNN probe.
        probes: names in `linear.PROBES`.

    Raises:
        ValueError: see `check`.
    """
    check(encoded, ks)
    say = tell or (lambda *_: None)
    reference_NF, label_N = encoded.reference_NF.to(device), encoded.label_N.to(device)
    query_QF, label_Q = encoded.query_QF.to(device), encoded.label_Q.to(device)
    say("nearest neighbours", 0, 1)
    near = Neighbours(query_QF, reference_NF, label_N, max([*ks, *RETRIEVED]))
    knn = {k: score(near.vote(k), label_Q) for k in sorted(set(ks))}
    predicted_Q = near.vote(max(ks))
    linear = {}
    for name in probes:
        what = f"linear probe, {name}"
        layer = LinearProbe(
            reference_NF,
            label_N,
            PROBES[name],
            lambda done, total, what=what: say(what, done, total),  # type: ignore[misc]
        )
        linear[name] = score(layer.predict(query_QF), label_Q)
    say("geometry", 0, 1)
    classes = torch.unique(torch.cat([label_N, label_Q]))
    place_Q, truth_Q = (torch.searchsorted(classes, x) for x in (predicted_Q, label_Q))
    return Measures(
        knn,
        linear,
        near.retrieval(label_Q, RETRIEVED),
        class_similarity(query_QF, label_Q),
        alignment(encoded.view_QF, encoded.other_QF),
        uniformity(query_QF),
        rank_me(query_QF),
        query_QF.shape[1],
        confusion(place_Q, truth_Q, len(classes)) if len(classes) <= MOST_CONFUSED else None,
        tuple(classes.tolist()),
    )


def task_accuracies(per_class: Mapping[int, float], tasks: Sequence[Sequence[int]]) -> list[float]:
    """Return the accuracy on each task [T], in a test with equally many queries of each class.

    Raises:
        ValueError: a task has a class without queries.
    """
    missing = [label for task in tasks for label in task if label not in per_class]
    if missing:
        raise ValueError(
            f"tasks name the classes {missing[:10]}, which no query has: choose from "
            f"{sorted(per_class)[:20]}"
        )
    return [sum(per_class[label] for label in task) / len(task) for task in tasks]


def _json(result: ProbeResult) -> dict[str, Any]:
    return {
        "accuracy": result.accuracy,
        "standard_error": result.error,
        "per_class": _named(result.per_class),
        "queries": result.queries,
    }


def _named(values: Mapping[int, float]) -> dict[str, float]:
    return {str(label): value for label, value in values.items()}
