"""Class counts and their entropy; plain Python, for processes that have no torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Protocol


class Labels(Protocol):
    """A tensor or an array of class labels, -1 where there is none."""

    def tolist(self) -> list[int]: ...


def class_counts(labels: Labels) -> Mapping[int, int]:
    """How often each class occurs; samples without label (-1) are left out."""
    return Counter(label for label in labels.tolist() if label >= 0)


def entropy(counts: Iterable[float]) -> float:
    """Entropy in nats of the distribution that counts describe; 0 when they are all 0."""
    positive = [count for count in counts if count > 0]
    total = sum(positive)
    return max(0.0, -sum(count / total * math.log(count / total) for count in positive))
