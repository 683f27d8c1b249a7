"""Parts of photographs that scikit-learn ships, for tests of what pictures look like."""

from __future__ import annotations

import io
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from sklearn.datasets import load_sample_images
from torch import Tensor

TILE = 96


@cache
def photograph_tiles() -> NDArray[np.uint8]:
    """Return parts of two photographs that show more than sky, uint8 [B, 96, 96, 3]."""
    pieces = np.stack(
        [
            photo[top : top + TILE, left : left + TILE]
            for photo in load_sample_images().images
            for top in range(0, photo.shape[0] - TILE, TILE)
            for left in range(0, photo.shape[1] - TILE, TILE)
        ]
    )
    return pieces[pieces.std((1, 2, 3)) > 25]


def tensor(image_BHWC: NDArray[np.uint8]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(image_BHWC.transpose(0, 3, 1, 2)))


def jpeg(image_HWC: NDArray[np.uint8]) -> NDArray[np.uint8]:
    data = io.BytesIO()
    Image.fromarray(image_HWC).save(data, "JPEG", quality=60)
    return np.asarray(Image.open(data))
