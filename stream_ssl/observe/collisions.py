"""The collision probability, by calibration on labels, and the share of near-duplicates.

The score h rises with the cosine, but its mean over pairs is no probability. The calibration maps
cosines to probabilities.

Shapes: B batch, K slots, D embedding, N bins of the cosine, S compared slots.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from stream_ssl.learning.records import StepRecord
    from stream_ssl.memory import WorkingMemory
    from stream_ssl.memory.near_duplicates import NearDuplicates

BINS = 2000
LEAST = 100
"""The least number of equal pairs, and of different pairs, for a fit."""

LOOKED_AT, SURVEYS = 256, 8
"""A survey searches near-duplicates of at most LOOKED_AT slots, and a share covers at most SURVEYS
surveys. A share of 5 % has a standard error of 1.4 points on 256 slots, and of 0.5 on 2,048.
"""


class Calibration:
    """A fit of P(same | cosine) by isotonic regression (Zadrozny and Elkan, 2002).

    The fit is the increasing function that is nearest to the counted shares.

    Args:
        half_life: number of calls of `take` after which pairs have half their weight. Old pairs
            lose weight because the encoder changes.
    """

    def __init__(self, half_life: float = 50.0) -> None:
        self._decay = 0.5 ** (1 / half_life)
        self._same_N, self._all_N = np.zeros((2, BINS))

    def take(self, cosine: Tensor, same: Tensor) -> None:
        """Take pairs of known kind.

        Args:
            same: bool, whether each pair is the same; the shape of `cosine`.
        """
        for counts_N, pairs in ((self._same_N, cosine[same]), (self._all_N, cosine)):
            counts_N *= self._decay
            counts_N += histogram(pairs)

    @property
    def probability_N(self) -> NDArray[np.float64] | None:
        """P(same) in each bin of the cosine from -1 to 1.

        None before there are LEAST equal pairs and LEAST different pairs.
        """
        same, total = self._same_N.sum(), self._all_N.sum()
        if min(same, total - same) < LEAST:
            return None
        seen = self._all_N > 0
        from scipy.optimize import isotonic_regression  # takes half as long to load as torch

        share = self._same_N[seen] / self._all_N[seen]
        fitted = isotonic_regression(share, weights=self._all_N[seen]).x
        bins = np.arange(BINS)
        probability_N: NDArray[np.float64] = np.interp(bins, bins[seen], fitted)
        return probability_N

    def mean(self, cosine: Tensor) -> float | None:
        """Return the mean P(same) over these pairs; None without a fit or without pairs."""
        probability_N, counts_N = self.probability_N, histogram(cosine)
        if probability_N is None or not counts_N.any():
            return None
        return float(counts_N @ probability_N / counts_N.sum())


def histogram(cosine: Tensor) -> NDArray[np.float64]:
    """Return how many cosines lie in each of `BINS` equal parts of [-1, 1]."""
    inside = cosine.detach().float().clamp(-1.0, 1.0).flatten()
    counts_N = torch.histc(inside, BINS, -1.0, 1.0)
    return np.asarray(counts_N.cpu(), np.float64)


class ClassCollisions:
    """The probability that a sample of the stream and a slot of the memory share a class.

    It is fitted to the pairs in which both have a label, and applied to all pairs. Labels for one
    sample in fifty are enough. If the labels stop, the last fit stays in use. It is right only as
    long as the encoder and the classes do not change.
    """

    def __init__(self) -> None:
        self._calibration = Calibration()
        self._newest: StepRecord | None = None

    def consume(self, record: StepRecord) -> None:
        """Take one step. Replays are left out, because they are no samples of the stream."""
        if record.admission is not None:
            self._newest = record

    def measure(self, memory: WorkingMemory) -> float | None:
        """Return the probability for the newest batch and the memory.

        Return None without a new batch, or before there are enough labelled pairs.
        """
        record, self._newest = self._newest, None
        if record is None or not len(memory):
            return None
        keys_BD = record.keys_BD.to(memory.embeddings)
        cosine_BK = keys_BD @ memory.embeddings.T
        other_BK = record.ids_B.to(memory.ids).unsqueeze(1) != memory.ids  # no pair with itself
        label_B = record.labels_B.to(memory.labels)
        known_BK = other_BK & (label_B >= 0).unsqueeze(1) & (memory.labels >= 0)
        if bool(known_BK.any()):
            same_BK = label_B.unsqueeze(1) == memory.labels
            self._calibration.take(cosine_BK[known_BK], same_BK[known_BK])
        return self._calibration.mean(cosine_BK[other_BK])


class NearDuplicateShare:
    """The share of the slots that are near-duplicates of another slot.

    Each survey compares other slots with all slots, and the share is that of the last surveys. In a
    memory of at most LOOKED_AT * SURVEYS slots, these surveys cover each slot once.

    Args:
        test: the test of this memory; None: the memory keeps no images.
    """

    def __init__(self, test: NearDuplicates | None, memory: WorkingMemory) -> None:
        self._test, self._memory, self._turn = test, memory, 0
        self._surveys: deque[tuple[float, int]] = deque(maxlen=SURVEYS)  # (found, looked at)

    def survey(self) -> float | None:
        """Compare the next slots, and return the share of the last surveys.

        The share is None without a test, or if the memory has fewer than two slots.
        """
        count = len(self._memory)
        if self._test is None or count < 2:
            return None
        looked_at = min(count, LOOKED_AT)
        rounds = -(-count // looked_at)  # surveys until each slot was looked at
        even_S = torch.arange(looked_at, device=self._memory.device) * count // looked_at
        found = self._test.of_slots((even_S + self._turn % rounds) % count).float().sum()
        self._turn += 1
        self._surveys.append((float(found), looked_at))
        last = list(self._surveys)[-rounds:]
        return sum(found for found, _ in last) / sum(looked for _, looked in last)
