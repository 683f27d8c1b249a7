"""Random unit rows for the tests of losses."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Case(NamedTuple):
    z_BD: Tensor
    positive_BMD: Tensor
    negative: Tensor
    mask_BN: Tensor


def unit(*shape: int, generator: torch.Generator, dtype: torch.dtype = torch.float64) -> Tensor:
    return F.normalize(torch.randn(*shape, generator=generator, dtype=dtype), dim=-1)


def case(
    seed: int = 0,
    batch: int = 5,
    positives: int = 1,
    negatives: int = 9,
    dim: int = 4,
    shared: bool = True,
    dtype: torch.dtype = torch.float64,
) -> Case:
    """Positives near their anchors; a mask that leaves each anchor at least one negative."""
    generator = torch.Generator().manual_seed(seed)
    z_BD = unit(batch, dim, generator=generator, dtype=dtype)
    noise_BMD = unit(batch, positives, dim, generator=generator, dtype=dtype)
    positive_BMD = F.normalize(z_BD.unsqueeze(1) + 0.5 * noise_BMD, dim=-1)
    shape = (negatives, dim) if shared else (batch, negatives, dim)
    negative = unit(*shape, generator=generator, dtype=dtype)
    mask_BN = torch.rand(batch, negatives, generator=generator) < 0.3
    mask_BN[:, 0] = False
    return Case(z_BD, positive_BMD, negative, mask_BN)
