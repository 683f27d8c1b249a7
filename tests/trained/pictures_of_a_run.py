"""Random pictures of the size that the run of these tests takes."""

from __future__ import annotations

import torch


def images(count: int = 9, size: int = 12) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randint(0, 256, (count, 1, size, size), generator=generator).to(torch.uint8)
