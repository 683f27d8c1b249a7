"""MinRed as published, and the redundancy of a memory, to compare with this project's MinRed.

Shapes: B newcomers, D embedding, K slots, P = K + B.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK_ELEMENTS = 1 << 22
"""Largest block of cosines that `redundancy` holds at a time."""


def published_step(z_KD: Tensor, x_BD: Tensor) -> Tensor:
    """Return the rows that MinRed as published keeps of a full buffer and a batch.

    Purushwalkam et al. 2022, section 4.2: compute all cosine distances of the buffer and the batch
    in one dense P x P matrix. Until K samples are left, remove the sample with the smallest
    distance to its nearest neighbour, with its row and column. If samples tie, remove the first of
    them.

    Returns:
        The remaining rows [K, D]: those of the buffer, then those of the batch, in their order.
    """
    left_PD = torch.cat([z_KD, x_BD])
    distance_PP = 1 - left_PD @ left_PD.T
    distance_PP.fill_diagonal_(torch.inf)
    for _ in range(len(x_BD)):
        gone = int(distance_PP.min(dim=1).values.argmin())
        left_PD = torch.cat([left_PD[:gone], left_PD[gone + 1 :]])
        distance_PP = torch.cat([distance_PP[:gone], distance_PP[gone + 1 :]])
        distance_PP = torch.cat([distance_PP[:, :gone], distance_PP[:, gone + 1 :]], dim=1)
    return left_PD


def redundancy(z_KD: Tensor) -> float:
    """Return the sum over slots of the cosine with the nearest other slot, which MinRed minimises.

    >>> redundancy(torch.eye(3)[[0, 0, 1]])
    2.0
    """
    total = 0.0
    step = max(1, BLOCK_ELEMENTS // max(1, len(z_KD)))
    for start in range(0, len(z_KD) if len(z_KD) > 1 else 0, step):
        cosine_bK = z_KD[start : start + step] @ z_KD.T
        cosine_bK.diagonal(offset=start).fill_(-torch.inf)
        total += float(cosine_bK.amax(dim=1).sum(dtype=torch.float64))
    return total
