"""The result of a search as a contact sheet: a PNG, or an HTML page.

Shapes: C H W image.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from PIL import Image, ImageDraw

from stream_ssl.pictures import image_of, png, png_address
from stream_ssl.trained.search import SearchResult

TILE: Final = 96  # pixels, the side of a picture on the sheet
COLUMNS: Final = 8
CAPTION: Final = 14  # pixels


def sheet(result: SearchResult) -> bytes:
    """Return a PNG of the query and the hits, with the similarity below each."""
    tiles = [("query", result.query_CHW)]
    tiles += [(f"{hit.similarity:.3f}", hit.image_CHW) for hit in result.hits]
    columns = min(COLUMNS, len(tiles))
    lines = -(-len(tiles) // columns)
    canvas = Image.new("RGB", (columns * (TILE + 4), lines * (TILE + CAPTION + 4)), "white")
    draw = ImageDraw.Draw(canvas)
    for number, (caption, image_CHW) in enumerate(tiles):
        down, right = divmod(number, columns)
        left, top = right * (TILE + 4) + 2, down * (TILE + CAPTION + 4) + 2
        shown = image_of(image_CHW.transpose(1, 2, 0))
        canvas.paste(shown.resize((TILE, TILE), Image.Resampling.NEAREST), (left, top))
        draw.text((left, top + TILE), caption, fill="black")
    return png(np.asarray(canvas))


def page(result: SearchResult) -> bytes:
    """Return an HTML page of the query and the hits, which needs no other file."""
    pages = Environment(
        loader=PackageLoader("stream_ssl.trained", "."), autoescape=True, undefined=StrictUndefined
    )
    shown: list[dict[str, Any]] = [
        {"hit": hit, "source": png_address(hit.image_CHW.transpose(1, 2, 0))} for hit in result.hits
    ]
    template = pages.get_template("search.html.j2")
    query = png_address(result.query_CHW.transpose(1, 2, 0))
    text = template.render(checkpoint=result.checkpoint, query=query, shown=shown)
    return text.encode(errors="replace")  # names of files may not be UTF-8
