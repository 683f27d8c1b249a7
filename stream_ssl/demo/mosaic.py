"""Choose images of a memory for a mosaic.

N images.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def by_class(
    image_NHW: NDArray[np.uint8], label_N: NDArray[np.int64], count: int, seed: int = 0
) -> NDArray[np.uint8]:
    """Return at most `count` random images without replacement, in the order of their classes."""
    count = min(count, len(image_NHW))
    chosen = np.random.default_rng(seed).choice(len(image_NHW), count, replace=False)
    return image_NHW[chosen[np.argsort(label_N[chosen], kind="stable")]]
