"""Continual streams by the command line of `stream-ssl produce`."""

from __future__ import annotations

import pytest

from producers.shaping import Continual
from producers.sources import Synthetic
from stream_ssl.app.commands import produce

BASE = ["--to", "tcp://127.0.0.1:1", "--name", "robot"]


def test_the_options_build_the_stream() -> None:
    parser = produce.source_parser("synthetic")
    more = ["--continual.kind", "blocks", "--continual.tasks", "2", "--continual.block", "5"]
    settings = parser.parse_args([*BASE, *more])
    stream = produce.continual(Synthetic(count=60, size=4, shift=0), settings.continual)
    assert isinstance(stream, Continual)
    task = [sample.label // 5 for sample, _ in stream.samples() if sample.label is not None]
    assert len(task) == 60
    assert task[:5] == [task[0]] * 5
    assert task[5:10] == [1 - task[0]] * 5


def test_without_them_a_source_needs_no_labels() -> None:
    settings = produce.source_parser("synthetic").parse_args(BASE)
    source = Synthetic(count=3)
    assert produce.continual(source, settings.continual) is source
    settings = produce.source_parser("synthetic").parse_args([*BASE, "--continual.imbalance", "9"])
    assert isinstance(produce.continual(source, settings.continual), Continual)


def test_what_cannot_work_is_told(caplog: pytest.LogCaptureFixture) -> None:
    assert produce.main(["synthetic", *BASE, "--continual.kind", "incremental"]) == 2
    assert "never ends, so its first task would not" in caplog.text
