"""Scores that compare predictions with true classes.

Shapes: Q queries, C classes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The share of queries that are classified correctly, in [0, 1]."""

    accuracy: float
    per_class: dict[int, float]  # only classes that occur among the queries
    queries: int

    @property
    def balanced(self) -> float:
        """The mean accuracy over the classes, as if each class had equally many queries."""
        return sum(self.per_class.values()) / len(self.per_class)

    @property
    def error(self) -> float:
        """The standard error of `accuracy` for this number of queries: sqrt(p (1 - p) / Q)."""
        return math.sqrt(self.accuracy * (1 - self.accuracy) / self.queries)


def score(predicted_Q: Tensor, label_Q: Tensor) -> ProbeResult:
    """Return the accuracy over all queries and by class.

    Args:
        predicted_Q: predicted classes, int64, Q at least 1.
        label_Q: true classes, int64.
    """
    label_Q = label_Q.to(predicted_Q.device)
    right_Q = (predicted_Q == label_Q).double()
    found_C, index_Q, count_C = torch.unique(label_Q, return_inverse=True, return_counts=True)
    share_C = torch.bincount(index_Q, right_Q) / count_C
    per_class = dict(zip(found_C.tolist(), share_C.tolist(), strict=True))
    return ProbeResult(float(right_Q.mean()), per_class, len(label_Q))


def paired_error(before_Q: Tensor, after_Q: Tensor) -> float:
    """Return the standard error of the change of accuracy between two answers to each query.

    Args:
        before_Q, after_Q: whether each query was classified correctly, bool.

    >>> paired_error(torch.tensor([True, False]), torch.tensor([True, True]))  # [0, 1] / sqrt(2)
    0.3535533905932738
    """
    change_Q = after_Q.double() - before_Q.double()
    return math.sqrt(float(change_Q.var(correction=0)) / len(change_Q))


def confusion(predicted_Q: Tensor, label_Q: Tensor, classes: int) -> Tensor:
    """Return the number of queries by true class (row) and predicted class (column), int64 [C, C].

    Raises:
        ValueError: a class is outside [0, classes).

    >>> confusion(torch.tensor([0, 1, 1]), torch.tensor([0, 0, 1]), 2).tolist()
    [[1, 1], [0, 1]]
    """
    predicted_Q, label_Q = predicted_Q.cpu(), label_Q.cpu()
    both = torch.cat([predicted_Q, label_Q])
    if len(both) and not 0 <= int(both.min()) <= int(both.max()) < classes:
        raise ValueError(
            f"classes from {int(both.min())} to {int(both.max())} do not lie in [0, {classes})"
        )
    cell_Q = label_Q * classes + predicted_Q
    return torch.bincount(cell_Q, minlength=classes * classes).reshape(classes, classes)
