"""The live page of the demo at two sizes, and the log lines without a terminal."""

import io
import re

import pytest
from demo_history import made_up_history
from rich.console import Console

from stream_ssl.demo.data import CLASSES
from stream_ssl.demo.display import (
    DemoProgress,
    Display,
    Share,
    Sparkline,
    clock,
    line,
    page,
    resample,
)
from stream_ssl.observe.scrape import History


def drawn(renderable, width: int, encoding: str = "utf-8") -> list[str]:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True)
    console = Console(file=file, width=width, force_terminal=True, color_system=None)
    console.print(renderable)
    file.seek(0)
    return file.read().splitlines()


@pytest.mark.parametrize("width", [80, 150])
def test_the_page_shows_every_figure_within_the_size_of_the_terminal(width):
    lines = drawn(page(made_up_history(60), DemoProgress(120, "training", 60), width), width)
    text = "\n".join(lines)
    assert len(lines) <= 23  # a terminal of 24 lines keeps one for the cursor
    assert max(map(len, lines)) <= width
    assert "1:00 of 2:00" in text
    assert "● training" in text
    assert re.search(r"samples/s +400", text)
    assert re.search(r"MB/s +0\.31", text)
    assert re.search(r"steps +360 \(6\.0/s\)", text)
    assert re.search(r"trained, new +22,800", text)
    for name in CLASSES:
        assert name in text
    assert re.search(r"effective classes +3\.0 of 10 +3\.0 of 10 +9\.\d of 10", text)
    dominant = next(drawn_line for drawn_line in lines if "T-shirt/top" in drawn_line)
    assert re.findall(r"(\d+)%", dominant) == ["75", "75", "20"]


def test_bars_have_the_length_of_their_shares():
    assert drawn(Share(0.5, 1.0, "none"), 25) == ["██████████" + " " * 10 + "  50%"]
    assert drawn(Share(0.25, 0.5, "none"), 25)[0].count("█") == 10
    assert drawn(Share(0.0, 0.0, "none"), 25) == [" " * 20 + "   0%"]


def test_the_page_uses_ascii_marks_if_the_encoding_is_ascii():
    lines = drawn(
        page(made_up_history(60), DemoProgress(120, "training", 60), 80, True), 80, "ascii"
    )
    assert "* training" in "\n".join(lines)
    assert "####" in next(drawn_line for drawn_line in lines if "T-shirt/top" in drawn_line)


def test_the_page_of_a_starting_demo_fits_a_terminal():
    lines = drawn(page(History(), DemoProgress(120), 80), 80)
    assert "● starting" in "\n".join(lines)
    assert len(lines) <= 23


def test_the_page_shows_all_classes_in_a_narrow_terminal():
    lines = drawn(page(made_up_history(60), DemoProgress(120, "training", 60), 60), 60)
    assert max(map(len, lines)) <= 60
    assert sum(name in "\n".join(lines) for name in CLASSES) == 10


def test_sparkline_spans_lowest_to_highest():
    assert drawn(Sparkline([0, 1, 2, 3, 4, 5, 6, 7]), 8) == ["▁▂▃▄▅▆▇█"]
    assert drawn(Sparkline([7, 7], span=(0, 16)), 4) == ["▄▄  "]
    assert drawn(Sparkline([]), 4) == ["    "]


def test_resample_averages_neighbouring_values():
    assert resample([1, 3, 5, 7], 2) == [2, 6]
    assert resample([1, 2], 10) == [1, 2]


def test_clock_formats_minutes_and_seconds():
    assert (clock(65), clock(3.9)) == ("1:05", "0:03")


def test_the_log_line_contains_the_main_figures_of_the_page():
    text = line(made_up_history(60), DemoProgress(120, "training", 60), 60)
    assert text.startswith("[1:00] training: 400 samples/s, 0.31 MB/s, lag 0.6 s, step 360, loss ")
    assert "queue collides 57.2%" in text
    assert "effective classes: stream 3.0, queue 3.0, DUEL memory 9." in text
    assert "nan" not in line(History(), DemoProgress(120, "streaming"), 0)


def test_the_display_prints_a_line_at_intervals_and_stages_without_a_terminal():
    now = 0.0
    file = io.StringIO()
    with Display(
        made_up_history(10), DemoProgress(120), Console(file=file), every=5, now=lambda: now
    ) as shown:
        shown.update("streaming")
        now = 1.0
        shown.update()
        now = 5.0
        shown.update()
        now = 6.0
        shown.update("checkpoint", "writing the checkpoint")
        now = 79.0
        shown.update("report")
    lines = file.getvalue().splitlines()
    assert [text.split(":")[1].split("]")[1].strip() for text in lines] == [
        "streaming",
        "streaming",
        "checkpoint",
        "report",
    ]
    assert [text[: text.index("]") + 1] for text in lines] == [
        "[0:00]",
        "[0:05]",
        "[0:06]",
        "[1:19]",
    ]
    assert lines[2].endswith("writing the checkpoint")
    assert "\x1b" not in file.getvalue()


def test_the_display_draws_the_page_in_a_terminal():
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=80, height=24)
    with Display(made_up_history(10), DemoProgress(120), console) as shown:
        shown.update("training")
    assert "Receiver" in file.getvalue()
    assert "● training" in file.getvalue()
