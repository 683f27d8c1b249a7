"""What the features are worth: classification by the labels of their nearest neighbours.

Shapes: Q queries, N references, F features, k neighbours, C classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Share of queries classified as labelled, each in [0, 1]."""

    accuracy: float
    per_class: dict[int, float]  # classes that occur among the queries
    queries: int

    @property
    def balanced(self) -> float:
        """Mean over the classes: what a test with equally many of each would give."""
        return sum(self.per_class.values()) / len(self.per_class)


def classify(
    query_QF: Tensor,
    reference_NF: Tensor,
    label_N: Tensor,
    k: int = 200,
    temperature: float = 0.07,
    chunk: int = 1024,
) -> Tensor:
    """Weighted nearest neighbours (Wu et al., Unsupervised Feature Learning via Non-Parametric
    Instance Discrimination, 2018, section 3.4).

    A neighbour i votes for its class with weight exp(cos_i / temperature). Ties go to the lowest
    class.

    Args:
        query_QF: features of any length; they are normalised.
        reference_NF: features of the labelled references.
        label_N: their classes, 0 or more.
        k: neighbours asked; all references when there are fewer.
        temperature: smaller lets the nearest decide.
        chunk: queries at once: chunk x N similarities are held.

    Returns:
        The class of each query, int64 [Q].

    Raises:
        ValueError: shapes, labels or arguments that do not fit.
    """
    _check(query_QF, reference_NF, label_N, k, temperature)
    wide = torch.promote_types(query_QF.dtype, torch.float32)  # bfloat16 has too few digits
    reference_FN = normalize(reference_NF.to(wide), dim=1).T
    label_N = label_N.to(reference_NF.device)
    classes = int(label_N.max()) + 1
    k = min(k, len(label_N))
    predicted = []
    for part_qF in torch.split(query_QF, chunk):
        cosine_qk, index_qk = (normalize(part_qF.to(wide), dim=1) @ reference_FN).topk(k, dim=1)
        # Relative to the nearest: exp(1 / 0.07) would still fit, exp(1 / 0.01) would not.
        weight_qk = ((cosine_qk - cosine_qk[:, :1]) / temperature).exp()
        vote_qC = weight_qk.new_zeros(len(part_qF), classes)
        vote_qC.scatter_add_(1, label_N[index_qk], weight_qk)
        predicted.append(vote_qC.argmax(dim=1))
    return torch.cat(predicted)


def probe(
    query_QF: Tensor,
    query_label_Q: Tensor,
    reference_NF: Tensor,
    label_N: Tensor,
    k: int = 200,
    temperature: float = 0.07,
    chunk: int = 1024,
) -> ProbeResult:
    """Accuracy of `classify` on labelled queries, over all and by class."""
    if query_label_Q.shape != query_QF.shape[:1]:
        raise ValueError(
            f"query_label_Q has shape {list(query_label_Q.shape)}; one label a query is due: "
            f"[{len(query_QF)}]"
        )
    predicted_Q = classify(query_QF, reference_NF, label_N, k, temperature, chunk)
    query_label_Q = query_label_Q.to(predicted_Q.device)
    right_Q = predicted_Q == query_label_Q
    per_class = {
        label: float(right_Q[query_label_Q == label].double().mean())
        for label in sorted(set(query_label_Q.tolist()))
    }
    return ProbeResult(float(right_Q.double().mean()), per_class, len(query_QF))


def _check(
    query_QF: Tensor, reference_NF: Tensor, label_N: Tensor, k: int, temperature: float
) -> None:
    if query_QF.ndim != 2 or reference_NF.ndim != 2 or query_QF.shape[1] != reference_NF.shape[1]:
        raise ValueError(
            f"queries {list(query_QF.shape)} and references {list(reference_NF.shape)} must be "
            f"[Q, F] and [N, F] with the same F"
        )
    if not len(query_QF) or not len(reference_NF):
        raise ValueError("at least one query and one reference are needed")
    if label_N.shape != reference_NF.shape[:1] or label_N.dtype != torch.int64:
        raise ValueError(
            f"label_N must be int64 [{len(reference_NF)}], one a reference; got {label_N.dtype} "
            f"{list(label_N.shape)}"
        )
    if int(label_N.min()) < 0:
        raise ValueError("references without label (-1) cannot vote; leave them out")
    if k < 1 or not temperature > 0:
        raise ValueError(f"k must be 1 or more, temperature above 0; got {k} and {temperature}")
    if not bool(torch.isfinite(query_QF).all() and torch.isfinite(reference_NF).all()):
        raise ValueError("features are not finite; the encoder that made them has diverged")
