"""Continual and parked streams by the command line of `stream-ssl produce`."""

from __future__ import annotations

import pytest

from producers.shaping import Continual, Parked
from producers.sources import Synthetic
from stream_ssl.app.commands import produce

BASE = ["--to", "tcp://127.0.0.1:1", "--name", "robot"]


def test_the_options_build_the_stream() -> None:
    parser = produce.source_parser("synthetic")
    more = ["--continual.kind", "blocks", "--continual.tasks", "2", "--continual.block", "5"]
    settings = parser.parse_args([*BASE, *more])
    stream = produce.stream(Synthetic(count=60, size=4, shift=0), settings)
    assert isinstance(stream, Continual)
    task = [sample.label // 5 for sample, _ in stream.samples() if sample.label is not None]
    assert len(task) == 60
    assert task[:5] == [task[0]] * 5
    assert task[5:10] == [1 - task[0]] * 5


def test_without_them_a_source_needs_no_labels() -> None:
    settings = produce.source_parser("synthetic").parse_args(BASE)
    source = Synthetic(count=3)
    assert produce.stream(source, settings) is source
    settings = produce.source_parser("synthetic").parse_args([*BASE, "--continual.imbalance", "9"])
    assert isinstance(produce.stream(source, settings), Continual)


def test_a_parked_robot_may_do_tasks() -> None:
    parser = produce.source_parser("synthetic")
    parked = ["--parked.share", "0.8", "--parked.scenes", "3", "--parked.stretch", "6"]
    source = Synthetic(count=60, size=4, shift=0)
    stream = produce.stream(source, parser.parse_args([*BASE, *parked]))
    assert isinstance(stream, Parked)
    assert stream.source is source
    scenes = {(sample.meta or {}).get("scene", -1) for sample, _ in stream.samples()}
    assert scenes == {-1, 0, 1, 2}
    both = parser.parse_args([*BASE, *parked, "--continual.kind", "incremental"])
    stream = produce.stream(source, both)
    assert isinstance(stream, Parked)
    assert isinstance(stream.source, Continual)


def test_what_cannot_work_is_told(caplog: pytest.LogCaptureFixture) -> None:
    assert produce.main(["synthetic", *BASE, "--continual.kind", "incremental"]) == 2
    assert produce.main(["synthetic", *BASE, "--parked.share", "1.5"]) == 2
    assert "share 1.5: must lie in [0.001, 0.999]" in caplog.text
    assert "never ends, so its first task would not" in caplog.text
