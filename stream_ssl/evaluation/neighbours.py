"""What the nearest neighbours tell: classification by their vote, and retrieval.

No Q x N matrix is ever held: `memory.nearest` searches a block of queries at a time.

Shapes: Q queries, N references, F features, k neighbours, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from memory.nearest import nearest
from stream_ssl.evaluation.checks import Array, as_labels, as_unit_rows, check_width
from stream_ssl.evaluation.scores import ProbeResult, score

VOTES = 1 << 24
"""Most votes (queries x classes) held at once."""


def knn_classify(
    query_QF: Array,
    reference_NF: Array,
    label_N: Array,
    k: int = 200,
    temperature: float = 0.07,
) -> Tensor:
    """Weighted nearest neighbours (Wu et al., Unsupervised Feature Learning via Non-Parametric
    Instance Discrimination, 2018, section 3.4).

    A neighbour i votes for its class with weight exp(cos_i / temperature). Ties go to the lowest
    class.

    Args:
        query_QF: features of any length; they are normalised.
        reference_NF: features of the labelled references.
        label_N: their classes, 0 or more.
        k: neighbours asked, 1 to N.
        temperature: above 0; smaller lets the nearest decide.

    Returns:
        The class of each query, int64 [Q].

    Raises:
        ValueError: shapes, labels or arguments that do not fit; fewer than k references.
    """
    query_QF, reference_NF = as_unit_rows(query_QF, "queries"), as_unit_rows(reference_NF)
    check_width(query_QF, reference_NF)
    label_N = as_labels(label_N, reference_NF)
    _check_k(k, len(reference_NF))
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}: must be above 0")
    cosine_Qk, row_Qk = nearest(query_QF.to(reference_NF), reference_NF, k)
    # Relative to the nearest: exp(1 / 0.07) would still fit, exp(1 / 0.01) would not.
    weight_Qk = ((cosine_Qk - cosine_Qk[:, :1]) / temperature).exp()
    classes = int(label_N.max()) + 1
    parts = []
    for row_qk, weight_qk in zip(*(_parts(x, classes) for x in (row_Qk, weight_Qk)), strict=True):
        vote_qC = weight_qk.new_zeros(len(row_qk), classes)
        parts.append(vote_qC.scatter_add_(1, label_N[row_qk], weight_qk).argmax(dim=1))
    return torch.cat(parts)


def knn_accuracy(
    query_QF: Array,
    query_label_Q: Array,
    reference_NF: Array,
    label_N: Array,
    k: int = 200,
    temperature: float = 0.07,
) -> ProbeResult:
    """Accuracy of `knn_classify` on labelled queries, over all and by class.

    >>> knn_accuracy(torch.eye(2), torch.tensor([0, 1]), torch.eye(2), torch.tensor([0, 0]), k=1)
    ProbeResult(accuracy=0.5, per_class={0: 1.0, 1: 0.0}, queries=2)
    """
    predicted_Q = knn_classify(query_QF, reference_NF, label_N, k, temperature)
    truth_Q = as_labels(query_label_Q, predicted_Q, "the queries' labels")
    return score(predicted_Q, truth_Q)


def retrieval(
    query_QF: Array,
    query_label_Q: Array,
    reference_NF: Array | None = None,
    label_N: Array | None = None,
    ks: Sequence[int] = (1, 10),
) -> dict[int, float]:
    """Top-k retrieval: share of queries with one of their class among the k nearest references.

    The DUEL paper's second metric (appendix, evaluation metrics; k of 1 and 10). By cosine.

    Args:
        query_QF: features of the queries.
        query_label_Q: their classes.
        reference_NF: features searched; None: the other queries, each query without itself.
        label_N: their classes; given with reference_NF.
        ks: the k asked for, each at most the number of references.

    Returns:
        By k, in [0, 1].

    Raises:
        ValueError: shapes or labels that do not fit, or fewer than k references.
    """
    if (reference_NF is None) != (label_N is None):
        raise ValueError("reference_NF and label_N belong together: pass both, or neither")
    query_QF = as_unit_rows(query_QF, "queries")
    truth_Q = as_labels(query_label_Q, query_QF, "the queries' labels")
    if not ks:
        raise ValueError("ks is empty: name at least one k")
    most = max(ks)
    if reference_NF is None or label_N is None:
        label_N = truth_Q
        _check_k(min(ks), len(query_QF) - 1)
        _check_k(most, len(query_QF) - 1)
        row_Qk = _others(nearest(query_QF, query_QF, most + 1)[1])
    else:
        reference_NF = as_unit_rows(reference_NF)
        check_width(query_QF, reference_NF)
        label_N = as_labels(label_N, reference_NF)
        _check_k(min(ks), len(reference_NF))
        _check_k(most, len(reference_NF))
        row_Qk = nearest(query_QF.to(reference_NF), reference_NF, most)[1]
    same_Qk = label_N[row_Qk] == truth_Q.to(label_N.device)[:, None]
    return {k: float(same_Qk[:, :k].any(dim=1).double().mean()) for k in ks}


def _others(row_Qk: Tensor) -> Tensor:
    """[Q, k + 1] neighbours to [Q, k], without the query itself wherever it stands.

    Among more than k exact copies it may not stand there at all; the last is then left out.
    """
    self_Qk = row_Qk == torch.arange(len(row_Qk), device=row_Qk.device)[:, None]
    self_Qk[:, -1] |= ~self_Qk.any(dim=1)
    return row_Qk[~self_Qk].reshape(len(row_Qk), -1)


def _parts(x_Qk: Tensor, classes: int) -> tuple[Tensor, ...]:
    return torch.split(x_Qk, max(1, VOTES // classes))


def _check_k(k: int, references: int) -> None:
    if k < 1:
        raise ValueError(f"k is {k}: at least 1 neighbour is asked")
    if k > references:
        raise ValueError(
            f"k is {k} and there are {references} references: ask fewer neighbours, or pass more "
            "references"
        )
