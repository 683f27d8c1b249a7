"""How balanced the stream is: by its labels where it has some, by its embeddings always.

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
"""Labels that are told apart; those that are met when there are so many count as one, BEYOND."""
BEYOND = -1
FORGOTTEN = 1e-3
"""Weight below which a class no longer counts among the recent ones."""


def class_counts(labels: Tensor) -> Mapping[int, int]:
    """How often each class occurs; samples without label (-1) are left out."""
    return Counter(label for label in labels.tolist() if label >= 0)


def entropy(counts: Iterable[float]) -> float:
    """Entropy in nats of the distribution that counts describe; 0 when they are all 0."""
    positive = [count for count in counts if count > 0]
    total = sum(positive)
    return max(0.0, -sum(count / total * math.log(count / total) for count in positive))


class Balance:
    """Running balance of the stream that the learner trains on.

    Args:
        half_life: samples after which one counts half as much in what is said of the recent
            stream.
    """

    def __init__(self, half_life: float = 20_000.0) -> None:
        if not half_life > 0:
            raise ValueError(f"half_life must be more than 0 samples; got {half_life}")
        self.half_life = half_life
        self.recent: dict[int, float] = {}
        self._new: Counter[int] = Counter()
        self._moment_DD: Tensor | None = None

    def consume(self, record: StepRecord) -> None:
        """Take the keys and labels of a fresh batch; replays, and keys that the memory did not
        take, say nothing of the stream."""
        if record.admission is not None:
            self.update(record.keys_BD, record.labels_B)

    def update(self, keys_BD: Tensor, labels_B: Tensor) -> None:
        """Take a batch: unit-norm rows, and class labels with -1 where there is none."""
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
    def effective_rank(self) -> float:
        """Of the recent stream, from its embeddings; 0 before the first. A contrastive encoder
        spreads a frequent class over many directions, so that it is no number of classes; see
        docs/numbers.md. Costs O(D^3): a few milliseconds, so ask now and then."""
        return 0.0 if self._moment_DD is None else spectral_rank(self._moment_DD)

    @property
    def class_entropy(self) -> float:
        """Entropy in nats of the recent labels; 0 when there are none."""
        return entropy(self.recent.values())

    def take_new(self) -> Mapping[int, int]:
        """Labelled samples by class since the call before."""
        new, self._new = self._new, Counter()
        return new
