"""Loggers beside a learner: what TensorBoard reads back, and loggers that fail."""

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
from stream_ssl.observe.loggers import Logging, TensorBoard, scalars, tiled
from stream_ssl.observe.metrics import LearnerMetrics

CONFIG = {"run": "runs/a", "memory": {"capacity": 32}}


class Kept:
    """A logger that keeps what it gets, and fails at some steps."""

    def __init__(self, bad: set[int] = frozenset()) -> None:  # type: ignore[assignment]
        self.bad, self.opened = bad, 0
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.pictures: list[Tensor] = []
        self.closed = False

    def open(self, step: int) -> Kept:
        self.opened += 1
        return self

    def scalars(self, values: Any, step: int) -> None:
        if step in self.bad:
            raise OSError(28, "No space left on device")
        self.rows.append((step, dict(values)))

    def picture(self, name: str, image_CHW: Tensor, step: int) -> None:
        assert name == "memory"
        self.pictures.append(image_CHW)

    def close(self) -> None:
        self.closed = True
        raise RuntimeError("lost")


def metrics_at(step: int) -> LearnerMetrics:
    metrics = LearnerMetrics(CollectorRegistry(), classes=2)
    metrics.resumed(step, 0.0)
    return metrics


def read_back(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder), {"scalars": 0, "images": 0, "tensors": 0}).Reload()


def test_tensorboard_reads_what_prometheus_reads(tmp_path: Path) -> None:
    from tensorboard.util.tensor_util import make_ndarray

    feed, now = Feed(slots=20), [0.0]
    with serving(feed) as (_, view):
        for _ in range(5):
            feed.step()
        metrics = metrics_at(7)
        writer = Logging(
            {"tensorboard": lambda step: TensorBoard(tmp_path, CONFIG, step)},
            metrics.registry,
            view,
            clock=lambda: now[0],
        )
        writer.write()
        now[0] = loggers.EVERY
        metrics.resumed(9, 5.0)
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


def test_a_mosaic_has_each_picture_at_its_place() -> None:
    image_nCHW = torch.randint(0, 256, (7, 3, 4, 5), dtype=torch.uint8)
    found = tiled(image_nCHW)
    assert found.shape == (3, 12, 15)
    for number in range(9):
        top, left = 4 * (number // 3), 5 * (number % 3)
        expected = image_nCHW[number] if number < 7 else torch.zeros(3, 4, 5)
        assert np.array_equal(found[:, top : top + 4, left : left + 5], expected)


def test_a_logger_that_fails_is_told_once_a_minute_and_opened_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bad, good, metrics = Kept({1, 2}), Kept(), metrics_at(0)
    writer = Logging({"bad": bad.open, "good": good.open}, metrics.registry, None)
    with caplog.at_level(logging.WARNING):
        for step in range(4):
            metrics.resumed(step, 0.0)
            writer.write()
    assert [step for step, _ in good.rows] == [0, 1, 2, 3]
    assert [step for step, _ in bad.rows] == [0, 3]
    assert bad.opened == 3
    assert caplog.text.count("the logger bad failed, training continues: OSError") == 1
    writer.close()
    assert bad.closed
    assert good.closed
    assert "the logger good failed, training continues: RuntimeError: lost" in caplog.text


def test_a_learner_without_time_or_pictures_gets_no_mosaic(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept, now, feed = Kept(), [0.0], Feed()
    with serving(feed) as (_, view):
        assert view is not None
        writer = Logging({"kept": kept.open}, metrics_at(0).registry, view, lambda: now[0])
        now[0] = loggers.EVERY
        writer.write()  # an empty memory
        feed.step()
        now[0] += loggers.PICTURES_EVERY
        view.jobs.close()
        writer.write()  # nobody answers
    assert len(kept.rows) == 2
    assert kept.pictures == []
