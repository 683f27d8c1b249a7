"""The report of a curated set: counts, a contact sheet and examples of near-duplicates.

Shapes: K pictures kept, N pictures of a sheet, C H W image.
"""

from __future__ import annotations

import base64
import io
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from jinja2 import Environment, PackageLoader, StrictUndefined
from torch import Tensor
from torch.nn.functional import interpolate, pad

from stream_ssl.curation.curator import Curator
from stream_ssl.memory.index import kmeans
from stream_ssl.memory.stats import effective_cells
from stream_ssl.pictures import image_of, tiled
from stream_ssl.rate_limited_logger import printable

COLUMNS: Final = 24
SHEET: Final = 480  # pictures on the contact sheet
CELLS: Final = 48  # groups of similar pictures, in which the sheet is sorted
TILE: Final = 128  # pixels, the longest side of a picture in the report
GAP: Final = 2  # pixels between two pictures of a sheet
WHITE: Final = 255
ROWS: Final = 20  # rows of a table
REASONS: Final = {"pixels": "pixels: too many pixels or scans", "expensive": "too slow to decode"}
"""Reasons that a reader of the report would not understand, in words."""


def write_report(curator: Curator, path: Path, names: Sequence[str] = ()) -> None:
    """Write the report as one HTML file that needs no other file.

    Args:
        curator: the curator at the end of its pass.
        names: the names of the classes, by label.
    """
    kept, counts = curator.kept, curator.progress
    dropped_sources: Counter[str] = Counter()
    dropped_classes: Counter[int] = Counter()
    for one in curator.dropped():
        dropped_sources[one.source] += 1
        dropped_classes.update([] if one.label is None else [one.label])
    sources = Counter(one.source for one in kept)
    classes = Counter(one.label for one in kept if one.label is not None)
    shares_C = np.array(list(classes.values()), float) / max(1, sum(classes.values()))
    pair_2PCHW = curator.pair_P2CHW.transpose(0, 1)
    pages = Environment(
        loader=PackageLoader("stream_ssl.curation", "."), autoescape=True, undefined=StrictUndefined
    )
    path.write_text(
        pages.get_template("report.html.j2").render(
            counts=counts,
            bad=sum(counts.bad.values()),
            sources=_table(sources, dropped_sources),
            source_count=len(sources + dropped_sources),
            classes=[
                (_class_name(names, label), classes[label], dropped_classes[label])
                for label, _ in (classes + dropped_classes).most_common(ROWS)
            ],
            reasons=REASONS,
            class_count=len(classes + dropped_classes),
            kept_classes=len(classes),
            effective_classes=float(np.exp(-(shares_C * np.log(shares_C)).sum())),
            clusters=_clusters(curator.memory.embeddings),
            cells=CELLS,
            sheet=_sheet(_similar_together(curator), COLUMNS),
            pairs=_sheet(pair_2PCHW.flatten(0, 1), max(1, pair_2PCHW.shape[1])),
        ),
        encoding="utf-8",
        errors="replace",  # names of files may not be UTF-8
    )


def _class_name(names: Sequence[str], label: int) -> str:
    return printable(names[label]) if label < len(names) else str(label)


def _table(kept: Counter[Any], dropped: Counter[Any]) -> list[tuple[str, int, int]]:
    """Return (name, kept, dropped) of the most frequent names."""
    names = (kept + dropped).most_common(ROWS)
    return [(str(name), kept[name], dropped[name]) for name, _ in names]


def _clusters(z_KD: Tensor) -> float | None:
    """Return the effective number of groups of similar pictures; None for fewer than CELLS."""
    return effective_cells(z_KD, CELLS, seed=0) if len(z_KD) >= CELLS else None


def _similar_together(curator: Curator) -> Tensor:
    """Return up to SHEET pictures, similar ones side by side, uint8 [N, C, H, W]."""
    z_KD = curator.memory.embeddings
    order_K = torch.arange(len(z_KD))
    if len(z_KD) >= CELLS:
        cell_K = kmeans(z_KD, CELLS, seed=0)[1]
        order_K = cell_K.argsort(stable=True)
    chosen_N = torch.linspace(0, len(order_K) - 1, min(SHEET, len(order_K))).long()
    return curator.memory.images_of(order_K[chosen_N])


def _sheet(image_NCHW: Tensor, columns: int) -> str:
    """Return a JPEG of the pictures in rows, in base64; empty without pictures."""
    if not len(image_NCHW):
        return ""
    if image_NCHW.shape[-1] > TILE:
        image_NCHW = torch.cat(
            [_small(part_nCHW) for part_nCHW in torch.split(image_NCHW, COLUMNS)]
        )
    framed_NHWC = pad(image_NCHW, (0, GAP, 0, GAP), value=WHITE).permute(0, 2, 3, 1).numpy()
    file = io.BytesIO()
    image_of(tiled(framed_NHWC, columns, WHITE)).save(file, "JPEG", quality=85)
    return base64.b64encode(file.getvalue()).decode()


def _small(image_NCHW: Tensor) -> Tensor:
    """Return the pictures with a side of TILE pixels, so that a report keeps its size."""
    small_NCHW = interpolate(image_NCHW.float(), (TILE, TILE), mode="bilinear", antialias=True)
    return small_NCHW.round().to(torch.uint8)
