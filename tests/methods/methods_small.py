"""Small encoders for the tests of methods."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from memory import WorkingMemory


class SmallEncoder(nn.Module):
    """A convolution, a BatchNorm and an average: [B, 1, 6, 6] to [B, 8]."""

    dim = 8

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, bias=False)
        self.norm = nn.BatchNorm2d(8)

    def forward(self, image_BCHW: Tensor) -> Tensor:
        feature_BFHW: Tensor = self.norm(self.conv(image_BCHW)).relu()
        return feature_BFHW.mean((2, 3))


class SmallProjector(nn.Module):
    dim = 4

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, feature_BF: Tensor) -> Tensor:
        z_BD: Tensor = self.layer(feature_BF)
        return z_BD


def memory_of(count: int, first_id: int = 1000, dim: int = 4) -> WorkingMemory:
    memory = WorkingMemory(capacity=max(count, 1), dim=dim)
    if count:
        generator = torch.Generator().manual_seed(count)
        rows = torch.randn(count, dim, generator=generator)
        ids = torch.arange(first_id, first_id + count)
        memory.add(ids, nn.functional.normalize(rows, dim=1), hashes=ids + 1)
    return memory
