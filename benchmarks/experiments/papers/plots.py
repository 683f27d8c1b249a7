"""Plots of an experiment: measures beside the papers' figures, and their change over the steps."""

from __future__ import annotations

from pathlib import Path

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.experiments.findings import FinishedRuns
from benchmarks.experiments.papers.arms import Experiment
from benchmarks.experiments.papers.verdicts import MEASURES


def draw(experiment: Experiment, found: FinishedRuns, path: Path) -> None:
    """Draw a panel per curve, and per column of each trace, as a PNG.

    The same findings give the same bytes.
    """
    columns = [c for c in experiment.columns if any(column == c for _, column in found.results)]
    panels = len(experiment.curves) + len(experiment.traces) * len(columns)
    lines = -(-panels // 2)
    figure = Figure(figsize=(10, 3.8 * lines), layout="constrained")
    axes = list(figure.subplots(lines, 2, squeeze=False).flat)
    for name in experiment.curves:
        _curve(axes.pop(0), experiment, found, name, columns)
    for name in experiment.traces:
        for column in columns:
            _trace(axes.pop(0), experiment, found, name, column)
    for rest in axes:
        rest.set_axis_off()
    figure.savefig(path, dpi=110)


def _curve(
    axes: Axes, experiment: Experiment, found: FinishedRuns, name: str, columns: list[str]
) -> None:
    """Draw a line per row, a dot per seed, and the paper's figures as a dashed line."""
    measure, figures = MEASURES[name], experiment.paper.get(name, {})
    for row, colour in _colours(experiment).items():
        arms = [
            arm
            for arm in experiment.found(found)
            if arm.row == row and found.spread(arm.cell, name).values
        ]
        if not arms:
            continue
        at = [columns.index(arm.column) for arm in arms]
        spreads = [found.spread(arm.cell, name) for arm in arms]
        axes.plot(at, [measure.scale * one.mean for one in spreads], "-", color=colour, label=row)
        for x, one in zip(at, spreads, strict=True):
            values = [measure.scale * value for value in one.values]
            axes.plot([x] * len(values), values, "o", color=colour, alpha=0.6, markersize=4)
        known = [
            (columns.index(c), y) for (r, c), y in figures.items() if r == row and c in columns
        ]
        if known:
            at_known, known_y = zip(*sorted(known), strict=True)
            axes.plot(at_known, known_y, "--", marker="x", color=colour, alpha=0.5, linewidth=0.8)
    axes.set_xticks(range(len(columns)), columns, fontsize=8)
    axes.set_title(measure.heading + (" (dashed: the paper)" if figures else ""), fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=6, framealpha=0.5)


def _trace(axes: Axes, experiment: Experiment, found: FinishedRuns, name: str, column: str) -> None:
    """Draw a line per row, from its first seed."""
    measure = MEASURES[name]
    for arm in experiment.found(found):
        trace = found.results[arm.cell][min(found.results[arm.cell])].numbers.get(f"trace.{name}")
        if arm.column == column and trace:
            steps, values = zip(*trace, strict=True)
            scaled = [measure.scale * value for value in values]
            axes.plot(steps, scaled, label=arm.row, color=_colours(experiment)[arm.row])
    axes.set_title(f"{measure.heading}: {column}", fontsize=10)
    axes.set_xlabel("step")
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend(fontsize=6, framealpha=0.5)


def _colours(experiment: Experiment) -> dict[str, tuple[float, ...]]:
    """Return the colour of each row, the same in every panel."""
    rows = dict.fromkeys(arm.row for arm in experiment.arms)
    return {row: colormaps["tab20"](2 * n % 20 + n // 10) for n, row in enumerate(rows)}
