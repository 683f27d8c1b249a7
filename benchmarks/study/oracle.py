"""What no memory can know: which image a frame was made of."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from benchmarks.study.streams import STRIDE
from memory.columns import Rows
from memory.eviction import Policy


class ImageBalanced(Policy):
    """For each newcomer in turn, evict the oldest frame of the image that has the most frames.

    Reads the image from a frame's id: the most that knowing all copies could give.
    """

    name = "image-balanced"

    def choose(self, rows: Rows) -> Tensor:
        image_K = self.columns.ids.numpy() % STRIDE
        born_K = self.columns.born.numpy().copy()
        plan = []
        for image, born in zip((rows.ids % STRIDE).tolist(), rows.born.tolist(), strict=True):
            _, kind_K, frames = np.unique(image_K, return_inverse=True, return_counts=True)
            slot = np.lexsort((born_K, -frames[kind_K]))[0]
            image_K[slot], born_K[slot] = image, born
            plan.append(int(slot))
        return torch.tensor(plan)
