"""Thumbnails of a step's samples, which show observers a change of the stream.

Shapes: B samples, D embedding, A numbers of a thumbnail, C H W image.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stream_ssl.memory.descriptors import Thumbnail

SIDE = 8
"""The side of a thumbnail, in pixels."""

_thumbnail = Thumbnail(SIDE)


def thumbnails(keys_BD: Tensor, image_BCHW: Tensor, number_bytes: int) -> Tensor:
    """Return the thumbnails [B, A], with the dtype and the device of the keys.

    A thumbnail of a vector consists of one byte of SIDE^2 of its numbers, at equal distances. All
    bytes would count as colours, and A would be SIDE^2 times their number.

    Args:
        image_BCHW: uint8 images, or the bytes of vectors, [B, bytes, 1, 1].
        number_bytes: the bytes of a number of a vector; of no effect for images.
    """
    if image_BCHW.shape[2:] == (1, 1):
        numbers = image_BCHW.shape[1] // number_bytes
        place = torch.arange(1, SIDE**2 + 1, device=image_BCHW.device) * numbers
        # The last byte of a number has its sign and the most of its exponent. The other bytes are
        # almost random, and would hide what the vectors show.
        chosen = (place + SIDE**2 - 1) // SIDE**2 * number_bytes - 1
        image_BCHW = image_BCHW[:, chosen].view(-1, 1, SIDE, SIDE)
    return _thumbnail(keys_BD, image_BCHW)
