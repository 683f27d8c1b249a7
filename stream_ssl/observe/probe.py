"""What the features are worth: classification by the labels of their nearest neighbours.

The measure is `stream_ssl.evaluation`'s; here it takes as few references as a young run has.

Shapes: Q queries, N references, F features, k neighbours.
"""

from __future__ import annotations

from torch import Tensor

from stream_ssl.evaluation.neighbours import knn_classify
from stream_ssl.evaluation.scores import ProbeResult, score

__all__ = ["ProbeResult", "classify", "probe"]


def classify(
    query_QF: Tensor,
    reference_NF: Tensor,
    label_N: Tensor,
    k: int = 200,
    temperature: float = 0.07,
) -> Tensor:
    """The class of each query, int64 [Q], as `knn_classify`; all references where they are fewer
    than k."""
    return knn_classify(query_QF, reference_NF, label_N, min(k, len(reference_NF)), temperature)


def probe(
    query_QF: Tensor,
    query_label_Q: Tensor,
    reference_NF: Tensor,
    label_N: Tensor,
    k: int = 200,
    temperature: float = 0.07,
) -> ProbeResult:
    """Accuracy of `classify` on labelled queries, over all and by class."""
    if query_label_Q.shape != query_QF.shape[:1]:
        raise ValueError(
            f"query_label_Q has shape {list(query_label_Q.shape)}; one label a query is due: "
            f"[{len(query_QF)}]"
        )
    return score(classify(query_QF, reference_NF, label_N, k, temperature), query_label_Q)
