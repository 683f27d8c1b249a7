"""How often a sample meets its own class in the memory, by its label.

Shapes: B samples, K slots.
"""

from __future__ import annotations

import torch
from torch import Tensor


def true_collisions(labels_B: Tensor, labels_K: Tensor) -> float | None:
    """Share of pairs of a labelled sample and a labelled slot with equal labels, in [0, 1].

    What DUEL's Definition 2 estimates without labels. None where either side has no labels (-1).
    """
    known_B, known_K = labels_B[labels_B >= 0], labels_K[labels_K >= 0]
    if not len(known_B) or not len(known_K):
        return None
    # Classes are any numbers, so they are looked up, not counted in a table of their range.
    classes, counts = torch.unique(known_B, return_counts=True)
    at_K = torch.searchsorted(classes, known_K).clamp_(max=len(classes) - 1)
    pairs = counts[at_K][classes[at_K] == known_K].sum()
    return int(pairs) / (len(known_B) * len(known_K))
