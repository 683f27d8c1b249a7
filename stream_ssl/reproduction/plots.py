"""Findings as pictures: measures beside the papers', and what changed over the steps."""

from __future__ import annotations

from pathlib import Path

from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from stream_ssl.reproduction.findings import MEASURES, Found


def draw(found: Found, path: Path) -> None:
    """A panel a measure of `curves`, and below a panel a column of each of `traces`. The same
    findings give the same bytes."""
    experiment = found.experiment
    columns = [c for c in experiment.columns if any(arm.column == c for arm in found.arms())]
    panels = len(experiment.curves) + len(experiment.traces) * len(columns)
    lines = -(-panels // 2)
    with rc_context({"svg.hashsalt": experiment.name, "svg.fonttype": "none"}):
        figure = Figure(figsize=(10, 3.8 * lines), layout="constrained")
        FigureCanvasSVG(figure)
        axes = list(figure.subplots(lines, 2, squeeze=False).flat)
        for name in experiment.curves:
            _curve(axes.pop(0), found, name, columns)
        for name in experiment.traces:
            for column in columns:
                _trace(axes.pop(0), found, name, column)
        for rest in axes:
            rest.set_axis_off()
        # Without a date, so that the same results give the same file.
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})


def _curve(axes: Axes, found: Found, name: str, columns: list[str]) -> None:
    """A line a row; a dot a seed; the paper's dashed."""
    measure, figures = MEASURES[name], found.experiment.paper.get(name, {})
    for row, colour in _colours(found).items():
        arms = [arm for arm in found.arms() if arm.row == row and found.spread(arm, name).values]
        if not arms:
            continue
        at = [columns.index(arm.column) for arm in arms]
        spreads = [found.spread(arm, name) for arm in arms]
        axes.plot(at, [measure.scale * one.mean for one in spreads], "-", color=colour, label=row)
        for x, one in zip(at, spreads, strict=True):
            values = [measure.scale * value for value in one.values]
            axes.plot([x] * len(values), values, "o", color=colour, alpha=0.6, markersize=4)
        known = [
            (columns.index(c), y) for (r, c), y in figures.items() if r == row and c in columns
        ]
        if known:
            at_known, told = zip(*sorted(known), strict=True)
            axes.plot(at_known, told, "--", marker="x", color=colour, alpha=0.5, linewidth=0.8)
    axes.set_xticks(range(len(columns)), columns, fontsize=8)
    axes.set_title(measure.heading + (" (dashed: the paper)" if figures else ""), fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=6, framealpha=0.5)


def _trace(axes: Axes, found: Found, name: str, column: str) -> None:
    """A line a row, of its first seed."""
    measure = MEASURES[name]
    for arm in found.arms():
        trace = found.results[arm.cell][min(found.results[arm.cell])].numbers.get(f"trace.{name}")
        if arm.column == column and trace:
            steps, values = zip(*trace, strict=True)
            scaled = [measure.scale * value for value in values]
            axes.plot(steps, scaled, label=arm.row, color=_colours(found)[arm.row])
    axes.set_title(f"{measure.heading}: {column}", fontsize=10)
    axes.set_xlabel("step")
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend(fontsize=6, framealpha=0.5)


def _colours(found: Found) -> dict[str, tuple[float, ...]]:
    """The same for a row in every panel."""
    rows = dict.fromkeys(arm.row for arm in found.experiment.arms)
    return {row: colormaps["tab20"](2 * n % 20 + n // 10) for n, row in enumerate(rows)}
