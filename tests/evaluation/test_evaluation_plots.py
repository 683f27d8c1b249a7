"""Plots for few and many classes; the plane against a decomposition, and short names."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import matplotlib as mpl
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image

from stream_ssl.evaluation import plots
from stream_ssl.evaluation.report import short


@pytest.mark.parametrize("classes", [2, 15, 120])
def test_plots_are_drawn_for_any_number_of_classes(tmp_path: Path, classes: int) -> None:
    label = torch.arange(4 * classes) % classes
    rows = torch.randn(len(label), 8, generator=torch.Generator().manual_seed(0))
    names = [f"class {c}" for c in range(classes)]
    names[0] = "$\\frac$"  # no formula
    counts = torch.eye(classes, dtype=torch.int64) * 4
    plots.confusion_plot(tmp_path / "confusion.png", counts, names, "all right")
    plots.map_plot(tmp_path / "map.png", rows, label, list(range(classes)), names)
    plots.similarity_plot(tmp_path / "similarity.png", rows, label)
    tasks = [str(c) for c in range(min(classes, 12))]
    plots.continual_plot(tmp_path / "continual.png", torch.rand(len(tasks), len(tasks)), tasks)
    for name in ("confusion", "map", "similarity", "continual"):
        with Image.open(tmp_path / f"{name}.png") as image:
            assert 300 < min(image.size) <= max(image.size) < 2000
            assert len(set(image.convert("L").tobytes())) > 10


def test_fonts_are_chosen_by_the_characters_of_the_names(monkeypatch: pytest.MonkeyPatch) -> None:
    charmaps = {"a": "A", "latin": "shi", "cjk": "sh\u98de\u673a", "Last Resort": "\u98de\u16a0"}
    sans = plots.findfont(plots.FontProperties(family=["sans-serif"]))

    def opened(path: str) -> SimpleNamespace:
        if path == "gone":
            raise FileNotFoundError(path)
        return SimpleNamespace(get_charmap=lambda: dict.fromkeys(map(ord, charmaps[path]), 1))

    fonts = [SimpleNamespace(name=name, fname=name) for name in ("gone", *charmaps)]
    monkeypatch.setattr(plots, "fontManager", SimpleNamespace(ttflist=fonts))
    charmaps[sans] = "shi"
    monkeypatch.setattr(plots, "FT2Font", opened)
    assert plots._style(["shi", "his"])["font.family"] == ["sans-serif"]
    assert plots._style(["shi", "\u98de\u673a \u16a0"])["font.family"] == ["sans-serif", "cjk"]


def test_the_legend_names_each_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Figure] = []
    monkeypatch.setattr(plots, "_save", lambda figure, _path: figures.append(figure))
    rows = torch.randn(9, 4, generator=torch.Generator().manual_seed(0))
    plots.map_plot(tmp_path / "map.png", rows, torch.arange(9) % 3, [0, 1, 2], ["_a", "$b$", "c"])
    (legend,) = (axes.get_legend() for axes in figures[0].axes)
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["_a", "$b$", "c"]


def test_long_and_foreign_names_leave_room_for_the_plot(tmp_path: Path) -> None:
    """Warnings are errors here: matplotlib warns of missing glyphs, and of plots without room."""
    names = ["a" * 150, "\U00010900 \u65e5", "c"]
    rows = torch.randn(9, 4, generator=torch.Generator().manual_seed(0))
    plots.confusion_plot(tmp_path / "a.png", torch.eye(3, dtype=torch.int64), names, "title")
    plots.map_plot(tmp_path / "b.png", rows, torch.arange(9) % 3, [0, 1, 2], names)
    for name in ("a.png", "b.png"):
        with Image.open(tmp_path / name) as image:
            assert max(image.size) < 2000


def test_plots_do_not_depend_on_the_user_s_matplotlibrc(tmp_path: Path) -> None:
    confusion_CC, names = torch.eye(2, dtype=torch.int64), ["a_cat", "a_dog"]
    plots.confusion_plot(tmp_path / "plain.png", confusion_CC, names, "title")
    with mpl.rc_context({"text.usetex": True, "savefig.dpi": 5, "axes.grid": True}):
        plots.confusion_plot(tmp_path / "own.png", confusion_CC, names, "title")
    assert (tmp_path / "own.png").read_bytes() == (tmp_path / "plain.png").read_bytes()


def test_similarities_of_a_collapsed_encoder_are_drawn(tmp_path: Path) -> None:
    for seed in range(8):  # the cosine of equal rows is rounded up for some, and down for others
        row = torch.rand(1, 16, generator=torch.Generator().manual_seed(seed))
        plots.similarity_plot(tmp_path / "same.png", row.repeat(40, 1), torch.arange(40) % 4)


def test_the_principal_plane_is_spanned_by_the_first_two_singular_vectors() -> None:
    rows = torch.randn(50, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    place, shares = plots.principal_plane(rows)
    unit = torch.nn.functional.normalize(rows, dim=1)
    centred = unit - unit.mean(dim=0)
    left, singular, _ = torch.linalg.svd(centred, full_matrices=False)
    assert torch.allclose(place.abs(), (left[:, :2] * singular[:2]).abs(), atol=1e-10)
    expected = (singular[:2] ** 2 / (singular**2).sum()).tolist()
    assert shares == pytest.approx(tuple(expected))


def test_a_single_feature_has_a_principal_plane() -> None:
    place, shares = plots.principal_plane(torch.tensor([[1.0], [-1.0], [2.0]]))
    assert place.shape == (3, 2)
    assert shares == pytest.approx((1.0, 0.0))


def test_short_abbreviates_the_list_of_classes_of_a_task() -> None:
    assert short([0, 1, 2, 3]) == "0-3"
    assert short([0, 1]) == "0, 1"
    assert short([5, 3, 9, 1, 2]) == "5, 3, 9, 1, …"
