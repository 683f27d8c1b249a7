"""Measures of the quality of features: pure functions of features and labels, torch or numpy.

    from stream_ssl.evaluation import knn_accuracy, linear_probe, retrieval

Each function names its source. `docs/evaluation.md` explains when to use which.
"""

from stream_ssl.evaluation.continual import (
    ContinualResult,
    average_accuracy,
    backward_transfer,
    forgetting,
    forward_transfer,
    recovered_gain,
    recovered_share,
    summarise,
)
from stream_ssl.evaluation.geometry import (
    ClassSimilarity,
    alignment,
    class_similarity,
    pair_similarities,
    rank_me,
    uniformity,
)
from stream_ssl.evaluation.linear import (
    CONVEX,
    DEBIASED,
    DUEL,
    LinearProbe,
    LinearSettings,
    linear_probe,
)
from stream_ssl.evaluation.neighbours import knn_accuracy, knn_classify, retrieval
from stream_ssl.evaluation.scores import ProbeResult, confusion, score

__all__ = [
    "CONVEX",
    "DEBIASED",
    "DUEL",
    "ClassSimilarity",
    "ContinualResult",
    "LinearProbe",
    "LinearSettings",
    "ProbeResult",
    "alignment",
    "average_accuracy",
    "backward_transfer",
    "class_similarity",
    "confusion",
    "forgetting",
    "forward_transfer",
    "knn_accuracy",
    "knn_classify",
    "linear_probe",
    "pair_similarities",
    "rank_me",
    "recovered_gain",
    "recovered_share",
    "retrieval",
    "score",
    "summarise",
    "uniformity",
]
