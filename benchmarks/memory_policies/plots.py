"""The study as a picture: accuracy of every arm by stream, and accuracy against balance."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from benchmarks.memory_policies.arms import BASE
from benchmarks.memory_policies.tables import Row, by_shape, title
from stream_ssl.reproduction.spread import Spread

BASE_COLOUR, COLOUR = "#c1662f", "#2b6cb0"


def accuracies(found: Sequence[Row], path: Path) -> None:
    """A panel a stream; a dot a seed, a bar at their mean, kNN left and linear right."""
    parts = by_shape(found)
    heights = [0.8 + 0.28 * len(those) for those in parts.values()]
    figure = Figure(figsize=(9, sum(heights) + 0.3), layout="constrained")
    FigureCanvasSVG(figure)
    grid = figure.add_gridspec(len(parts), 2, height_ratios=heights)
    for line, (shape, those) in enumerate(parts.items()):
        for column, name in enumerate(("knn", "linear")):
            axes = figure.add_subplot(grid[line, column])
            _dots(axes, those, [getattr(row, name) for row in those])
            axes.set_title(
                f"{title(shape)}: {'kNN' if name == 'knn' else 'linear'}, %", fontsize=10
            )
            # One scale a column: a tenth of a point must not look like a difference.
            axes.set_xlim(*_limits([getattr(row, name) for row in found]))
            axes.tick_params(axis="y", labelleft=column == 0)
    _save(figure, path)


def balance(found: Sequence[Row], path: Path) -> None:
    """kNN accuracy against the entropy of the memory's classes: balance alone is not the goal."""
    parts = by_shape(found)
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.add_subplot()
    for number, (shape, those) in enumerate(parts.items()):
        entropy = [100 * row.entropy.mean for row in those]
        knn = [100 * row.knn.mean for row in those]
        axes.scatter(entropy, knn, s=30, color=f"C{number}", label=title(shape))
        for row, x, y in zip(those, entropy, knn, strict=True):
            axes.annotate(row.arm.name, (x, y), (4, 3), textcoords="offset points", fontsize=6)
    axes.set_xlabel("entropy of the memory's classes, % of ln 10")
    axes.set_ylabel("kNN accuracy, %")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="lower right")
    axes.margins(x=0.12)
    _save(figure, path)


def _dots(axes: Axes, those: Sequence[Row], spreads: Sequence[Spread]) -> None:
    for height, (row, spread) in enumerate(zip(those, spreads, strict=True)):
        colour = BASE_COLOUR if row.arm == BASE else COLOUR
        values = [100 * value for value in spread.values]
        axes.plot(values, [height] * len(values), "o", color=colour, alpha=0.55, markersize=5)
        axes.plot([100 * spread.mean], [height], "|", color=colour, markersize=15, mew=2)
        if row.arm == BASE:
            axes.axvline(100 * spread.mean, color=BASE_COLOUR, linewidth=0.8, linestyle="--")
    axes.set_yticks(range(len(those)), [row.arm.name for row in those], fontsize=8)
    axes.set_ylim(len(those) - 0.5, -0.5)
    axes.grid(axis="x", alpha=0.3)


def _limits(spreads: Sequence[Spread]) -> tuple[float, float]:
    values = [100 * value for spread in spreads for value in spread.values]
    room = 0.05 * (max(values) - min(values)) or 1.0
    return min(values) - room, max(values) + room


def _save(figure: Figure, path: Path) -> None:
    # Without a date, so that the same results give the same file.
    figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
