"""The study in pictures: its streams, and for each what each memory reaches of what is possible."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from benchmarks.study.arms import BASE, USERS
from benchmarks.study.streams import STREAMS, TITLES
from benchmarks.study.tables import CEILING, NAMES, Row, by_stream
from stream_ssl.reproduction.data import Images

PICTURED = ("shuffled", "parked", "stalls", "video", "crawl", "shift")
COLUMNS, LINES, EVERY = 40, 2, 8  # of a stream's pictures; a frame of so many is shown
BASE_COLOUR, COLOUR, REST = "#c1662f", "#2a78d6", "#9aa5b1"


def streams(images: Images, path: Path, seed: int = 0) -> None:
    """Two lines of frames of each stream, every eighth, in their order; as the path's ending says.

    Args:
        images: what the streams are made of.
        path: of the picture.
        seed: of the streams.
    """
    figure = Figure(figsize=(10, 0.75 * len(PICTURED)), layout="constrained")
    for axes, name in zip(figure.subplots(len(PICTURED)), PICTURED, strict=True):
        samples = itertools.islice(
            STREAMS[name](images, seed).samples(), 0, COLUMNS * LINES * EVERY, EVERY
        )
        pixels = [np.frombuffer(sample.data, np.uint8).reshape(32, 32, 3) for sample, _ in samples]
        tiled = np.stack(pixels).reshape(LINES, COLUMNS, 32, 32, 3).swapaxes(1, 2)
        axes.imshow(tiled.reshape(LINES * 32, COLUMNS * 32, 3))
        axes.set_title(TITLES[name], fontsize=8, loc="left", pad=2)
        axes.set_axis_off()
    figure.savefig(path, dpi=140)


def accuracies(found: Sequence[Row], path: Path, ours: str) -> None:
    """A panel a stream as users have it: kNN accuracy of the arms that have a title, a dot a seed;
    dashed, the queue on the shuffled stream. Without such runs nothing is written.

    Args:
        found: what `tables.rows` found.
        path: of the SVG.
        ours: name of the arm to highlight.
    """
    shown = [row for row in found if row.arm in NAMES and row.stream in USERS]
    if not shown:
        return
    parts = by_stream(shown)
    ceiling = [row for row in shown if (row.stream, row.arm) == (CEILING, BASE.name)]
    figure = Figure(figsize=(8, 0.5 + sum(0.5 + 0.24 * len(p) for p in parts.values())))
    figure.set_layout_engine("constrained")
    FigureCanvasSVG(figure)
    heights = [0.5 + 0.24 * len(those) for those in parts.values()]
    panels = figure.subplots(len(parts), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (stream, those) in zip(panels, parts.items(), strict=True):
        _bars(axes, those, ours)
        axes.set_title(stream, fontsize=10, loc="left")
        for row in ceiling:
            axes.axvline(100 * row.values["knn"].mean, color="#444", linestyle="--", linewidth=1)
    panels[-1].set_xlabel("kNN accuracy, %")
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "study"}):  # text stays text
        # Without a date, so that the same results give the same file.
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})


def _bars(axes: Axes, those: Sequence[Row], ours: str) -> None:
    for height, row in enumerate(those):
        values = [100 * value for value in row.values["knn"].values]
        colour = {BASE.name: BASE_COLOUR, ours: COLOUR}.get(row.arm, REST)
        axes.barh(height, sum(values) / len(values), color=colour, height=0.7)
        axes.plot(values, [height] * len(values), "o", color="#222", markersize=2.5)
    axes.set_yticks(range(len(those)), [NAMES[row.arm] for row in those], fontsize=8)
    axes.set_ylim(len(those) - 0.5, -0.5)
    axes.spines[["top", "right"]].set_visible(False)
