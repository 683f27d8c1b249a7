"""A test-then-train probe: how well the embeddings predict the stream's own labels.

Shapes: B samples, D embedding, W samples of the window, S scored samples, C classes so far.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from stream_ssl.evaluation.neighbours import weighted_vote
from stream_ssl.memory.compute import to_device, to_host
from stream_ssl.observe.catalogue import CLASSIFIERS

if TYPE_CHECKING:
    from stream_ssl.learning.records import StepRecord

SIMILARITIES = 1 << 24
"""The most cosines between a batch and the window that are in memory at once."""

NEIGHBOURS = 20
"""The number of neighbours that vote. The kNN evaluations of MoCo and DINO use 10 to 200."""

RATE = 4.0
"""The learning rate of the linear probe, for keys of unit norm."""

MOST_CLASSES = 4096
"""The most classes. The probe leaves out samples of any further class."""


class Prequential:
    """A prequential probe, which predicts each labelled batch before it learns from the batch.

    The method is from Gama et al., On evaluating stream learning algorithms, 2013. Four classifiers
    work on the keys that join the memory:

    - "linear": a softmax regression with one gradient step per batch.
    - "knn": the vote of the nearest of the last labelled samples.
    - "no_change": the label of the previous sample.
    - "majority": the most frequent of the last labels.

    The last two use no embeddings. They are hard to beat on a stream that is correlated in time or
    dominated by one class. The embeddings are useful only if the first two beat them. The keys come
    from augmented views unless the run has `plain_keys`.

    Accuracy, balanced accuracy and Cohen's kappa cover the last `window` samples. The probe draws
    no random numbers and does not change the encoder. The classifiers run on the device of the
    keys.

    Args:
        window: number of labelled samples for the figures and for the neighbours, at least 1.
    """

    def __init__(self, window: int = 2048) -> None:
        self.window = window
        self._index: dict[int, int] = {}  # class number by label, in order of arrival
        self._scored: deque[Tensor] = deque()  # [1 + classifiers, B]: true and predicted classes
        self._count = self._new = 0
        self._keys_WD: Tensor | None = None
        self._class_W = torch.zeros(0, dtype=torch.int64)  # on the CPU
        self._weight_CD: Tensor | None = None

    def consume(self, record: StepRecord) -> None:
        """Take one step.

        The probe leaves out replays, unlabelled samples, and keys that were not offered to the
        memory.
        """
        if not record.replay and record.admission is not None:
            self.update(record.keys_BD, record.labels_B)

    def update(self, keys_BD: Tensor, labels_B: Tensor) -> None:
        """Predict a batch, score the predictions, then learn from the batch.

        Args:
            keys_BD: rows of unit norm.
            labels_B: class labels; -1 for samples without a label.
        """
        index_B = torch.tensor([self._number(label) for label in to_host(labels_B).tolist()])
        rows = (index_B >= 0).nonzero().flatten()
        if not len(rows):
            return
        keys_BD, class_B = keys_BD.detach().float(), index_B[rows]
        if len(rows) < len(index_B):
            keys_BD = keys_BD[to_device(rows, keys_BD.device)]
        if self._keys_WD is not None:  # nothing is learned before the first batch
            self._score(self._predict(keys_BD, class_B), class_B)
        self._learn(keys_BD, class_B)

    def read(self) -> Mapping[str, tuple[float, float, float]]:
        """Return (accuracy, balanced accuracy, kappa) by classifier.

        The result is empty before the second labelled batch.
        """
        if not self._scored:
            return {}
        true_S, *found = torch.cat([*self._scored], dim=1)
        return {
            name: _scores(true_S, found_S) for name, found_S in zip(CLASSIFIERS, found, strict=True)
        }

    @property
    def covered(self) -> int:
        """The number of samples that the figures of `read` cover."""
        return self._count

    def take_new(self) -> int:
        """Return the number of samples predicted since the last call."""
        new, self._new = self._new, 0
        return new

    def _number(self, label: int) -> int:
        if label < 0 or (label not in self._index and len(self._index) >= MOST_CLASSES):
            return -1
        return self._index.setdefault(label, len(self._index))

    def _predict(self, keys_BD: Tensor, class_B: Tensor) -> Tensor:
        """Return the predictions, int64 [classifiers, B], on the CPU."""
        assert self._keys_WD is not None
        assert self._weight_CD is not None
        label_W = self._class_W
        linear_B = (_with_bias(keys_BD) @ self._weight_CD.T).argmax(dim=1)
        linear_B, near_B = to_host(torch.stack([linear_B, self._nearest(keys_BD)]))
        most_B = torch.bincount(label_W).argmax().expand(len(class_B))
        before_B = torch.cat([label_W[-1:], class_B[:-1]])
        return torch.stack([linear_B, near_B, before_B, most_B])

    def _nearest(self, keys_BD: Tensor) -> Tensor:
        """Return the classes, int64 [B], that the nearest samples of the window vote for."""
        assert self._keys_WD is not None
        k, step = min(NEIGHBOURS, len(self._keys_WD)), max(1, SIMILARITIES // len(self._keys_WD))
        class_W = to_device(self._class_W, keys_BD.device)
        parts = []
        for keys_bD in torch.split(keys_BD, step):
            near = torch.topk(keys_bD @ self._keys_WD.T, k, dim=1)
            parts.append(weighted_vote(near.values, class_W[near.indices], len(self._index)))
        return torch.cat(parts)

    def _score(self, predicted: Tensor, class_B: Tensor) -> None:
        self._scored.append(torch.cat([class_B[None], predicted]))
        self._new += len(class_B)
        self._count += len(class_B)
        # Whole batches leave the window, and the newest batch always stays.
        while len(self._scored) > 1 and self._count - self._scored[0].shape[1] >= self.window:
            self._count -= self._scored.popleft().shape[1]

    def _learn(self, keys_BD: Tensor, class_B: Tensor) -> None:
        if self._keys_WD is None or self._weight_CD is None:
            self._keys_WD = keys_BD[:0]
            self._weight_CD = keys_BD.new_zeros(0, keys_BD.shape[1] + 1)
        self._keys_WD = torch.cat([self._keys_WD, keys_BD])[-self.window :]
        self._class_W = torch.cat([self._class_W, class_B])[-self.window :]
        fresh = self._weight_CD.new_zeros(
            len(self._index) - len(self._weight_CD), self._weight_CD.shape[1]
        )
        weight_CD = torch.cat([self._weight_CD, fresh]).requires_grad_()
        with torch.enable_grad():
            there_B = to_device(class_B, keys_BD.device)
            loss = cross_entropy(_with_bias(keys_BD) @ weight_CD.T, there_B)
            (gradient_CD,) = torch.autograd.grad(loss, weight_CD)
        self._weight_CD = weight_CD.detach() - RATE * gradient_CD


def _scores(true_S: Tensor, found_S: Tensor) -> tuple[float, float, float]:
    """Return accuracy, balanced accuracy and Cohen's kappa of predictions.

    Balanced accuracy is the mean over the true classes. Kappa is 0 if only one class occurs.
    """
    right_S, classes = true_S == found_S, 1 + int(torch.maximum(true_S, found_S).max())
    true_C, found_C, right_C = (
        torch.bincount(one, minlength=classes).double()
        for one in (true_S, found_S, true_S[right_S])
    )
    accuracy = float(right_S.double().mean())
    balanced = float((right_C / true_C)[true_C > 0].mean())
    chance = float(true_C @ found_C) / len(true_S) ** 2
    return accuracy, balanced, (accuracy - chance) / (1 - chance) if chance < 1 else 0.0


def _with_bias(keys_BD: Tensor) -> Tensor:
    """Return rows [B, D + 1] whose last column is 1, for the bias."""
    return torch.cat([keys_BD, torch.ones_like(keys_BD[:, :1])], dim=1)
