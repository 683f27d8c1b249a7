"""The plots of the report, as PNG.

Shapes: C classes, Q queries, F features, P pairs.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, fontManager
from matplotlib.ft2font import FT2Font
from matplotlib.patheffects import withStroke
from torch import Tensor

from stream_ssl.evaluation.checks import as_unit_rows
from stream_ssl.evaluation.geometry import class_similarity, pair_similarities

# Fonts for other scripts often have one weight, which needs no warning.
logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)

MAPPED = 3000  # largest number of queries on the map
WRITTEN = 24  # largest number of classes whose names and shares are written
LONGEST = 28  # characters of a class's name; longer ones would leave no room for the plot
NARROWEST = 0.99  # largest cosine at which the histogram of cosines begins
INK, MUTED, GRID = "#1c2127", "#667079", "#e3e7eb"
INTRA, INTER = "#1668c7", "#b9770e"


def style(ink: str, muted: str, grid: str) -> Any:
    """Return all of matplotlib's settings for a plot in these colours.

    They replace those of the user's matplotlibrc, such as text.usetex, which needs LaTeX.
    """
    defaults = mpl.rcParamsDefault.items()
    return {
        **{name: value for name, value in defaults if not name.startswith("backend")},
        "font.family": "sans-serif",
        "font.size": 10,
        "text.color": ink,
        "text.parse_math": False,  # names of classes may hold dollar signs
        "axes.edgecolor": grid,
        "axes.labelcolor": muted,
        "axes.titlesize": 11,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "xtick.color": grid,
        "ytick.color": grid,
        "xtick.labelcolor": muted,
        "ytick.labelcolor": muted,
        "legend.frameon": False,
    }


STYLE = style(INK, MUTED, GRID)


def _style(names: Sequence[str]) -> Any:
    """Return the style, with installed fonts for characters of the names that the first one lacks.

    A character that no font has is drawn as a box, by matplotlib's font of last resort.
    """
    families, lacking = ["sans-serif"], {ord(character) for name in names for character in name}
    with mpl.rc_context(STYLE):
        lacking -= FT2Font(findfont(FontProperties(family=["sans-serif"]))).get_charmap().keys()
    for font in sorted(fontManager.ttflist, key=lambda font: font.name) if lacking else []:
        if font.name.startswith("Last Resort"):
            continue
        try:
            found = lacking & FT2Font(font.fname).get_charmap().keys()
        except (OSError, RuntimeError):  # a font that was removed, or that FreeType cannot read
            continue
        if found:
            families.append(font.name)
            lacking -= found
    return {**STYLE, "font.family": families}


def confusion_plot(path: Path, confusion_CC: Tensor, names: Sequence[str], title: str) -> None:
    """Plot the share of each class's queries, in per cent, by predicted class (column)."""
    names = _shortened(names)
    share_CC = 100 * confusion_CC.double() / confusion_CC.sum(dim=1, keepdim=True).clamp_min(1)
    few = len(names) <= WRITTEN
    side = min(9.0, 2.6 + 0.42 * len(names)) if few else 7.5
    with mpl.rc_context(_style(names)):
        figure, axes = _figure(side + 0.6, side)
        _shares(axes, share_CC.numpy(), title, "queries of the class, %")
        axes.set_xlabel("taken for")
        axes.set_ylabel("class")
        if few:
            _name_columns(axes, names, longest=3)
            axes.set_yticks(range(len(names)), list(names))
            for (row, column), value in np.ndenumerate(share_CC.numpy()):
                if value >= 0.5:
                    _write(axes, row, column, value, f"{value:.0f}", fontsize=8)
        _save(figure, path)


def map_plot(
    path: Path, feature_QF: Tensor, label_Q: Tensor, classes: Sequence[int], names: Sequence[str]
) -> None:
    """Plot the queries on the first two principal components of their unit-norm features."""
    names = _shortened(names)
    rows = torch.linspace(0, len(label_Q) - 1, min(MAPPED, len(label_Q))).long()
    place_Q2, shares = principal_plane(feature_QF[rows])
    # A random order, because otherwise the last class would cover the others.
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    with mpl.rc_context(_style(names)):
        figure, axes = _figure(8.2, 6.2)
        place_C = torch.searchsorted(torch.tensor(classes), label_Q[rows])
        colours = _colours(len(classes))
        axes.scatter(
            place_Q2[order, 0],
            place_Q2[order, 1],
            s=9,
            linewidths=0,
            alpha=0.75,
            c=colours[place_C[order].numpy()],
        )
        axes.set_title("Queries on the plane of most variance (PCA)", pad=12)
        axes.set_xlabel(f"first component, {100 * shares[0]:.0f} % of the variance")
        axes.set_ylabel(f"second component, {100 * shares[1]:.0f} %")
        axes.set_aspect("equal", adjustable="datalim")
        if len(names) <= WRITTEN:
            for number, name in enumerate(names):
                _name_centre(axes, place_Q2[place_C == number], name)
            axes.legend(
                # Explicit names: matplotlib leaves out labels that begin with an underscore.
                [axes.scatter([], [], s=30, color=colour) for colour in colours],
                list(names),
                loc="center left",
                bbox_to_anchor=(1.01, 0.5),
                title="class",
                handletextpad=0.2,
            )
        _save(figure, path)


def _name_centre(axes: Axes, place_Q2: Tensor, name: str) -> None:
    """Write the name of a class at the mean of its queries, legible on any background."""
    if len(place_Q2) == 0:
        return
    x, y = place_Q2.mean(dim=0).tolist()
    halo = [withStroke(linewidth=4, foreground="white")]
    at: Any = {"ha": "center", "va": "center", "fontweight": "bold", "fontsize": 11}
    axes.text(x, y, name, color=INK, path_effects=halo, **at)


def principal_plane(feature_QF: Tensor) -> tuple[Tensor, tuple[float, float]]:
    """Return coordinates [Q, 2] on the two axes of largest variance, and each axis's share of it.

    The axes are exact eigenvectors of the covariance. Their sign makes the largest loading
    positive.
    """
    row_QF = as_unit_rows(feature_QF).double()
    row_QF = row_QF - row_QF.mean(dim=0)
    if row_QF.shape[1] < 2:
        row_QF = torch.cat([row_QF, torch.zeros_like(row_QF)], dim=1)
    value_F, axis_FF = torch.linalg.eigh(row_QF.T @ row_QF)
    axis_F2 = axis_FF[:, -2:].flip(1)
    lead_2 = axis_F2.abs().argmax(dim=0)
    axis_F2 = axis_F2 * axis_F2.gather(0, lead_2[None]).sign()
    total = max(float(value_F.sum()), 1e-12)
    return row_QF @ axis_F2, (float(value_F[-1]) / total, float(value_F[-2]) / total)


def similarity_plot(path: Path, feature_QF: Tensor, label_Q: Tensor) -> None:
    """Plot the cosines of pairs of queries, of one class and of two, with their means."""
    # Rounding leaves some cosines above 1.
    intra_P, inter_P = (of_P.clamp(max=1.0) for of_P in pair_similarities(feature_QF, label_Q))
    whole = class_similarity(feature_QF, label_Q)
    # A collapsed encoder gives all pairs the same cosine, but a histogram needs a range.
    low = min(float(intra_P.min()), float(inter_P.min()), NARROWEST)
    bins = np.linspace(low, 1.0, 81).tolist()
    with mpl.rc_context(STYLE):
        figure, axes = _figure(7.6, 3.8)
        for cosine_P, mean, colour, name in (
            (inter_P, whole.inter, INTER, "two classes"),
            (intra_P, whole.intra, INTRA, "one class"),
        ):
            axes.hist(
                cosine_P.numpy(),
                bins,
                density=True,
                histtype="stepfilled",
                facecolor=(*mpl.colors.to_rgb(colour), 0.22),
                edgecolor=colour,
                linewidth=1.4,
                label=f"pairs of {name}, mean {mean:.3f}",
            )
            axes.axvline(mean, color=colour, linewidth=1.2, linestyle=(0, (4, 3)))
        axes.set_title("Cosine similarity of pairs of queries", pad=30)
        axes.set_xlabel("cosine")
        axes.set_ylabel("density")
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        axes.set_xlim(low, 1.0)
        axes.legend(loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncols=2, borderaxespad=0.2)
        _save(figure, path)


def continual_plot(path: Path, accuracy_TT: Any, tasks: Sequence[str]) -> None:
    """Plot the accuracy on each task (column) after each stage (row), in per cent."""
    share_TT = 100 * np.asarray(accuracy_TT)
    side = min(9.0, 2.6 + 0.55 * len(tasks))
    with mpl.rc_context(_style(tasks)):
        figure, axes = _figure(side + 0.8, side)
        _shares(axes, share_TT, "kNN accuracy on each task after each stage", "accuracy, %")
        axes.set_xlabel("task: classes")
        axes.set_ylabel("after task")
        _name_columns(axes, tasks, longest=5)
        axes.set_yticks(range(len(tasks)), [str(stage + 1) for stage in range(len(tasks))])
        for (row, column), value in np.ndenumerate(share_TT):
            weight = "bold" if row == column else "normal"
            _write(axes, row, column, value, f"{value:.1f}", fontweight=weight)
        _save(figure, path)


def _shares(axes: Axes, share_CC: Any, title: str, meaning: str) -> None:
    """Draw shares in per cent as squares, with a scale."""
    shown = axes.imshow(share_CC, cmap="Blues", vmin=0, vmax=100)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    axes.set_title(title, pad=12)
    bar = axes.figure.colorbar(shown, ax=axes, shrink=0.7, pad=0.03)
    bar.outline.set_visible(False)
    bar.set_label(meaning)


def _name_columns(axes: Axes, names: Sequence[str], longest: int) -> None:
    """Write the names below the columns, turned if one of them is longer than `longest`."""
    long = max(map(len, names)) > longest
    turn: Any = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"} if long else {}
    axes.set_xticks(range(len(names)), list(names), **turn)


def _shortened(names: Sequence[str]) -> list[str]:
    """Return the names with at most LONGEST characters: their beginning and their end."""
    half = (LONGEST - 1) // 2
    return [name if len(name) <= LONGEST else f"{name[:half]}…{name[-half:]}" for name in names]


def _write(axes: Axes, row: int, column: int, value: float, text: str, **style: Any) -> None:
    """Write a share into its square."""
    colour = "white" if value > 55 else INK
    axes.text(column, row, text, ha="center", va="center", color=colour, **style)


def _colours(count: int) -> Any:
    """Return RGBA colours [C, 4]."""
    if count <= 10:
        return mpl.colormaps["tab10"](np.arange(count))
    if count <= 20:
        return mpl.colormaps["tab20"](np.arange(count))
    return mpl.colormaps["turbo"](np.linspace(0.03, 0.97, count))


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained", dpi=140)
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def _save(figure: Figure, path: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # see `_style`
        figure.savefig(path, format="png", facecolor="white", metadata={"Software": None})
