"""Loggers beside a learner: the files of TensorBoard, and loggers that fail."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from page_world import Feed, serving
from prometheus_client import CollectorRegistry
from torch import Tensor

from stream_ssl.observe import loggers
from stream_ssl.observe.loggers import Logging, ShownSlots, TensorBoard, scalars, squared
from stream_ssl.observe.metrics import LearnerMetrics

FAILURES = "stream_ssl_logger_failures_total"
CONFIG = {"run": "runs/a", "memory": {"capacity": 32}}


class Kept:
    """A logger that keeps its rows and pictures, and fails at some steps."""

    def __init__(self, bad: set[int] = frozenset()) -> None:  # type: ignore[assignment]
        self.bad, self.opened = bad, 0
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.pictures: list[Tensor] = []
        self.closed = self.abandoned = False

    def open(self, step: int) -> Kept:
        self.opened += 1
        return self

    def scalars(self, values: Any, step: int) -> None:
        if step in self.bad:
            raise OSError(28, "No space left on device")
        self.rows.append((step, dict(values)))

    def memory(self, shown: ShownSlots, step: int) -> None:
        self.pictures.append(shown.mosaic())

    def close(self) -> None:
        self.closed = True
        raise RuntimeError("lost")

    def abandon(self) -> None:
        self.abandoned = True


def metrics_at(step: int) -> LearnerMetrics:
    metrics = LearnerMetrics(CollectorRegistry(), classes=2)
    metrics.of_checkpoints.resumed(step, 0.0)
    return metrics


def read_back(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder), {"scalars": 0, "images": 0, "tensors": 0}).Reload()


def test_tensorboard_and_prometheus_get_the_same_values(tmp_path: Path) -> None:
    from tensorboard.util.tensor_util import make_ndarray

    feed, now = Feed(slots=20), [0.0]
    with serving(feed) as (_, view):
        for _ in range(5):
            feed.step()
        metrics = metrics_at(7)
        writer = Logging(
            "tensorboard",
            lambda step: TensorBoard(tmp_path, CONFIG, step),
            metrics.registry,
            view,
            clock=lambda: now[0],
        )
        writer.write()
        now[0] = loggers.EVERY
        metrics.of_checkpoints.resumed(9, 5.0)
        writer.write()
        writer.close()
    found = read_back(tmp_path)
    values = {name: found.Scalars(name) for name in found.Tags()["scalars"]}
    expected = scalars(metrics.registry)
    stable = [name for name in expected if not name.endswith(("age_seconds", "free_bytes"))]
    assert len(stable) > 20
    for name in stable:
        assert values[name][-1].value == pytest.approx(expected[name], rel=1e-6), name
    assert [event.step for event in values["step"]] == [7, 9, 9]
    assert "restarts_total" in values
    assert any(name.startswith("condition/") for name in values)
    (text,) = found.Tensors("configuration/text_summary")
    assert b"capacity: 32" in make_ndarray(text.tensor_proto).item()
    (image,) = found.Images("memory")
    assert (image.step, image.width, image.height) == (9, 80, 64)  # 20 slots in rows of 5


def test_tensorboards_projector_shows_the_newest_slots(tmp_path: Path) -> None:
    from google.protobuf import text_format
    from PIL import Image
    from tensorboard.plugins.projector.projector_config_pb2 import ProjectorConfig

    feed, now = Feed(slots=20), [0.0]
    with serving(feed) as (_, view):
        for _ in range(5):
            feed.step()
        writer = Logging(
            "tensorboard",
            lambda step: TensorBoard(tmp_path, CONFIG, step),
            metrics_at(7).registry,
            view,
            clock=lambda: now[0],
        )
        for _ in range(2):
            now[0] += loggers.PICTURES_EVERY
            writer.write()
        memory = feed.memory
        writer.close()
    text = (tmp_path / "projector_config.pbtxt").read_text()
    (shown,) = text_format.Parse(text, ProjectorConfig()).embeddings
    z_nD = np.loadtxt(tmp_path / shown.tensor_path, delimiter="\t")
    assert np.allclose(z_nD, memory.embeddings.numpy(), atol=1e-4)
    head, *facts = (tmp_path / shown.metadata_path).read_text().splitlines()
    assert head.split("\t") == ["slot", "label", "producer"]
    labels = [[str(slot), str(label)] for slot, label in enumerate(memory.labels.tolist())]
    assert [fact.split("\t")[:2] for fact in facts] == labels
    wide, high = shown.sprite.single_image_dim
    with Image.open(tmp_path / shown.sprite.image_path) as sprite:
        pixels_HWC = np.asarray(sprite)
    # The projector computes the place by the number of rows, not of columns.
    rows, columns = pixels_HWC.shape[0] // high, pixels_HWC.shape[1] // wide
    for slot, image_CHW in enumerate(memory.images.numpy()):
        top, left = high * (slot // rows), wide * (slot % columns)
        assert np.array_equal(
            pixels_HWC[top : top + high, left : left + wide], image_CHW.transpose(1, 2, 0)
        )


def test_a_mosaic_has_each_picture_at_its_place() -> None:
    image_nCHW = torch.randint(0, 256, (7, 3, 4, 5), dtype=torch.uint8)
    found = squared(image_nCHW).transpose(2, 0, 1)
    assert found.shape == (3, 12, 15)
    for number in range(9):
        top, left = 4 * (number // 3), 5 * (number % 3)
        expected = image_nCHW[number] if number < 7 else torch.zeros(3, 4, 5)
        assert np.array_equal(found[:, top : top + 4, left : left + 5], expected)


def test_a_failing_logger_is_logged_once_counted_and_opened_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    kept, metrics, now = Kept({1, 2, 3, 4}), metrics_at(0), [0.0]
    count, rows = metrics.counts_failures_of("kept"), []
    writer = Logging("kept", kept.open, metrics.registry, None, count, clock=lambda: now[0])
    with caplog.at_level(logging.INFO):
        for step in range(12):
            metrics.of_checkpoints.resumed(step, 0.0)
            before = kept.opened
            writer.write()
            rows.append(kept.opened - before)
            now[0] += loggers.EVERY
    # Opened at first, and again 30, 60 and 120 s after its failures at steps 1, 2 and 4.
    assert rows == [1, 0, 1, 0, 1, 0, 0, 0, 1, 0, 0, 0]
    assert [step for step, _ in kept.rows] == [0, *range(8, 12)]
    assert kept.abandoned
    assert metrics.registry.get_sample_value(FAILURES, {"logger": "kept"}) == 3
    assert caplog.text.count("the logger kept failed, training continues without it") == 1
    assert "No space left on device" in caplog.text
    assert "the logger kept works again, after 3 tries" in caplog.text
    writer.close()
    assert kept.closed
    assert "the logger kept failed, training continues without it until it works: Runtim" in (
        caplog.text
    )


def test_a_failing_logger_does_not_delay_the_end(caplog: pytest.LogCaptureFixture) -> None:
    kept, metrics = Kept({0}), metrics_at(0)
    writer = Logging("kept", kept.open, metrics.registry, None)
    writer.write()
    writer.close()
    assert (kept.opened, kept.closed, kept.abandoned) == (1, False, True)


def test_a_learner_without_time_or_pictures_gets_no_mosaic(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept, now, feed = Kept(), [0.0], Feed()
    with serving(feed) as (_, view):
        assert view is not None
        writer = Logging("kept", kept.open, metrics_at(0).registry, view, clock=lambda: now[0])
        now[0] = loggers.EVERY
        writer.write()  # an empty memory
        feed.step()
        now[0] += loggers.PICTURES_EVERY
        view.jobs.close()
        writer.write()  # nobody answers
    assert len(kept.rows) == 2
    assert kept.pictures == []
