"""Pictures of the study: its streams, and the accuracy of each memory on each stream."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.experiments.data import LabelledImages
from benchmarks.experiments.findings import FinishedRuns
from benchmarks.experiments.study.arms import BASE, USERS
from benchmarks.experiments.study.report import CEILING, NAMES, by_stream
from benchmarks.experiments.study.streams import STREAMS, TITLES

PICTURED = ("shuffled", "parked", "stalls", "video", "crawl", "shift")
COLUMNS, LINES, EVERY = 40, 2, 8  # columns and lines of frames; every EVERY-th frame is shown
BASE_COLOUR, COLOUR, REST = "#c1662f", "#2a78d6", "#9aa5b1"


def streams(images: LabelledImages, path: Path, seed: int = 0) -> None:
    """Draw two rows of frames for each stream. They show every eighth frame, in order."""
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


def accuracies(found: FinishedRuns, path: Path, ours: str) -> None:
    """Draw a panel per stream with the kNN accuracy of the arms that have a title, a dot per seed.

    The dashed line is the queue on the shuffled stream. If there are no such runs, no file is
    written.
    """
    parts = {
        stream: [arm for arm in arms if arm in NAMES]
        for stream, arms in by_stream(found).items()
        if stream in USERS and any(arm in NAMES for arm in arms)
    }
    if not parts:
        return
    heights = [0.5 + 0.24 * len(arms) for arms in parts.values()]
    figure = Figure(figsize=(8, 0.5 + sum(heights)), layout="constrained")
    panels = figure.subplots(len(parts), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (stream, arms) in zip(panels, parts.items(), strict=True):
        _bars(axes, found, stream, arms, ours)
        axes.set_title(stream, fontsize=10, loc="left")
        if CEILING in found.results:
            ceiling = 100 * found.spread(CEILING, "knn").mean
            axes.axvline(ceiling, color="#444", linestyle="--", linewidth=1)
    panels[-1].set_xlabel("kNN accuracy, %")
    figure.savefig(path, dpi=110)


def _bars(axes: Axes, found: FinishedRuns, stream: str, arms: Sequence[str], ours: str) -> None:
    for height, arm in enumerate(arms):
        values = [100 * value for value in found.spread((arm, stream), "knn").values]
        colour = {BASE.name: BASE_COLOUR, ours: COLOUR}.get(arm, REST)
        axes.barh(height, sum(values) / len(values), color=colour, height=0.7)
        axes.plot(values, [height] * len(values), "o", color="#222", markersize=2.5)
    axes.set_yticks(range(len(arms)), [NAMES[arm] for arm in arms], fontsize=8)
    axes.set_ylim(len(arms) - 0.5, -0.5)
    axes.spines[["top", "right"]].set_visible(False)
