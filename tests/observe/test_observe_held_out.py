"""The probe of a held-out set: its times, its samples, its file and its errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from observe_records import step
from prometheus_client import CollectorRegistry
from table import table

from stream_ssl.feed.decode import Decoder
from stream_ssl.learning.records import Idle
from stream_ssl.observe.held_out import FILE, HeldOut, HeldOutProbe
from stream_ssl.observe.metrics import LearnerMetrics
from stream_ssl.observe.page.held_out import HeldOutView
from stream_ssl.producers.sources import Synthetic


def settings(**changes: Any) -> HeldOut:
    usual: dict[str, Any] = {"every": 3, "k": 5, "references_per_class": 12, "queries_per_class": 6}
    count = changes.pop("count", 400)
    more = {key: changes.pop(key) for key in ("classes", "noise") if key in changes}
    return HeldOut(Synthetic(count=count, size=8, shift=0, **more), **{**usual, **changes})


def pixels(image_BCHW: torch.Tensor) -> torch.Tensor:
    assert image_BCHW.dtype == torch.uint8
    return image_BCHW.flatten(1).float()


def probe(**changes: Any) -> HeldOutProbe:
    return HeldOutProbe(settings(**changes), Decoder(8), pixels)


def test_the_probe_runs_at_every_nth_step() -> None:
    found = probe()
    steps = [found.consume(step(step=number)) for number in range(1, 8)]
    assert [None if f is None else f.step for f in steps] == [None, None, 3, None, None, 6, None]
    assert found.consume(Idle(0.0)) is None


def test_a_step_without_a_record_delays_the_probe_by_one_step() -> None:
    found = probe()
    steps = [found.consume(step(step=number)) for number in (1, 2, 4, 5, 7)]
    assert [None if f is None else f.step for f in steps] == [None, None, 4, None, 7]


def test_a_resumed_run_waits_for_the_next_probe() -> None:
    found = probe()
    assert found.consume(Idle(0.0)) is None
    probed = [found.consume(step(step=number)) is not None for number in (5, 6, 7)]
    assert probed == [False, True, False]


def test_the_held_out_set_is_balanced_and_its_pixels_separate_the_classes() -> None:
    result = probe().probe(1).result
    assert result.queries == 60
    assert set(result.per_class) == set(range(10))
    assert result.accuracy == pytest.approx(result.balanced)
    assert result.accuracy > 0.9


def test_queries_and_references_are_disjoint() -> None:
    """A query that is also a reference would find itself."""
    seen: list[bytes] = []

    def note(image_BCHW: torch.Tensor) -> torch.Tensor:
        seen.extend(image.numpy().tobytes() for image in image_BCHW)
        return pixels(image_BCHW)

    HeldOutProbe(settings(), Decoder(8), note).probe(1)
    assert len(seen) == len(set(seen)) == 120 + 60


def test_the_probe_survives_features_that_are_not_finite(
    caplog: pytest.LogCaptureFixture,
) -> None:
    found = HeldOutProbe(settings(), Decoder(8), lambda x: pixels(x) * torch.nan).probe(9)
    assert found.result.accuracy == pytest.approx(0.1)
    assert "step 9: the features of the held-out set are not finite" in caplog.text


def test_the_error_of_a_change_counts_the_images_whose_answer_changed() -> None:
    """The error is the standard deviation of the changes, over the root of their number."""
    blind = [True]

    def features(image_BCHW: torch.Tensor) -> torch.Tensor:
        return pixels(image_BCHW) * (0.0 if blind[0] else 1.0)

    found = HeldOutProbe(settings(), Decoder(8), features)
    first = found.probe(0)
    assert first.rise_error is None
    same = found.probe(1)
    assert same.rise_error == 0.0
    blind[0] = False
    seen = found.probe(2)
    rise = seen.result.accuracy - first.result.accuracy
    assert rise > 0.5
    assert seen.result.accuracy == 1.0, "so each change is 0 or 1"
    assert seen.rise_error == pytest.approx((rise * (1 - rise) / 60) ** 0.5)


def test_the_probe_keeps_the_findings_of_the_last_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    found, now = probe(), [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    for minutes in range(0, 301, 20):
        now[0] = 60.0 * minutes
        found.probe(minutes)
    assert [one.at / 60 for one in found.past] == [240.0, 260.0, 280.0, 300.0]


def test_the_accuracy_at_the_start_outlives_a_restart(tmp_path: Path) -> None:
    found = probe()
    record = found.begin(tmp_path)
    assert (record.step, found.first) == (0, record.result.accuracy)
    again = probe()
    assert again.first is None
    again.resume(tmp_path)
    assert again.first == found.first


@pytest.mark.parametrize(
    "change", [{"k": 4}, {"queries_per_class": 7}, {"classes": 3}, {"noise": 47}]
)
def test_a_restart_with_another_set_has_no_accuracy_at_the_start(
    change: dict[str, Any], tmp_path: Path
) -> None:
    probe().begin(tmp_path)
    other = probe(**change)
    other.resume(tmp_path)
    assert other.first is None


def test_a_file_without_a_digest_of_the_set_is_accepted(tmp_path: Path) -> None:
    found = probe()
    found.begin(tmp_path)
    saved = json.loads((tmp_path / FILE).read_text())
    del saved["digest"]
    (tmp_path / FILE).write_text(json.dumps(saved))
    again = probe()
    again.resume(tmp_path)
    assert again.first == found.first


def test_the_accuracy_at_the_start_is_unknown_without_a_file(tmp_path: Path) -> None:
    found = probe()
    found.resume(tmp_path)
    assert found.first is None
    probe().begin(None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"[" * 5000, b"7", b'{"accuracy": NaN}'])
def test_a_damaged_file_of_the_probe_is_ignored_with_a_warning(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FILE).write_bytes(content)
    found = probe()
    found.resume(tmp_path)
    assert found.first is None
    assert "the accuracy at the start of the run is unknown" in caplog.text


@pytest.mark.parametrize("accuracy", ["0.5", True, 1.5, None])
def test_an_impossible_accuracy_is_ignored(accuracy: Any, tmp_path: Path) -> None:
    found = probe()
    found.begin(tmp_path)
    told = json.loads((tmp_path / FILE).read_text())
    (tmp_path / FILE).write_text(json.dumps(told | {"accuracy": accuracy}))
    found.first = None
    found.resume(tmp_path)
    assert found.first is None


def test_a_file_that_cannot_be_written_does_not_stop_a_new_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = probe()
    found.begin(tmp_path / "missing")
    assert found.first is not None
    assert "a restart will not know the accuracy at the start" in caplog.text


def test_the_page_shows_the_neighbours_of_ten_pictures_now_and_an_hour_ago() -> None:
    """The encoder first sees one pixel, and later all pixels, so the neighbours differ."""
    blind, now = [True], [0.0]

    def features(image_BCHW: torch.Tensor) -> torch.Tensor:
        seen_BF = pixels(image_BCHW)
        return torch.stack([seen_BF[:, 0], 255 - seen_BF[:, 0]], 1) if blind[0] else seen_BF

    found = HeldOutProbe(settings(), Decoder(8), features)
    view = HeldOutView(found, lambda: now[0])
    assert view.summary()["step"] is None, "a resumed run has not probed yet"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("time.monotonic", lambda: now[0])
        found.probe(1)
        alone = view.summary()
        assert (alone["step"], alone["before"]) == (1, None)
        assert {len(one["before"]) for one in alone["shown"]} == {0}
        assert alone["confused"][0]["share"] > 0.1
        blind[0], now[0] = False, 1800.0
        found.probe(2)
        now[0] = 1860.0
    told = view.summary()
    assert (told["step"], told["age"], told["before"]) == (2, 60.0, 1860.0)
    assert told["confused"] == [], "all pixels distinguish the classes"
    assert [one["label"] for one in told["shown"]] == [f"class {n}" for n in range(10)]
    for one, before in zip(told["shown"], alone["shown"], strict=True):
        assert {near["label"] for near in one["now"]} == {one["label"]}
        assert one["before"] == before["now"] != one["now"]
    names = {near["picture"] for one in told["shown"] for near in one["now"] + one["before"]}
    assert names < set(told["pictures"]["ids"])


def test_names_of_classes_that_are_not_utf_8_can_be_sent_to_the_page() -> None:
    found = probe(classes=3)
    found.names = ["cat", "dog\udcff", "\x1b[2J"]
    found.probe(1)
    told = HeldOutView(found).summary()
    assert json.dumps(told, ensure_ascii=False).encode()
    assert {one["label"] for one in told["shown"]} == {"cat", "dog?", "?[2J"}


def test_the_findings_of_the_probe_are_exported() -> None:
    registry = CollectorRegistry()
    metrics = LearnerMetrics(registry, classes=3)
    finding = probe(classes=3).probe(12)
    metrics.observe_held_out(finding)
    value = registry.get_sample_value
    assert value("stream_ssl_held_out_accuracy") == finding.result.accuracy
    assert value("stream_ssl_held_out_linear_accuracy") == finding.linear > 0.9
    assert value("stream_ssl_held_out_step") == 12
    for label, accuracy in finding.result.per_class.items():
        assert value("stream_ssl_held_out_class_accuracy", {"class": str(label)}) == accuracy


@table(
    ("changes", "message"),
    [
        ({"every": 0}, "every 0: must be at least 1"),
        ({"k": 121}, "120 references of source 'synthetic' are fewer than k = 121"),
        ({"classes": 1}, "has only class 0"),
        ({"count": 2}, "has no query"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_a_set_that_cannot_be_probed_is_refused_at_the_start(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        probe(**changes)
