"""What is drawn from the memory.

Shapes: B anchors, D embedding, N negatives, n slots drawn, C H W image.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Negatives:
    """Negatives without gradient, and what is needed to leave an anchor's own copies out."""

    z_ND: Tensor
    ids_N: Tensor  # int64
    hashes_N: Tensor  # int64, 0: none

    def __len__(self) -> int:
        return len(self.ids_N)

    def mask(self, ids_B: Tensor, hashes_B: Tensor | None) -> Tensor:
        """bool [B, N], True where negative n is anchor b itself (id) or the same picture (hash)."""
        mask_BN = ids_B[:, None] == self.ids_N
        if hashes_B is not None:
            known_B = (hashes_B != 0)[:, None]
            mask_BN |= (hashes_B[:, None] == self.hashes_N) & known_B
        return mask_BN


@dataclass(frozen=True, slots=True)
class Draw:
    """A training batch drawn from the memory."""

    slots: Tensor  # int64 [n]
    ids: Tensor  # int64 [n]
    images: Tensor | None  # uint8 [n, C, H, W], None where the memory keeps none


def uniform(count: int, total: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """`count` distinct numbers of [0, total), every ordered choice equally likely.

    Drawn on the CPU, so that every device draws the same.
    """
    return torch.randperm(total, generator=generator)[:count].to(device)
