"""How many pairs collide: cosines to probabilities, by labels, and near-copies, without any.

A score h only rises with the cosine: its mean over pairs is a similarity, on a scale of its own.

Shapes: B batch, K slots, D embedding, A descriptor, N bins of the cosine, S slots looked at.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression
from torch import Tensor
from torch.nn.functional import pad

from stream_ssl.memory.descriptors import Vector
from stream_ssl.memory.near_duplicates import NEIGHBOURS, are_near_duplicates, distance, sketch

if TYPE_CHECKING:
    from stream_ssl.learning.records import StepRecord
    from stream_ssl.memory import WorkingMemory

BINS = 2000
LEAST = 100
"""Pairs of either kind below which nothing is said."""

LOOKED_AT = 256
"""Slots of which the nearest other one is sought."""


class Calibration:
    """P(same | cosine) by isotonic regression: the increasing function nearest to what was counted
    (Zadrozny and Elkan, 2002).

    Args:
        half_life: calls of `take` after which pairs count half: the encoder moves on.
    """

    def __init__(self, half_life: float = 50.0) -> None:
        self._decay = 0.5 ** (1 / half_life)
        self._same_N, self._all_N = np.zeros((2, BINS))

    def take(self, cosine: Tensor, same: Tensor) -> None:
        """Pairs of which it is known whether they are the same: cosine and bool, of one shape."""
        for counts_N, pairs in ((self._same_N, cosine[same]), (self._all_N, cosine)):
            counts_N *= self._decay
            counts_N += histogram(pairs)

    @property
    def probability_N(self) -> NDArray[np.float64] | None:
        """P(same) in each bin of the cosine from -1 to 1; None before `LEAST` pairs of either
        kind."""
        same, total = self._same_N.sum(), self._all_N.sum()
        if min(same, total - same) < LEAST:
            return None
        seen = self._all_N > 0
        share = self._same_N[seen] / self._all_N[seen]
        fitted = isotonic_regression(share, weights=self._all_N[seen]).x
        bins = np.arange(BINS)
        probability_N: NDArray[np.float64] = np.interp(bins, bins[seen], fitted)
        return probability_N

    def mean(self, cosine: Tensor) -> float | None:
        """Mean P(same) over these pairs; None before there is a fit, or of no pairs."""
        probability_N, counts_N = self.probability_N, histogram(cosine)
        if probability_N is None or not counts_N.any():
            return None
        return float(counts_N @ probability_N / counts_N.sum())


def histogram(cosine: Tensor) -> NDArray[np.float64]:
    """How many lie in each of `BINS` parts of [-1, 1]."""
    inside = cosine.detach().float().clamp(-1.0, 1.0).flatten()
    counts_N = torch.histc(inside, BINS, -1.0, 1.0)
    return np.asarray(counts_N.cpu(), np.float64)


class ClassCollisions:
    """The probability that a sample of the stream and a slot share a class, over all pairs, from
    the few of them in which both have a label.

    Labels of one sample in fifty do. Where they stop, the last fit goes on: right for as long as
    the encoder and the classes stay as they were.
    """

    def __init__(self) -> None:
        self._calibration = Calibration()
        self._newest: StepRecord | None = None

    def consume(self, record: StepRecord) -> None:
        """Take one step; replays are no samples of the stream."""
        if record.admission is not None:
            self._newest = record

    def measure(self, memory: WorkingMemory) -> float | None:
        """Of the newest batch with the memory; None before enough labelled pairs were seen."""
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


def near_copies(memory: WorkingMemory) -> float | None:
    """Return the share of the slots that are near-duplicates of another slot.

    Each slot is compared with the slots that are nearest to it by the memory's descriptor. The
    share is None if the memory holds no images. It is also None if the descriptor depends on the
    encoder, because training moves the descriptors of near-duplicates apart.

    Args:
        memory: an even sample of its slots is looked at.
    """
    count, descriptor = len(memory), memory.descriptor
    if count < 2 or memory.images is None or descriptor.moves or not descriptor.needs_images:
        return None
    if isinstance(descriptor, Vector):
        return None
    looked_at, near = min(count, LOOKED_AT), min(count - 1, NEIGHBOURS)
    slot_S = torch.arange(looked_at, device=memory.device) * count // looked_at
    cosine_SK = memory.descriptors[slot_S] @ memory.descriptors.T
    cosine_SK[torch.arange(looked_at, device=memory.device), slot_S] = -2.0
    near_Sn = cosine_SK.topk(near, dim=1).indices
    other_N, place_N = torch.unique(near_Sn, return_inverse=True)
    one_SSS, other_NSS = (sketch(memory.images_of(slots)) for slots in (slot_S, other_N))
    far_N = distance(one_SSS.repeat_interleave(near, dim=0), other_NSS[place_N.flatten()])
    two_S2 = pad(far_N.view(looked_at, near).sort(dim=1).values, (0, 1), value=torch.inf)[:, :2]
    return float(are_near_duplicates(two_S2).float().mean())
