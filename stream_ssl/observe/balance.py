"""The balance of the stream, by its labels and by its embeddings.

Shapes: B batch, D embedding.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stream_ssl.memory.stats import spectral_rank

if TYPE_CHECKING:
    from stream_ssl.learning.records import StepRecord

MOST_CLASSES = 4096
"""The most recent classes with a count of their own. Further classes count as BEYOND."""
BEYOND = -1
FORGOTTEN = 1e-3
"""A class is removed from the recent classes if its weight is below this."""


def class_counts(labels: Tensor) -> Mapping[int, int]:
    """Return how often each class occurs. Samples without a label (-1) are left out."""
    return Counter(label for label in labels.tolist() if label >= 0)


def entropy(counts: Iterable[float]) -> float:
    """Return the entropy of the distribution of these counts, in nats; 0 if all are 0."""
    positive = [count for count in counts if count > 0]
    total = sum(positive)
    return max(0.0, -sum(count / total * math.log(count / total) for count in positive))


class Balance:
    """The running balance of the stream that the learner trains on.

    Args:
        half_life: number of samples after which a sample has half its weight.

    Attributes:
        recent: the weights of the recent classes, by label.
    """

    def __init__(self, half_life: float = 20_000.0) -> None:
        self.half_life = half_life
        self.recent: dict[int, float] = {}
        self._new: Counter[int] = Counter()
        self._moment_DD: Tensor | None = None

    def consume(self, record: StepRecord) -> None:
        """Take one step.

        Replays, and keys that were not offered to the memory, do not count as part of the stream.
        """
        if record.admission is not None:
            self.update(record.keys_BD, record.labels_B)

    def update(self, keys_BD: Tensor, labels_B: Tensor) -> None:
        """Take a batch of unit-norm rows and their class labels, -1 for no label."""
        decay = 0.5 ** (len(keys_BD) / self.half_life)
        moment_DD = keys_BD.float().T @ keys_BD.float()
        if self._moment_DD is None:
            self._moment_DD = torch.zeros_like(moment_DD)
        self._moment_DD.mul_(decay).add_(moment_DD)
        self.recent = {
            label: left
            for label, count in self.recent.items()
            if (left := count * decay) >= FORGOTTEN
        }
        for label, count in class_counts(labels_B).items():
            known = label in self.recent or len(self.recent) < MOST_CLASSES
            label = label if known else BEYOND
            self._new[label] += count
            self.recent[label] = self.recent.get(label, 0.0) + count

    @property
    def effective_rank(self) -> float | None:
        """The effective rank of the embeddings of the recent stream; None before the first batch.

        It is not a number of classes, because a contrastive encoder spreads a frequent class over
        many directions; see docs/numbers.md. It costs O(D^3), a few milliseconds, so do not read it
        at every step.
        """
        return None if self._moment_DD is None else spectral_rank(self._moment_DD)

    @property
    def class_entropy(self) -> float:
        """The entropy of the recent labels in nats; 0 without labels."""
        return entropy(self.recent.values())

    def take_new(self) -> Mapping[int, int]:
        """Return the number of labelled samples since the last call, by class."""
        new, self._new = self._new, Counter()
        return new
