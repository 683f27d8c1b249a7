"""Numbers that say how a memory is doing. They are returned; exporting them is others' work.

Shapes: k occupied slots, D embedding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from memory.scores import BLOCK_ELEMENTS


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """A memory at one moment. Ages are in samples offered since arrival.

    Attributes:
        occupancy: occupied slots, of `capacity`.
        added: samples offered so far; each was inserted or refused.
        inserted: samples that joined; those beyond the occupied slots were evicted.
        expected_collisions: mean h over pairs of distinct slots (DUEL, Definition 2); 0 below two.
        effective_classes: exponential of the entropy of the spectrum of Z^T Z / k, from 1 to D.
        age_p50, age_p90, age_max: of the occupied slots.
    """

    occupancy: int
    capacity: int
    added: int
    inserted: int
    evicted: int
    refused: int
    expected_collisions: float
    effective_classes: float
    age_p50: float
    age_p90: float
    age_max: float


def effective_classes(z_kD: Tensor) -> float:
    """exp of the entropy of the eigenvalues of Z^T Z / k, which sum to 1; 0 for no rows.

    Orthogonal classes of equal size give their number: c classes, c equal eigenvalues.

    >>> round(effective_classes(torch.eye(4).repeat(3, 1)), 6)
    4.0
    """
    if len(z_kD) == 0:
        return 0.0
    dim = z_kD.shape[1]
    gram_DD = torch.zeros(dim, dim, dtype=torch.float64, device=z_kD.device)
    step = max(1, BLOCK_ELEMENTS // dim)
    for start in range(0, len(z_kD), step):
        block_bD = z_kD[start : start + step].to(torch.float64)
        gram_DD += block_bD.T @ block_bD
    share_D = torch.linalg.eigvalsh(gram_DD).clamp_(min=0)
    share_D /= share_D.sum()
    return math.exp(float(torch.special.entr(share_D).sum()))


def percentiles(values: Tensor, at: tuple[float, ...]) -> list[float]:
    """The values that these shares of `values` do not exceed (nearest rank); 0 for none.

    >>> percentiles(torch.arange(1, 11), (0.5, 0.9, 1.0))
    [5.0, 9.0, 10.0]
    """
    if len(values) == 0:
        return [0.0 for _ in at]
    ordered = torch.sort(values).values
    ranks = [max(0, math.ceil(share * len(ordered)) - 1) for share in at]
    return [float(ordered[rank]) for rank in ranks]
