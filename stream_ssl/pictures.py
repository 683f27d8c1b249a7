"""The pixels that an image file stands for: orientation, transparency, depth.

Every route from a file to pixels uses these functions: the learner's decoder, a producer's PIL
images, images in tables, and shaping. This module needs Pillow, which a producer may lack.
"""

from __future__ import annotations

import numpy as np
from PIL import Image

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
_LEVELS = {"L;2": 85, "L;4": 17}  # Pillow scales these pixels to 8 bits, but not their tRNS level


def plain(image: Image.Image) -> Image.Image:
    """Return the image as L, RGB or RGBA, in the orientation in which it is stored.

    Grey of 16 bits keeps its high byte. The image's loaded pixels and `info` may change.
    """
    _match_transparency(image)
    if image.mode.startswith("I"):  # 16-bit grey
        level_HW = np.asarray(image).clip(0, 65_535)
        grey = Image.fromarray((level_HW >> 8).astype(np.uint8))
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
    """Return the transposition that puts the image upright by its EXIF data; None for none.

    Call `plain` before: this function may load the pixels, and then their depth is not known.
    """
    try:
        return _TURN.get(image.getexif().get(_ORIENTATION, 1))
    except MemoryError:
        raise
    except Exception:  # damaged EXIF in a good image
        return None


def upright(image: Image.Image) -> Image.Image:
    """Return the image as L, RGB or RGBA, turned as its EXIF data says."""
    shown = plain(image)
    shown.load()  # the caller may close the file
    how = turn(image)
    return shown if how is None else shown.transpose(how)


def over_white(image: Image.Image) -> Image.Image:
    """Return an RGBA image as RGB, laid over white; any other image as it is."""
    if image.mode != "RGBA":
        return image
    white = Image.new("RGBA", image.size, "white")
    white.alpha_composite(image)
    return white.convert("RGB")


def _match_transparency(image: Image.Image) -> None:
    """Scale the transparent colour of a PNG that is not loaded yet to the depth of its pixels."""
    clear, tiles = image.info.get("transparency"), getattr(image, "tile", None)
    if clear is None or not tiles:
        return
    stored = tiles[0][3]
    if stored in _LEVELS:
        image.info["transparency"] = clear * _LEVELS[stored]
    elif stored == "RGB;16B":
        image.info["transparency"] = tuple(level >> 8 for level in clear)
