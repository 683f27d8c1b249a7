"""Choose images of a memory, and show a picture on a page.

N images.
"""

from __future__ import annotations

import base64

import numpy as np
from numpy.typing import NDArray

from stream_ssl.pictures import png


def by_class(
    image_NHW: NDArray[np.uint8], label_N: NDArray[np.int64], count: int, seed: int = 0
) -> NDArray[np.uint8]:
    """Return at most `count` random images without replacement, in the order of their classes."""
    count = min(count, len(image_NHW))
    chosen = np.random.default_rng(seed).choice(len(image_NHW), count, replace=False)
    return image_NHW[chosen[np.argsort(label_N[chosen], kind="stable")]]


def png_uri(picture_HWC: NDArray[np.uint8]) -> str:
    """Return a picture as a data address, which a page can show without another file."""
    return "data:image/png;base64," + base64.b64encode(png(picture_HWC, level=9)).decode()
