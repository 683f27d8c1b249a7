"""A receiver that starts again knows that the sources of all producers have ended."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest
from harness import kill, processes, stop, until

from stream_ssl.daemon.ended_sources import MOST_PRODUCERS, EndedSources
from stream_ssl.receiver.records import CONNECTED, SOURCE_ENDED, STOPPED, ReceiverRecord


def said(finished: dict[str, float], received: dict[str, float] | None = None) -> ReceiverRecord:
    return ReceiverRecord(producer_finished=finished, producer_received=received or {})


@pytest.mark.parametrize("seed", range(20))
def test_a_restart_knows_the_ends_of_all_producers_or_of_none(seed: int, tmp_path: Path) -> None:
    """The naive twin is the whole history of a receiver that never restarts."""
    rng, sources = Random(seed), EndedSources(tmp_path)
    finished: dict[str, float] = {}
    received: dict[str, float] = {}
    for at in range(40):
        name = rng.choice("abc")
        told = {name: rng.choice((CONNECTED, STOPPED, SOURCE_ENDED, SOURCE_ENDED, SOURCE_ENDED))}
        came = {name: float(at)} if rng.random() < 0.8 else {}
        sources.consume(said(told, came))
        finished |= told
        received |= came
        all_ended = set(finished.values()) == {SOURCE_ENDED}
        found = EndedSources(tmp_path).record
        assert found.producer_received == (received if all_ended else {})
        assert found.producer_finished == dict.fromkeys(found.producer_received, SOURCE_ENDED)
        assert found.producer_samples == dict.fromkeys(found.producer_received, 0)


def test_the_record_of_an_ended_source_has_the_time_of_its_last_packet(tmp_path: Path) -> None:
    sources = EndedSources(tmp_path)
    sources.consume(said({"robot": CONNECTED}, {"robot": 1.0}))
    sources.consume(said({}, {"robot": 2.0}))
    assert EndedSources(tmp_path).record.producer_received == {}
    sources.consume(said({"robot": SOURCE_ENDED}))
    assert EndedSources(tmp_path).record.producer_received == {"robot": 2.0}


def test_the_ends_of_too_many_producers_are_not_stored(tmp_path: Path) -> None:
    sources = EndedSources(tmp_path)
    for number in range(MOST_PRODUCERS):
        sources.consume(said({f"{number}": SOURCE_ENDED}, {f"{number}": 1.0}))
    assert len(EndedSources(tmp_path).record.producer_finished) == MOST_PRODUCERS
    for number in range(3 * MOST_PRODUCERS):
        sources.consume(said({f"more-{number}": SOURCE_ENDED}, {f"more-{number}": 1.0}))
    assert EndedSources(tmp_path).record.producer_finished == {}
    assert len(sources.record.producer_finished) == MOST_PRODUCERS + 1


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"producers": 3}', '{"producers": [1]}', '{"producers": {"a": "b"}}']
    + [f'{{"producers": {{"a": {time}}}}}' for time in ("NaN", "-1", "1e300", "null", "[]")],
)
def test_a_damaged_file_of_ended_sources_is_ignored(text: str, tmp_path: Path) -> None:
    (tmp_path / "ended_sources.json").write_text(text)
    assert EndedSources(tmp_path).record == ReceiverRecord()


def test_a_restarted_receiver_knows_that_a_source_ended_before_the_kill(tmp_path: Path) -> None:
    finished = 'producer_finished{producer="robot"}'
    with processes(tmp_path / "run") as run:
        receiver = run.role("receiver")
        assert run.produce(32).wait(60) == 0, run.log("robot")
        until(lambda: run.metric(finished) == SOURCE_ENDED, lambda: run.log("receiver"))
        until((tmp_path / "run" / "ended_sources.json").exists, lambda: run.log("receiver"))
        kill(receiver)
        again = run.role("receiver")
        until(lambda: run.metric(finished) == SOURCE_ENDED, lambda: run.log("receiver"))
        assert run.metric('producer_samples_total{producer="robot"}') == 0
        assert run.produce(100_000, name="other").poll() is None
        until(
            lambda: not (tmp_path / "run" / "ended_sources.json").exists(),
            lambda: run.log("receiver"),
        )
        assert stop(again) == 0
    assert json.loads((tmp_path / "run" / "receiver.last.json").read_text())["end"] == "stopped"
