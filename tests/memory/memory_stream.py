"""A stream with images, and a memory that is fed with it.

Shapes: N samples, D embedding, C H W image.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from stream_ssl.memory import WorkingMemory
from tests.naive import unit_rows

SHAPE = (1, 2, 3)


def stream(count: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids, embeddings and images. Every image is different."""
    z_ND = unit_rows(np.random.default_rng(seed), "clustered", count, 6)
    image_NCHW = torch.from_numpy(
        np.random.default_rng(seed).integers(0, 256, (count, *SHAPE), dtype=np.uint8)
    )
    return torch.arange(count), z_ND, image_NCHW


def offer(memory: WorkingMemory, start: int, end: int) -> None:
    """Add samples [start, end) of the stream, and make every kind of draw."""
    ids, z_ND, image_NCHW = stream(end)
    part = slice(start, end)
    memory.add(ids[part], z_ND[part], image_NCHW[part], labels=ids[part] % 4)
    memory.refresh(memory.stalest(3), z_ND[:3])
    memory.negatives(5)
    memory.negatives(5, how="stratified", cells=3)
    memory.sample(4)
    memory.sample(4, how="inverse-count")


def equal(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    """Return whether two states are bit-equal."""
    return one.keys() == two.keys() and all(
        one[name].dtype == two[name].dtype and torch.equal(one[name], two[name]) for name in one
    )
