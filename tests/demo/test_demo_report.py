"""The report and the summary of a made-up run."""

import base64
import io
import json
import re
from html.parser import HTMLParser

import pytest
from demo_history import (
    made_up_evaluation,
    made_up_facts,
    made_up_history,
    made_up_replay,
)
from PIL import Image
from rich.console import Console

from stream_ssl.demo import report, summary
from stream_ssl.demo.data import CLASSES


@pytest.fixture(scope="module")
def found():
    return summary.figures(made_up_history(), made_up_evaluation(), made_up_replay())


@pytest.fixture(scope="module")
def page(found, tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("report") / "report.html"
    report.write(
        path, made_up_history(), made_up_evaluation(), found, made_up_replay(), made_up_facts()
    )
    return path.read_text()


class Reader(HTMLParser):
    """Collects what a browser would fetch, what a screen reader would say, and the ids."""

    def __init__(self):
        super().__init__()
        self.open, self.fetched, self.said, self.ids, self.text = [], [], [], [], []

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        for name in ("src", "href", "xlink:href"):
            if name in values:
                self.fetched.append(values[name])
        if tag in ("img", "svg"):
            self.said.append(values.get("alt") or values.get("aria-label"))
        if "id" in values:
            self.ids.append(values["id"])

    def handle_data(self, text):
        self.text.append(text)


@pytest.fixture(scope="module")
def read(page) -> Reader:
    reader = Reader()
    reader.feed(page)
    return reader


def test_the_report_needs_no_other_file(read, page):
    assert all(address.startswith(("data:", "#")) for address in read.fetched)
    assert "<script" not in page
    assert "@import" not in page
    assert not re.search(r"url\((?!#)", page)


def test_every_picture_of_the_report_has_a_description(read):
    assert len(read.said) == 7
    assert all(read.said)
    assert any("queue 57%" in said for said in read.said)


def test_the_ids_in_the_report_are_unique(read):
    assert len(read.ids) == len(set(read.ids))


def test_the_report_contains_the_figures_and_all_classes(read):
    text = " ".join(" ".join(read.text).split())
    assert "577" in text
    assert "78.0%" in text
    assert "48,000" in text
    assert "90 % of them show one of 16 scenes" in text
    assert "4 different pictures in 640 slots" in text
    assert "640 of its 1,024 slots hold a sample. It holds 577 different pictures" in text
    assert text.count("576 of its 640 slots, drawn at random, in order of their class") == 2
    assert "the DUEL memory ended 12.0 points above the one trained with a queue" in text
    assert "It ended 8.0 points above the same encoder before training" in text
    assert "within the noise of the probe (-1.0 points) of raw pixels" in text
    assert "720 updates and 45,600 samples with the DUEL memory, 750 and 48,000 with the" in text
    assert '- targets: ["127.0.0.1:4002"]' in text
    for name in CLASSES:
        assert name in text


def test_the_report_escapes_text_from_outside(page):
    assert "a &lt;quick&gt; one" in page
    assert "a <quick> one" not in page


def test_the_drawings_use_only_colours_of_the_scheme(page):
    assert "prefers-color-scheme: dark" in page
    drawings = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(drawings) == 5
    used = set(re.findall(r"var\(--(\w+)\)", "".join(drawings)))
    assert used == {"ink", "muted", "grid", "stream", "queue", "duel", "plain"}
    assert not re.search(r"(?:fill|stroke): #[0-9a-f]", "".join(drawings))


def test_the_report_explains_evictions_only_if_the_memory_is_full(found, tmp_path):
    path = tmp_path / "report.html"
    short = found | {"evicted_samples": 0.0, "memory_slots": 700.0}
    parts = made_up_history(), made_up_evaluation(), short, made_up_replay(), made_up_facts()
    report.write(path, *parts)
    text = " ".join(path.read_text().split())
    assert "DUEL memory evicted nothing: 700 of its 1,024 slots hold a sample" in text
    assert "evicts" not in text
    report.write(path, *parts[:2], short | {"memory_slots": 1024.0}, *parts[3:])
    assert "evicts the slot with the most duplicates" in " ".join(path.read_text().split())


def test_the_legend_of_the_flow_is_below_its_title(page):
    heights = {
        text: float(re.search(rf' y="(\S+)" [^>]*>{text}<', page)[1])
        for text in ("Samples per second", "received", "trained, new")
    }
    assert heights["received"] > heights["Samples per second"] + 5
    assert heights["trained, new"] > heights["Samples per second"] + 5


def test_mosaics_hold_equally_many_images(read):
    sizes = [
        Image.open(io.BytesIO(base64.b64decode(address.partition(",")[2]))).size
        for address in read.fetched
        if address.startswith("data:image/png")
    ]
    assert sizes == [(24 * 28, 24 * 28)] * 2


@pytest.mark.parametrize(("slots", "shown"), [(128, 120), (7, 7)])
def test_a_mosaic_has_whole_rows(slots, shown):
    for _, count, _, _ in report.mosaics(made_up_evaluation(slots), made_up_replay(slots)).values():
        assert count == shown


def test_summary_has_every_figure_by_name(found, tmp_path):
    summary.write(tmp_path / "summary.json", found)
    kept = json.loads((tmp_path / "summary.json").read_text())
    assert kept == found
    assert kept["received_samples"] == 48_000
    assert kept["received_samples_per_second"] == pytest.approx(400)
    assert kept["received_megabytes_per_second"] == pytest.approx(0.3136)
    assert (kept["updates"], kept["dropped_samples"]) == (720, 12_000)
    assert kept["read_samples"] == 45_600
    assert kept["memory_slots"] == 640
    assert kept["memory_near_duplicates"] == pytest.approx(63 / 640)
    assert kept["queue_near_duplicates"] == pytest.approx(636 / 640)
    assert (kept["memory_pictures"], kept["queue_pictures"]) == (577, 4)
    assert kept["queue_true_collision_probability"] == pytest.approx(0.572, abs=2e-3)
    assert kept["memory_true_collision_probability"] < 0.2
    assert kept["stream_largest_class_share"] == pytest.approx(0.75, abs=1e-3)
    assert kept["memory_effective_classes"] > 9
    assert kept["journal_fsync_mean_seconds"] == pytest.approx(0.0015)
    assert kept["learner_largest_resident_bytes"] == 6e8
    assert (kept["knn_memory_accuracy"], kept["knn_queue_accuracy"]) == (0.78, 0.66)
    assert (kept["queue_updates"], kept["queue_read_samples"]) == (750, 48_000)
    assert kept["knn_pixels_t_shirt_top_accuracy"] == pytest.approx(0.70)
    assert all(re.fullmatch(r"[a-z][a-z0-9_]*", name) for name in kept)
    assert all(isinstance(value, float | int) for value in kept.values())


def test_summary_table_fits_a_terminal(found):
    file = io.StringIO()
    Console(file=file, width=80).print(summary.table(found))
    lines = file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert "78.0% trained from the DUEL memory" in " ".join(file.getvalue().split())


@pytest.mark.parametrize(("updates", "warned"), [(199, True), (200, False)])
def test_the_report_warns_if_a_run_was_too_short(found, tmp_path, updates, warned):
    figures = {**found, "updates": float(updates)}
    path = tmp_path / "report.html"
    history, replay = made_up_history(), made_up_replay()
    report.write(path, history, made_up_evaluation(), figures, replay, made_up_facts())
    assert ("199 updates are too few to judge the encoder:" in path.read_text()) == warned


def test_a_run_without_steps_still_gives_figures():
    from stream_ssl.observe.scrape import History

    found = summary.figures(History(), made_up_evaluation(), made_up_replay())
    assert found["received_samples"] == 0
    assert found["memory_true_collision_probability"] == 0


@pytest.mark.parametrize(
    ("ours", "other", "said"),
    [(0.8, 0.7, "ended 10.0 points above"), (0.6, 0.7, "ended 10.0 points below")],
)
def test_the_outcome_says_whether_the_accuracy_is_above_or_below(found, ours, other, said):
    figures = {**found, "knn_memory_accuracy": ours, "knn_queue_accuracy": other}
    assert f"{said} the one trained with a queue" in report.outcome(figures)
