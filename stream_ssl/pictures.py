"""Conversion of image files to pixels (orientation, transparency and bit depth), and back.

The learner's decoder, a producer's PIL images, images in tables, and shaping all use these
functions. This module needs Pillow, which is optional for a producer.

Shapes: N images of H rows, W columns and C channels, 1 (grey) or 3.
"""

from __future__ import annotations

import base64
import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from stream_ssl.bit_depth import eight_bits

_ORIENTATION = 0x0112  # EXIF tag
_TURN = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_TEXTS = (b"iCCP", b"iTXt", b"tEXt", b"zTXt")
_LEVELS = {"L;2": 85, "L;4": 17}  # Pillow scales these pixels to 8 bits, but not their tRNS level


def plain(image: Image.Image) -> Image.Image:
    """Return the image as L, RGB or RGBA, in its stored orientation.

    16-bit grey becomes 8 bits, see `eight_bits`. This function may change `image.info` and load the
    pixels.

    Raises:
        ValueError: the image lacks the palette that its pixels need.
    """
    _match_transparency(image)
    if image.mode == "P" and image.palette is None:
        raise ValueError("its pixels are numbers of colours, and it has no palette")
    if image.mode.startswith("I"):  # 16-bit grey
        level_HW = np.asarray(image).clip(0, 65_535)
        grey = Image.fromarray(eight_bits(level_HW))
        if "transparency" not in image.info:
            return grey
        opaque_HW = level_HW != image.info["transparency"]
        shown = grey.convert("RGBA")
        shown.putalpha(Image.fromarray(opaque_HW.astype(np.uint8) * 255))
        return shown
    if image.has_transparency_data:
        return image.convert("RGBA")
    if image.mode == "1":
        return image.convert("L")
    return image if image.mode in ("L", "RGB") else image.convert("RGB")


def turn(image: Image.Image) -> Image.Transpose | None:
    """Return the transposition that the EXIF orientation requires, or None.

    Call `plain` first: this function may load the pixels, and `plain` needs their stored depth.
    """
    try:
        return _TURN.get(image.getexif().get(_ORIENTATION, 1))
    except MemoryError:
        raise
    except Exception:  # damaged EXIF in a good image
        return None


def upright(image: Image.Image) -> Image.Image:
    """Return the image as L, RGB or RGBA, with the EXIF orientation applied."""
    shown = plain(image)
    shown.load()  # the caller may close the file
    how = turn(image)
    return shown if how is None else shown.transpose(how)


def over_white(image: Image.Image) -> Image.Image:
    """Return an RGBA image as RGB on a white background, and any other image unchanged."""
    if image.mode != "RGBA":
        return image
    white = Image.new("RGBA", image.size, "white")
    white.alpha_composite(image)
    return white.convert("RGB")


def without_texts(png: bytes) -> bytes:
    """Return a PNG without its texts and colour profile, because Pillow refuses long ones."""
    kept, at = [png[:8]], 8
    while at < len(png):
        end = at + 12 + int.from_bytes(png[at : at + 4], "big")
        if png[at + 4 : at + 8] not in _TEXTS:
            kept.append(png[at:end])
        at = end
    return b"".join(kept)


def image_of(pixels_HWC: NDArray[np.uint8]) -> Image.Image:
    """Return pixels as an image of Pillow, in grey or colour."""
    return Image.fromarray(pixels_HWC[:, :, 0] if pixels_HWC.shape[2] == 1 else pixels_HWC)


def png(pixels_HWC: NDArray[np.uint8], level: int = 6) -> bytes:
    """Return the PNG of pixels, compressed by a level from 0 to 9."""
    file = io.BytesIO()
    image_of(pixels_HWC).save(file, "PNG", compress_level=level)
    return file.getvalue()


def png_address(pixels_HWC: NDArray[np.uint8], level: int = 6) -> str:
    """Return pixels as a PNG in a data URL, so that a page needs no further file."""
    return "data:image/png;base64," + base64.b64encode(png(pixels_HWC, level)).decode()


def tiled(pixels_NHWC: NDArray[np.uint8], columns: int, fill: int = 0) -> NDArray[np.uint8]:
    """Return images in rows of `columns`, [rows * H, columns * W, C].

    The level `fill` stands in place of the images that the last row lacks.
    """
    count, high, wide, channels = pixels_NHWC.shape
    rows = -(-count // columns)
    cells = np.full((rows * columns, high, wide, channels), fill, np.uint8)
    cells[:count] = pixels_NHWC
    grid = cells.reshape(rows, columns, high, wide, channels).transpose(0, 2, 1, 3, 4)
    return grid.reshape(rows * high, columns * wide, channels)


def _match_transparency(image: Image.Image) -> None:
    """Scale the transparent colour of a PNG, before it is loaded, to the depth of its pixels."""
    clear, tiles = image.info.get("transparency"), getattr(image, "tile", None)
    if clear is None or not tiles:
        return
    stored = tiles[0][3]
    if stored in _LEVELS:
        image.info["transparency"] = clear * _LEVELS[stored]
    elif stored == "RGB;16B":
        image.info["transparency"] = tuple(level >> 8 for level in clear)
