"""Thumbnails of a step's samples, which show observers a change of the stream.

Shapes: B samples, D embedding, A numbers of a thumbnail, N numbers of a vector, C H W image.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

from stream_ssl.memory.descriptors import Thumbnail, vectors_of

SIDE = 8
"""The side of a thumbnail, in pixels."""
NUMBERS = {2: torch.float16, 4: torch.float32}
"""The number of bytes of each number of a vector, and its type."""

_thumbnail = Thumbnail(SIDE)


def thumbnails(keys_BD: Tensor, image_BCHW: Tensor, number_bytes: int | None) -> Tensor:
    """Return the thumbnails [B, A], with the dtype and the device of the keys.

    A thumbnail of a vector consists of at most SIDE^2 of its numbers, at equal distances, minus
    their mean, and has unit norm. So it shows what the views of a vector show.

    Args:
        image_BCHW: uint8 images, or the bytes of vectors, [B, bytes, 1, 1].
        number_bytes: the bytes of a number of a vector; None for images.
    """
    if number_bytes is None:
        return _thumbnail(keys_BD, image_BCHW)
    value_BN = vectors_of(image_BCHW, NUMBERS[number_bytes])
    count = min(SIDE**2, value_BN.shape[1])
    place_A = torch.arange(count, device=value_BN.device) * value_BN.shape[1] // count
    value_BA = value_BN[:, place_A].to(keys_BD.device, torch.float32)
    return normalize(value_BA - value_BA.mean(dim=1, keepdim=True), dim=1).to(keys_BD.dtype)
