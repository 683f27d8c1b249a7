"""What a process does that feeds a memory whose images lie in a file, until it is killed.

Every image and embedding follows from its id alone, so whoever comes after can tell what is true.

Shapes: B newcomers, D embedding, N samples, C H W image.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor

from memory import WorkingMemory, load, save
from memory.eviction import MostDuplicated
from memory.scores import VonMisesFisher

SHAPE = (3, 64, 64)  # large enough that a kill may come in the middle of one
CAPACITY, DIM, BATCH = 64, 8, 16


def image_of(ids_N: Tensor) -> Tensor:
    """uint8 [N, C, H, W], the id in every pixel."""
    pixel = torch.arange(3 * 64 * 64).reshape(1, *SHAPE)
    return ((ids_N.reshape(-1, 1, 1, 1) * 2654435761 + pixel * 40503) // 256 % 256).to(torch.uint8)


def embedding_of(image_NCHW: Tensor) -> Tensor:
    """Unit rows [N, D]."""
    flat_NP = image_NCHW.reshape(len(image_NCHW), -1)[:, : 32 * DIM].double()
    return torch.nn.functional.normalize(flat_NP.reshape(-1, DIM, 32).mean(2) - 127.5, dim=1)


def built(folder: Path) -> WorkingMemory:
    """The memory of the last save, or an empty one."""
    policy, images = MostDuplicated(VonMisesFisher(0.1)), folder / "images"
    if (folder / "state").exists():
        return load(folder / "state", policy, image_file=images)
    return WorkingMemory(CAPACITY, DIM, policy, SHAPE, image_file=images)


def feed(folder: Path) -> None:
    """Add and re-encode, and save now and then; what was done is told on standard output."""
    torch.set_num_threads(1)
    memory = built(folder)
    at = memory.stats().added
    while True:
        ids_B = torch.arange(at, at + BATCH)
        image_BCHW = image_of(ids_B)
        memory.add(ids_B, embedding_of(image_BCHW), image_BCHW)
        memory.reencode(embedding_of, memory.stalest(8))
        at += BATCH
        tell("added", at)
        if at % (8 * BATCH) == 0:
            save(memory, folder / "state")
            tell("saved", at)


def tell(what: str, at: int) -> None:
    sys.stdout.write(f"{what} {at}\n")
    sys.stdout.flush()
