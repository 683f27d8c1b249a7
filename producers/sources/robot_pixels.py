"""Decoding of uncompressed images of ROS and Foxglove, in each encoding, to pixels.

Shapes: H x W pixels of C channels.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stream_ssl.bit_depth import eight_bits
from stream_ssl.producers.sources.base import own_fault

MAX_PIXELS = 1 << 26  # of an uncompressed image; far more than any robot camera has
CHANNELS = {
    **{encoding: [0] for encoding in ("mono8", "8UC1", "mono16", "16UC1")},
    **{encoding: [0, 1, 2] for encoding in ("rgb8", "rgb16")},
    **{encoding: [2, 1, 0] for encoding in ("bgr8", "bgr16", "8UC3", "16UC3")},
    **{encoding: [0, 1, 2, 3] for encoding in ("rgba8", "rgba16")},
    **{encoding: [2, 1, 0, 3] for encoding in ("bgra8", "bgra16", "8UC4", "16UC4")},
}
"""By encoding: the channel indices of red, green, blue and alpha, or of the grey level."""
BAYER = {
    f"bayer_{pattern}{bits}": ["rgb".index(colour) for colour in pattern]
    for pattern in ("rggb", "bggr", "gbrg", "grbg")
    for bits in (8, 16)
}
"""By encoding: the colours of the upper left 2 x 2 pixels, row by row."""
YUV = {
    **dict.fromkeys(("yuv422", "uyvy"), (1, 0, 2)),
    **dict.fromkeys(("yuv422_yuy2", "yuyv"), (0, 1, 3)),
}
"""By encoding: the indices of the first level, U and V in the four bytes of two pixels."""
PLANES = {"nv12": (2, 0), "nv21": (2, 1), "nv24": (1, 0)}
"""By encoding: the side of the squares of pixels with one U and V, and the index of U in a pair."""


def pixels(message: Any) -> NDArray[np.uint8]:
    """Return the uint8 pixels [H, W, C] of sensor_msgs/Image or foxglove.RawImage, C in {1, 3, 4}.

    16-bit levels become 8 bits, see `eight_bits`.

    Raises:
        ValueError: the encoding is unknown, there are too few bytes, or too many pixels.
    """
    encoding, height, width = message.encoding, message.height, message.width
    channels = CHANNELS.get(encoding) or BAYER.get(encoding, [])[:1]
    if not channels and encoding not in YUV and encoding not in PLANES:
        known = ", ".join([*CHANNELS, *BAYER, *YUV, *PLANES])
        raise ValueError(f"encoding {encoding!r:.80} is none of {known}")
    if height * width > MAX_PIXELS:
        raise ValueError(f"{height} x {width} pixels; at most {MAX_PIXELS} are read")
    if encoding in PLANES:
        return from_planes(message, *PLANES[encoding])
    wide = "16" in encoding
    row = width * (len(channels) or 2) * (1 + wide)
    step = getattr(message, "step", 0) or row
    raw = np.frombuffer(message.data, np.uint8)
    if not (height > 0 and width > 0 and step >= row and len(raw) >= step * (height - 1) + row):
        raise ValueError(
            f"{len(raw)} bytes in rows of {step} do not fill {height} x {width} {encoding}"
        )
    # The last row may end with its pixels, although `step` is longer, so use a strided view.
    image_HWC = np.ascontiguousarray(np.lib.stride_tricks.as_strided(raw, (height, row), (step, 1)))
    if encoding in YUV:
        return from_yuv(image_HWC, YUV[encoding])
    if wide:
        order = ">u2" if getattr(message, "is_bigendian", 0) else "<u2"
        image_HWC = eight_bits(image_HWC.view(order))
    image_HWC = image_HWC.reshape(height, width, len(channels))
    if encoding in BAYER:
        return demosaic(image_HWC[..., 0], BAYER[encoding])
    return image_HWC if channels == [0] else image_HWC[..., channels]


def grey_levels(data: bytes) -> NDArray[np.uint8] | None:
    """Return the levels [H, W] of a picture without colours; None if it has colours.

    Raises:
        ValueError: the picture is damaged, or has too many pixels.
    """
    from PIL import Image

    from stream_ssl.pictures import plain

    try:
        with Image.open(io.BytesIO(data)) as image:
            if image.width * image.height > MAX_PIXELS:
                size = f"{image.height} x {image.width} pixels"
                raise ValueError(f"{size}; at most {MAX_PIXELS} are read")
            shown = plain(image)
            return np.asarray(shown) if shown.mode == "L" else None
    except Exception as error:  # damaged bytes can cause errors of any type
        if own_fault(error):
            raise
        raise ValueError(f"the compressed Bayer image cannot be decoded: {error}") from None


def from_yuv(pair_HW: NDArray[np.uint8], places: tuple[int, int, int]) -> NDArray[np.uint8]:
    """Return the colours [H, W, 3] of 4:2:2 bytes [H, 2 W], by BT.601 with limited range.

    Raises:
        ValueError: the width is odd.
    """
    height, row = pair_HW.shape
    if row % 4:
        raise ValueError(f"width {row // 2}: must be even, for two pixels share their colours")
    level, blue, red = places
    pair_HWC = pair_HW.reshape(height, row // 4, 4)
    level_HW = pair_HWC[..., [level, level + 2]].reshape(height, row // 2)
    blue_HW, red_HW = (np.repeat(pair_HWC[..., at], 2, axis=1) for at in (blue, red))
    return colours(level_HW, blue_HW, red_HW)


def from_planes(message: Any, side: int, blue: int) -> NDArray[np.uint8]:
    """Return the colours [H, W, 3] of a plane of levels and a plane of pairs of U and V.

    Args:
        message: the image. Its `step` is the bytes of a row of levels.
        side: the side of the squares of pixels with one U and V, in pixels.
        blue: the index of U in each pair.

    Raises:
        ValueError: there are too few bytes, or a side is odd and its pixels share colours.
    """
    height, width, encoding = message.height, message.width, message.encoding
    step = getattr(message, "step", 0) or width
    raw = np.frombuffer(message.data, np.uint8)
    high, wide = height // side, width // side * 2  # rows of pairs, and their bytes
    behind, stride = step * height, step * 2 // side
    whole = behind + stride * (high - 1) + wide
    if height % side or width % side:
        raise ValueError(f"{height} x {width}: must be even, for {encoding} shares colours")
    if not (high > 0 and wide > 0 and step >= width and len(raw) >= whole):
        raise ValueError(
            f"{len(raw)} bytes in rows of {step} do not fill {height} x {width} {encoding}"
        )
    level_HW = np.lib.stride_tricks.as_strided(raw, (height, width), (step, 1))
    pair_HWC = np.lib.stride_tricks.as_strided(
        raw[behind:], (high, wide // 2, 2), (stride, 2, 1)
    ).repeat(side, axis=0)
    pair_HWC = pair_HWC.repeat(side, axis=1)
    return colours(level_HW, pair_HWC[..., blue], pair_HWC[..., 1 - blue])


def colours(
    level_HW: NDArray[np.uint8], blue_HW: NDArray[np.uint8], red_HW: NDArray[np.uint8]
) -> NDArray[np.uint8]:
    """Convert the level, U and V of each pixel, [H, W] each, to colours [H, W, 3] by BT.601."""
    y_HW = 1.164 * (level_HW.astype(np.float32) - 16)
    u_HW, v_HW = (one_HW.astype(np.float32) - 128 for one_HW in (blue_HW, red_HW))
    image_HWC = np.stack(
        [y_HW + 1.596 * v_HW, y_HW - 0.392 * u_HW - 0.813 * v_HW, y_HW + 2.017 * u_HW],
        axis=-1,
    )
    return image_HWC.round().clip(0, 255).astype(np.uint8)


def demosaic(image_HW: NDArray[np.uint8], pattern: list[int]) -> NDArray[np.uint8]:
    """Return the colours [H, W, 3] of a Bayer sensor image [H, W], by bilinear interpolation.

    A missing colour of a pixel is the weighted mean of the adjacent pixels that have the colour.
    """
    height, width = image_HW.shape
    level_HW = np.pad(image_HW.astype(np.float32), 1)
    colour_HW = np.tile(np.array(pattern).reshape(2, 2), (height // 2 + 1, width // 2 + 1))
    colour_HW = np.pad(colour_HW[:height, :width], 1, constant_values=-1)
    image_HWC = np.empty((height, width, 3), np.uint8)
    for colour in range(3):
        has_HW = (colour_HW == colour).astype(np.float32)
        mean_HW = around(level_HW * has_HW) / np.maximum(around(has_HW), 1)
        own_HW = has_HW[1:-1, 1:-1] > 0
        image_HWC[..., colour] = np.where(own_HW, image_HW, np.round(mean_HW))
    return image_HWC


def around(value_HW: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the weighted sum over each pixel's 8 neighbours: weight 2 at sides, 1 at corners."""
    height, width = value_HW.shape[0] - 2, value_HW.shape[1] - 2
    total_HW = np.zeros((height, width), np.float32)
    for down in range(3):
        for right in range(3):
            weight = (0, 2, 1)[abs(down - 1) + abs(right - 1)]
            total_HW += weight * value_HW[down : down + height, right : right + width]
    return total_HW
