"""The reports of `curate` and of the demo, in a real Chromium on a phone."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from demo_history import (
    made_up_evaluation,
    made_up_facts,
    made_up_history,
    made_up_replay,
)
from PIL import Image

from stream_ssl.app.commands import curate
from stream_ssl.demo import report, summary

pytestmark = [pytest.mark.browser, pytest.mark.timeout(180)]

WIDE = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
LETTERS = """[...document.querySelectorAll("figure svg text")].map(
    (one) => one.getBoundingClientRect()).map(({ width, height }) => Math.min(width, height))"""


def phone(chromium: Any, file: Path) -> Any:
    page = chromium.new_page(viewport={"width": 390, "height": 844})
    page.goto(file.as_uri())
    return page


def test_long_names_of_classes_do_not_widen_the_report_of_curate(
    chromium: Any, tmp_path: Path
) -> None:
    photos, out, draw = tmp_path / "photos", tmp_path / "out", np.random.default_rng(0)
    for name in ("x" * 120, *(f"class-{number}" for number in range(24))):
        (photos / name).mkdir(parents=True)
        file = io.BytesIO()
        pixels_HWC = draw.integers(0, 256, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(pixels_HWC).resize((64, 64)).save(file, "JPEG")
        (photos / name / "one.jpg").write_bytes(file.getvalue())
    options = ["images", "--source.root", str(photos), "--keep", "25", "--out", str(out)]
    assert curate.main(options) == 0
    page = phone(chromium, out / "report.html")
    assert page.evaluate(WIDE) == 0
    assert "The 20 most frequent of 25 classes." in page.inner_text("body")
    lines = "[...document.querySelectorAll('td')].find((one) => one.textContent === 'photos')"
    assert page.evaluate(f"{lines}.offsetHeight") < 40, "a short name is on one line"
    page.close()


def test_the_report_of_the_demo_fits_a_phone_and_its_letters_can_be_read(
    chromium: Any, tmp_path: Path
) -> None:
    history, evaluation, replay = made_up_history(), made_up_evaluation(), made_up_replay()
    found = summary.figures(history, evaluation, replay)
    file = tmp_path / "report.html"
    report.write(file, history, evaluation, found, replay, made_up_facts())
    page = phone(chromium, file)
    assert page.evaluate(WIDE) == 0
    sizes = page.evaluate(LETTERS)
    assert np.median(sizes) >= 9  # pixels
    page.close()
