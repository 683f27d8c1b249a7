"""Combine many small images into one picture.

N images.
"""

from __future__ import annotations

import base64
import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image


def by_class(
    image_NHW: NDArray[np.uint8], label_N: NDArray[np.int64], count: int, seed: int = 0
) -> NDArray[np.uint8]:
    """Return at most `count` random images without replacement, in the order of their classes."""
    count = min(count, len(image_NHW))
    chosen = np.random.default_rng(seed).choice(len(image_NHW), count, replace=False)
    return image_NHW[chosen[np.argsort(label_N[chosen], kind="stable")]]


def tile(image_NHW: NDArray[np.uint8], columns: int) -> NDArray[np.uint8]:
    """Return the images in rows of `columns`. Black images fill the last row."""
    count, height, width = image_NHW.shape
    rows = -(-count // columns)
    cells = np.zeros((rows * columns, height, width), np.uint8)
    cells[:count] = image_NHW
    grid = cells.reshape(rows, columns, height, width).transpose(0, 2, 1, 3)
    return grid.reshape(rows * height, columns * width)


def png_uri(picture_HW: NDArray[np.uint8]) -> str:
    """Return a grey picture as a data address, which a page can show without another file."""
    file = io.BytesIO()
    Image.fromarray(picture_HW).save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
