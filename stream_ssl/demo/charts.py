"""The report's plots, as inline SVG in the colours of the page's light or dark scheme.

C classes.
"""

from __future__ import annotations

import io
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from stream_ssl.demo.data import CLASSES
from stream_ssl.demo.measures import HOLDERS, TITLES, Holder
from stream_ssl.evaluation.plots import style
from stream_ssl.observe.scrape import Points

# matplotlib draws with stand-in colours, which the page's CSS variables replace in the SVG.
INK, MUTED, GRID = "#00000a", "#00000b", "#00000c"
STREAM, QUEUE, DUEL, PLAIN = "#00000d", "#00000e", "#00000f", "#00001a"
VARIABLES = {
    INK: "ink",
    MUTED: "muted",
    GRID: "grid",
    STREAM: "stream",
    QUEUE: "queue",
    DUEL: "duel",
    PLAIN: "plain",
}
COLOUR: Mapping[Holder, str] = {"stream": STREAM, "queue": QUEUE, "working": DUEL}

STYLE: Any = {
    **style(INK, MUTED, GRID),
    "svg.fonttype": "none",
    "svg.hashsalt": "stream-ssl",
    "axes.titlesize": 10.5,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "lines.linewidth": 1.8,
}


def class_bars(parts: Mapping[Holder, Sequence[float]], alt: str) -> Markup:
    """Plot the share of each class in stream, queue and memory; each sequence is [C]."""
    with mpl.rc_context(STYLE):
        figure, (axes,) = _figure(9.0, 3.4)
        for i, holder in enumerate(HOLDERS):
            places = [c + (i - 1) * 0.27 for c in range(len(CLASSES))]
            heights = [100 * part for part in parts[holder]]
            axes.bar(places, heights, 0.25, color=COLOUR[holder], label=TITLES[holder])
        axes.axhline(100 / len(CLASSES), color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
        axes.annotate(
            "balanced",
            (1, 100 / len(CLASSES)),
            xycoords=("axes fraction", "data"),
            xytext=(0, 3),
            textcoords="offset points",
            ha="right",
            color=MUTED,
            fontsize=9,
        )
        axes.set_xticks(range(len(CLASSES)), CLASSES)
        axes.set_xlim(-0.6, len(CLASSES) - 0.4)
        axes.set_ylabel("share of samples, %")
        axes.grid(axis="x", visible=False)
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3, borderaxespad=0.2)
        return _svg(figure, alt)


def collision_curves(true: Mapping[Holder, Points], alt: str) -> Markup:
    """Plot over time how often a sample and a slot share a class, by labels."""
    with mpl.rc_context(STYLE):
        figure, (axes,) = _figure(9.0, 3.0)
        for holder, points in true.items():
            # The wider line of the queue stays visible below the memory's line.
            width = 3.2 if holder == "queue" else 1.8
            _line(axes, points, COLOUR[holder], TITLES[holder], scale=100, width=width)
        _from_zero(axes, *true.values(), scale=100)
        _time(axes, *true.values())
        axes.set_ylabel("probability, %")
        axes.axhline(100 / len(CLASSES), color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
        axes.legend(loc="best")
        return _svg(figure, alt)


def loss_curve(points: Points, smooth: Points, alt: str) -> Markup:
    """Plot the loss at each poll, faint, and its running mean."""
    with mpl.rc_context(STYLE):
        figure, (axes,) = _figure(9.0, 2.7)
        _line(axes, points, PLAIN, "at each poll", width=1.0)
        _line(axes, smooth, DUEL, "mean over 5 s")
        axes.set_ylabel("loss, nats")
        _time(axes, points)
        axes.legend(loc="upper right", ncols=2)
        return _svg(figure, alt)


def flow_curves(received: Points, trained: Points, lag: Points, alt: str) -> Markup:
    """Plot samples per second into and out of the journal, and the learner's lag."""
    with mpl.rc_context(STYLE):
        figure, (left, right) = _figure(9.0, 2.7, columns=2)
        _line(left, received, STREAM, "received")
        _line(left, trained, DUEL, "trained, new")
        left.set_title("Samples per second", pad=10)
        left.legend(loc="best")
        _line(right, lag, DUEL, "lag")
        right.set_title("Learner's lag, seconds", pad=10)
        for axes, curves in ((left, (received, trained)), (right, (lag,))):
            _from_zero(axes, *curves)
            _time(axes, received, trained, lag)
        return _svg(figure, alt)


def accuracy_bars(rows: Sequence[tuple[str, float, str]], alt: str) -> Markup:
    """Plot a bar for each row (name, accuracy, colour), from top to bottom."""
    with mpl.rc_context(STYLE):
        figure, (axes,) = _figure(9.0, 0.5 + 0.42 * len(rows))
        names, accuracies, colours = zip(*rows, strict=True)
        values = [100 * accuracy for accuracy in accuracies]
        bars = axes.barh(names, values, 0.62, color=colours)
        axes.bar_label(bars, fmt="%.1f %%", padding=5, color=INK)
        axes.axvline(100 / len(CLASSES), color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
        axes.invert_yaxis()
        axes.set_xlim(0, 100)
        axes.set_xlabel("accuracy on held-out images, %; dashed: guessing")
        axes.grid(axis="y", visible=False)
        axes.tick_params(axis="y", labelcolor=INK, length=0)
        return _svg(figure, alt)


def _figure(width: float, height: float, columns: int = 1) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasSVG(figure)
    return figure, [figure.add_subplot(1, columns, i + 1) for i in range(columns)]


def _line(
    axes: Axes, points: Points, colour: str, label: str, scale: float = 1.0, width: float = 1.8
) -> None:
    times = [time for time, _ in points]
    axes.plot(times, [scale * y for _, y in points], color=colour, label=label, linewidth=width)


def _time(axes: Axes, *curves: Points) -> None:
    axes.set_xlabel("seconds since the start")
    axes.set_xlim(0, max((time for points in curves for time, _ in points), default=1.0))


def _from_zero(axes: Axes, *curves: Points, scale: float = 1.0) -> None:
    highest = max((value for points in curves for _, value in points), default=0.0)
    axes.set_ylim(0, 1.08 * scale * highest or 1.0)


def _svg(figure: Figure, alt: str) -> Markup:
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(<svg [^>]*?)width="[^"]*pt"', r"\1", text, count=1)
    text = re.sub(r'(<svg [^>]*?)height="[^"]*pt"', r"\1", text, count=1)
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, f"var(--{variable})")
    # The ids of all figures on a page must differ.
    prefix = f"f{zlib.crc32(alt.encode()):x}-"
    text = re.sub(r'\bid="', f'id="{prefix}', text)
    text = re.sub(r'href="#|url\(#', lambda found: found.group() + prefix, text)
    label = f'role="img" aria-label="{escape(alt)}"'
    return Markup(text.replace("<svg ", f"<svg {label} ", 1))  # noqa: S704  our own figure
