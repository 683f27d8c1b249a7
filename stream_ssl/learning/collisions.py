"""How often a sample meets its own class in the memory, by its label.

Shapes: B samples, K slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from memory.compute import to_host


def true_collisions(labels_B: Tensor, labels_K: Tensor) -> float | None:
    """Share of pairs of a labelled sample and a labelled slot with equal labels, in [0, 1].

    What DUEL's Definition 2 estimates without labels. None where either side has no labels (-1).
    """
    return share_of_pairs(to_host(count_pairs(labels_B, labels_K)).tolist())


def count_pairs(labels_B: Tensor, labels_K: Tensor) -> Tensor:
    """int64 [3] on their device: pairs of equal labels, labelled samples, labelled slots.

    Classes are any numbers from 0 on: they are looked up, not counted in a table of their range.
    The device is not waited for, nor is a [B, K] tensor made.
    """
    known_B, known_K = labels_B >= 0, labels_K >= 0
    sorted_B = labels_B.sort().values
    ahead_K = torch.searchsorted(sorted_B, labels_K)
    equal_K = torch.searchsorted(sorted_B, labels_K, right=True) - ahead_K
    return torch.stack([(equal_K * known_K).sum(), known_B.sum(), known_K.sum()])


def share_of_pairs(counts: Sequence[float]) -> float | None:
    """What `count_pairs` counted, as a share; None where there are no pairs."""
    equal, samples, slots = counts
    return equal / (samples * slots) if samples and slots else None
