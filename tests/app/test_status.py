"""What `stream-ssl status` tells a person of processes that answer and are not well."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from stream_ssl.app.commands import status
from stream_ssl.app.endpoints import FILE
from stream_ssl.observe.health import Health
from stream_ssl.observe.metrics import LearnerMetrics, ReceiverMetrics
from stream_ssl.observe.server import Server


def test_a_process_that_is_up_and_not_ready_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a receiver on a full disk, whose budget has room, and a learner before its first step."""
    health = Health()
    health.set("journal", False, "cannot be written [Errno 28]")
    health.set("credit", True)
    receiver = ReceiverMetrics(CollectorRegistry()).registry
    learner = LearnerMetrics(CollectorRegistry()).registry
    with (
        Server(receiver, health, "receiver") as one,
        Server(learner, Health(), "learner") as other,
    ):
        addresses = {"receiver": {"http": one.address}, "learner": {"http": other.address}}
        (tmp_path / FILE).write_text(json.dumps(addresses))
        assert status.main([str(tmp_path), "--seconds", "0.01", "--json", "true"]) == 0
        figures = json.loads(capsys.readouterr().out)
        assert status.main([str(tmp_path), "--seconds", "0.01"]) == 0
    said = capsys.readouterr().out
    reasons = {"receiver": ["journal: cannot be written [Errno 28]"], "learner": []}
    assert figures["not_ready"] == reasons
    assert "not ready: journal: cannot be written [Errno 28]" in said
    assert (figures["learner"]["loss"], "no step yet" in said) == (None, True)


def test_a_run_that_was_stopped_is_told_how_it_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Server(ReceiverMetrics(CollectorRegistry()).registry, Health(), "receiver") as gone:
        (tmp_path / FILE).write_text(json.dumps({"receiver": {"http": gone.address}}))
    assert status.main([str(tmp_path), "--seconds", "0.01"]) == 1
    said = capsys.readouterr().out
    assert "does not answer" in said
    assert "it goes on with: stream-ssl run CONFIG" in said


def test_samples_that_were_turned_away_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = LearnerMetrics(CollectorRegistry())
    metrics._families.add("near_copies_total", 3229)
    with Server(metrics.registry, Health(), "learner") as server:
        (tmp_path / FILE).write_text(json.dumps({"learner": {"http": server.address}}))
        assert status.main([str(tmp_path), "--seconds", "0.01"]) == 1  # there is no receiver
    said = capsys.readouterr().out
    assert "3,229 of the stream's samples were turned away" in said
    assert "goes on with" not in said
