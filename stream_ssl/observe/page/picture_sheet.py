"""Images side by side in one picture, as the page receives them.

Shapes: n images of C H W.
"""

from __future__ import annotations

import io
import math
from base64 import b64encode
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from stream_ssl.pictures import image_of, png_address, tiled


def picture_sheet(ids: Sequence[str | None], image_nCHW: Tensor) -> dict[str, Any] | None:
    """Return the form that `MemoryView.pictures` describes; None without images."""
    if not ids:
        return None
    columns = math.ceil(math.sqrt(len(ids)))
    tile = image_nCHW.shape[-1]
    return {"tile": tile, "columns": columns, "ids": ids, "sheet": sheet(image_nCHW, columns)}


def sheet(image_nCHW: Tensor, columns: int) -> str:
    """Return uint8 images side by side as a data URL.

    The format is PNG if the side is below 16 or no multiple of 8, else JPEG.
    """
    side = image_nCHW.shape[-1]
    pixels_HWC = tiled(image_nCHW.permute(0, 2, 3, 1).numpy(), columns)
    if side % 8 or side < 16:  # JPEG's blocks would run over the edges of the tiles
        return png_address(pixels_HWC, level=1)
    file = io.BytesIO()
    image_of(pixels_HWC).save(file, "JPEG", quality=88, subsampling=0)
    return "data:image/jpeg;base64," + b64encode(file.getvalue()).decode()
