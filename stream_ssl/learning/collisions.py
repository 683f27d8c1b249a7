"""Collisions of a batch with the memory: expected ones, and true ones where there are labels.

Shapes: B samples, K slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class CollisionStats(NamedTuple):
    """Collisions of a batch with the memory before the batch joins, on the memory's device."""

    expected: Tensor  # mean collision probability, 0-dimensional
    pairs: Tensor  # the result of `count_pairs`
    duplicates_B: Tensor  # expected number of slots that duplicate each sample


def count_pairs(labels_B: Tensor, labels_K: Tensor) -> Tensor:
    """Return int64 [3]: pairs with equal labels, labelled samples, labelled slots.

    Class numbers may be any integers from 0. They are looked up, not counted in a table of their
    range. The function neither waits for the device nor makes a [B, K] tensor.
    """
    known_B, known_K = labels_B >= 0, labels_K >= 0
    sorted_B = labels_B.sort().values
    ahead_K = torch.searchsorted(sorted_B, labels_K)
    equal_K = torch.searchsorted(sorted_B, labels_K, right=True) - ahead_K
    return torch.stack([(equal_K * known_K).sum(), known_B.sum(), known_K.sum()])


def true_collisions(pairs: Sequence[float]) -> float | None:
    """Return the share, in [0, 1], of labelled pairs of sample and slot that have the same label.

    DUEL's Definition 2 estimates this share without labels.

    Args:
        pairs: the result of `count_pairs`.

    Returns:
        The share; None if no sample or no slot has a label.
    """
    equal, samples, slots = pairs
    return equal / (samples * slots) if samples and slots else None
