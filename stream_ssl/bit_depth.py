"""Conversion of pictures with more than 8 bits per level to 8 bits."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def eight_bits(levels: NDArray[np.integer[Any]]) -> NDArray[np.uint8]:
    """Return the upper 8 of the bits that the levels of a picture use, in the same shape.

    Cameras store 10, 12 or 14 bits in 16, and the upper 8 of 16 bits would be nearly black. So the
    number of used bits is the smallest of 8, 10, 12, 14 and 16 that holds the largest level.

    Args:
        levels: the levels of one picture, from 0 to 65,535, of any shape.
    """
    bits = max(8, int(levels.max(initial=0)).bit_length())
    return (levels >> (bits + bits % 2 - 8)).astype(np.uint8)
