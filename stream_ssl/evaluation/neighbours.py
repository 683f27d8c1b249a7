"""Classification and retrieval by nearest neighbours.

No Q x N matrix is stored: `stream_ssl.memory.index.nearest` searches one block of queries at a
time.

Shapes: Q queries, N references, F features, k neighbours, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stream_ssl.evaluation.checks import Array, as_labels, as_unit_rows, check_width
from stream_ssl.evaluation.scores import ProbeResult, score
from stream_ssl.memory.index import nearest

VOTES = 1 << 24
"""Largest number of votes (queries x classes) in memory at once."""


class Neighbours:
    """The k nearest references of each query by cosine, for several measures with one search.

    The arguments and errors are those of `knn_classify`. `k` is the largest number of neighbours
    that will be used.
    """

    def __init__(self, query_QF: Array, reference_NF: Array, label_N: Array, k: int) -> None:
        query_QF, reference_NF = as_unit_rows(query_QF, "queries"), as_unit_rows(reference_NF)
        check_width(query_QF, reference_NF)
        label_N = as_labels(label_N, reference_NF)
        _check_k(k, len(reference_NF))
        self._cosine_Qk, row_Qk = nearest(query_QF.to(reference_NF), reference_NF, k)
        # Numbers without gaps keep the votes small even if labels are large.
        self._class_C, index_N = torch.unique(label_N, return_inverse=True)
        self._index_Qk = index_N[row_Qk]

    def vote(self, k: int, temperature: float = 0.07) -> Tensor:
        """Return the class of each query, int64 [Q], by a vote of its k nearest references.

        See `knn_classify`.
        """
        _check_k(k, self._cosine_Qk.shape[1])
        if not temperature > 0:
            raise ValueError(f"temperature is {temperature}: must be above 0")
        index_Q = weighted_vote(
            self._cosine_Qk[:, :k], self._index_Qk[:, :k], len(self._class_C), temperature
        )
        class_Q: Tensor = self._class_C[index_Q]
        return class_Q

    def retrieval(self, truth_Q: Tensor, ks: Sequence[int]) -> dict[int, float]:
        """Return top-k retrieval for queries of these classes; see `retrieval`."""
        for k in ks:
            _check_k(k, self._cosine_Qk.shape[1])
        return _hits(self._class_C[self._index_Qk], truth_Q, ks)


def weighted_vote(
    cosine_Qk: Tensor, class_Qk: Tensor, classes: int, temperature: float = 0.07
) -> Tensor:
    """Return the vote of `knn_classify`, int64 [Q].

    The function reads no value on the host, so it does not wait for a device.

    Args:
        cosine_Qk: cosines of the k neighbours of each query, the nearest first.
        class_Qk: classes of the neighbours, numbered from 0.
        classes: number of classes.
        temperature: above 0.
    """
    # Weights are relative to the nearest neighbour, because exp(1 / 0.01) would overflow.
    weight_Qk = ((cosine_Qk - cosine_Qk[:, :1]) / temperature).exp()
    step = max(1, VOTES // classes)
    parts = []
    for class_qk, weight_qk in zip(
        torch.split(class_Qk, step), torch.split(weight_Qk, step), strict=True
    ):
        vote_qC = weight_qk.new_zeros(len(class_qk), classes)
        parts.append(vote_qC.scatter_add_(1, class_qk, weight_qk).argmax(dim=1))
    return torch.cat(parts)


def knn_classify(
    query_QF: Array,
    reference_NF: Array,
    label_N: Array,
    k: int = 200,
    temperature: float = 0.07,
) -> Tensor:
    """Return the class of each query by a weighted vote of its nearest neighbours.

    Wu et al., Unsupervised Feature Learning via Non-Parametric Instance Discrimination, 2018,
    section 3.4. A neighbour i votes for its class with weight exp(cos_i / temperature). A tie goes
    to the lowest class.

    Args:
        query_QF: features of any length; they are normalised.
        reference_NF: features of the labelled references.
        label_N: classes of the references, 0 or more.
        k: number of neighbours, 1 to N.
        temperature: above 0; smaller values give the nearest neighbours more weight.

    Returns:
        The class of each query, int64 [Q].

    Raises:
        ValueError: shapes, labels or arguments do not fit, or there are fewer than k references.
    """
    return Neighbours(query_QF, reference_NF, label_N, k).vote(k, temperature)


def knn_accuracy(
    query_QF: Array,
    query_label_Q: Array,
    reference_NF: Array,
    label_N: Array,
    k: int = 200,
    temperature: float = 0.07,
) -> ProbeResult:
    """Return the accuracy of `knn_classify` on labelled queries, over all queries and by class.

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
    """Return the share of queries with a reference of their class among the k nearest (top-k).

    This is the DUEL paper's second metric (appendix, evaluation metrics; k of 1 and 10). Similarity
    is the cosine.

    Args:
        query_QF: features of the queries.
        query_label_Q: classes of the queries.
        reference_NF: features of the references; None: the other queries.
        label_N: classes of the references; given together with reference_NF.
        ks: values of k, each at most the number of references.

    Returns:
        The share by k, in [0, 1].

    Raises:
        ValueError: shapes or labels do not fit, or there are fewer than k references.
    """
    if (reference_NF is None) != (label_N is None):
        raise ValueError("reference_NF and label_N belong together: pass both, or neither")
    query_QF = as_unit_rows(query_QF, "queries")
    truth_Q = as_labels(query_label_Q, query_QF, "the queries' labels")
    if not ks:
        raise ValueError("ks is empty: name at least one k")
    most = max(ks)
    _check_k(min(ks), most)
    if reference_NF is None or label_N is None:
        _check_k(most, len(query_QF) - 1)
        row_Qk = _others(nearest(query_QF, query_QF, most + 1)[1])
        return _hits(truth_Q[row_Qk], truth_Q, ks)
    return Neighbours(query_QF, reference_NF, label_N, most).retrieval(truth_Q, ks)


def _hits(found_Qk: Tensor, truth_Q: Tensor, ks: Sequence[int]) -> dict[int, float]:
    """Return the share of queries whose class is among the first k found, by k."""
    same_Qk = found_Qk == truth_Q.to(found_Qk.device)[:, None]
    return {k: float(same_Qk[:, :k].any(dim=1).double().mean()) for k in ks}


def _others(row_Qk: Tensor) -> Tensor:
    """Return the neighbours [Q, k] without the query itself, from [Q, k + 1].

    If a query has more than k exact duplicates, it may be missing among its neighbours. The last
    neighbour is then left out.
    """
    self_Qk = row_Qk == torch.arange(len(row_Qk), device=row_Qk.device)[:, None]
    self_Qk[:, -1] |= ~self_Qk.any(dim=1)
    return row_Qk[~self_Qk].reshape(len(row_Qk), -1)


def _check_k(k: int, references: int) -> None:
    if k < 1:
        raise ValueError(f"k is {k}: must be at least 1 neighbour")
    if k > references:
        raise ValueError(
            f"k is {k} and there are {references} references: ask for fewer neighbours, or pass "
            "more references"
        )
