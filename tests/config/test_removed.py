"""Removed options: errors state the present behaviour, and old run folders can be opened."""

from __future__ import annotations

import json
import logging
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from harness import TINY
from jsonargparse import ArgumentParser
from sealed import sealed_checkpoint
from table import table

from stream_ssl.app.commands import check
from stream_ssl.config import options, restart
from stream_ssl.config.removed import REMOVED, without
from stream_ssl.learning.checkpoint_layout import FOLDER, folder_of
from stream_ssl.trained import encoder

MOST_OPTIONS = 80


@cache
def parsers() -> tuple[ArgumentParser, ArgumentParser]:
    return options.receiver_parser(), options.learner_parser()


def nested(option: str, value: Any) -> dict[str, Any]:
    """Return {"receiver": {"max_samples": 5}} of receiver.max_samples and 5."""
    found: Any = value
    for name in reversed(option.split(".")):
        found = {name: found}
    return dict(found)


def merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    found = dict(one)
    for name, value in other.items():
        inner = found.get(name)
        both = isinstance(inner, dict) and isinstance(value, dict)
        found[name] = merged(inner, value) if both else value
    return found


def config_file(folder: Path, *given: tuple[str, Any]) -> str:
    settings: dict[str, Any] = TINY | {"run": str(folder / "run")}
    for option, value in given:
        settings = merged(settings, nested(option, value))
    file = folder / "config.yaml"
    file.write_text(json.dumps(settings, indent=1))
    return str(file)


def test_the_daemon_has_at_most_80_options() -> None:
    assert len(restart.FIXED) + len(restart.MAY_CHANGE) <= MOST_OPTIONS
    assert not {*REMOVED} & {*restart.FIXED, *restart.MAY_CHANGE}


@table("option", sorted(REMOVED))
def test_an_error_about_a_removed_option_states_the_present_behaviour(
    tmp_path: Path, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = config_file(tmp_path, (option, REMOVED[option].value))
    for parser in parsers():
        with pytest.raises(SystemExit) as end:
            options.read(parser, [file])
        assert end.value.code == 2
        said = capsys.readouterr().err
        assert f"{option} was removed: {REMOVED[option].now}. Delete the option" in said
        line = 1 + Path(file).read_text()[: Path(file).read_text().index(last(option))].count("\n")
        assert f"line {line}: " in said


def test_all_removed_options_are_named_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("receiver.group_packets", "memory.seed", "http.producers")
    file = config_file(tmp_path, *((option, REMOVED[option].value) for option in names))
    with pytest.raises(SystemExit):
        options.read(parsers()[1], [file])
    said = capsys.readouterr().err
    assert [line.count("was removed") for line in said.splitlines() if file in line] == [1, 1, 1]
    assert all(f"{option} was removed: {REMOVED[option].now}" in said for option in names)

    monkeypatch.setenv("STREAM_SSL_QUARANTINE__RATE", "5")
    monkeypatch.setenv("STREAM_SSL_JOURNAL__CHECK", "true")
    with pytest.raises(SystemExit):
        options.read(parsers()[0], [config_file(tmp_path)])
    said = capsys.readouterr().err
    assert "STREAM_SSL_QUARANTINE__RATE is set: " in said
    assert "STREAM_SSL_JOURNAL__CHECK is set: " in said


def last(option: str) -> str:
    return f'"{option.rpartition(".")[2]}"'


def test_the_command_line_and_the_environment_refuse_removed_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = config_file(tmp_path)
    with pytest.raises(SystemExit):
        options.read(parsers()[1], [file, "--optimiser.momentum", "0.5"])
    assert "optimiser.momentum was removed: the momentum of sgd is 0.9" in capsys.readouterr().err
    monkeypatch.setenv("STREAM_SSL_QUARANTINE__RATE", "5")
    with pytest.raises(SystemExit):
        options.read(parsers()[0], [file])
    assert (
        "STREAM_SSL_QUARANTINE__RATE is set: quarantine.rate was removed" in capsys.readouterr().err
    )


@table(
    ("option", "value", "told"),
    [
        (
            "learner.anchors",
            "mixed",
            'learner.anchors: the value mixed was removed: choose "stream" or "memory"',
        ),
        ("memory.eviction", "hybrid", "the eviction policy hybrid was removed"),
        ("decoder.fit", "refuse", 'the value refuse was removed: choose "crop" or "letterbox"'),
        (
            "memory.eviction",
            {"class_path": "stream_ssl.memory.eviction.KappaBandit"},
            "KappaBandit was removed",
        ),
        ("shadows", {"learnt": "kappa-bandit"}, "the eviction policy kappa-bandit was removed"),
    ],
)
def test_an_error_names_a_removed_value(
    tmp_path: Path, option: str, value: Any, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        options.read(parsers()[1], [config_file(tmp_path, (option, value))])
    assert told in capsys.readouterr().err


def run_of_before(folder: Path, *given: tuple[str, Any]) -> str:
    """Write a run folder whose checkpoint stores all removed options, and return a config file."""
    file = config_file(folder)
    parser = parsers()[1]
    stored = options.resolved(parser, options.read(parser, [file]))
    for option, gone in REMOVED.items():
        stored = merged(stored, nested(option, gone.value))
    for option, value in given:
        stored = merged(stored, nested(option, value))
    sealed_checkpoint(folder / "run", 10, stored)
    return file


def test_a_run_of_an_earlier_version_opens_without_the_removed_options(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = run_of_before(
        tmp_path,
        ("optimiser.betas", [0.5, 0.9]),
        ("receiver.group_packets", 8),
        ("decoder.fit", "resize"),
    )
    with caplog.at_level(logging.INFO):
        assert check.main([file]) == 0
    messages = [record.getMessage() for record in caplog.records]
    gone = [message for message in messages if "were removed" in message]
    (line,) = gone
    assert (
        "optimiser.betas: [0.5, 0.9] (now: the betas of adam and adamw are 0.9 and 0.999)" in line
    )
    assert "receiver.group_packets: 8 (now: at most 64 packets are committed together)" in line
    assert line.count(" (now: ") == 2
    stored = encoder.facts(folder_of(tmp_path / "run" / FOLDER, 10))["config"]
    assert without(stored) == (stored, [])
    assert stored["decoder"]["fit"] == "crop"
    assert encoder.stored_settings(stored).memory.capacity == TINY["memory"]["capacity"]


@table(
    ("option", "value", "told"),
    [
        ("learner.anchors", "mixed", "learner.anchors: the value mixed was removed"),
        ("memory.image_file", "images.bin", "its images are in a file"),
        (
            "memory.eviction",
            {"class_path": "stream_ssl.memory.eviction.Hybrid", "init_args": {"age_cap": 9}},
            "the eviction policy stream_ssl.memory.eviction.Hybrid was removed",
        ),
    ],
)
def test_the_error_about_a_run_with_a_removed_value_says_how_to_continue(
    tmp_path: Path, option: str, value: Any, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert check.main([run_of_before(tmp_path, (option, value))]) == 2
    assert told in caplog.text
    assert "Begin a new run with its weights: --run FOLDER --from THIS_RUN" in caplog.text
