"""Faults of a configuration file, and of environment variables, are named with the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_files import config_file, refused
from table import table

from stream_ssl.app.commands import check, produce
from stream_ssl.config import options
from stream_ssl.process.failures import USAGE


@table(
    ("text", "message"),
    [
        (b"run: caf\xe9\n", "config.yaml: byte 8 (0xe9) is not UTF-8 text; save the file as UTF-8"),
        ("memory:\n  capacity: 5\n  seed: 1\n  capacity: 6\n", "line 4: 'capacity' is in line 2"),
        ("memory: {}\nshadows: [{a: 1, a: 2}]\n", "line 2: 'a' is in line 2 already; remove one"),
        ("memory: {}\nmemory: {}\n", "line 2: 'memory' is in line 1 already; remove one"),
        (
            "run: x\nmemroy:\n  capacity: 5\n",
            "line 2: there is no section 'memroy'; did you mean m",
        ),
        ("zzz: 1\n", "line 1: there is no section 'zzz'; there are: access, batches, checkpoints"),
        ("receiver:\n  bind: 127.0.0.1:5557\n", "transport is missing; write tcp://127.0.0.1:5557"),
        ("memory: [\n", "config.yaml, line 2: not valid YAML: "),
        ("", "config.yaml is empty: must contain options by name, such as\nrun: runs/mine"),
        ("- run\n", "config.yaml begins with something else: must contain options by name"),
        ("journal:\n\tbudget: 5\n", "line 2: not valid YAML: "),
        ("journal:\n\tbudget: 5\n", "; use spaces, not tabs"),
        ("run:\n", "config.yaml, line 1: run is empty: give the folder of the run"),
        ("memory: {}\nrun:\n", "config.yaml, line 2: run is empty: give the folder of the run"),
        ("run: ''\n", "config.yaml, line 1: run is empty: give the folder of the run"),
        ("http:\n  token_file: ''\n", "line 2: http.token_file is empty: give a value, or leave"),
        ("journal:\n  budget:\n", "line 2: journal.budget is empty: give a value, or leave it"),
        ("run: x\njournal:\n", "line 2: section journal is empty: write its options below it as"),
        ("journal: [5]\n", "line 1: section journal is [5]: write its options below it as NAME: V"),
        (
            "run: x\njournal:\n  budget 5\n",
            "section journal is 'budget 5': write its options below it as NAME: VALUE, such as bud",
        ),
        ("journal:\n  bugdet: 5\n", "line 2: Group 'journal' does not accept option 'bugdet'; did"),
        ("http: {learner: 9109}\n", "line 1: Parser key \"http.learner\":\n  '9109': must be text"),
        ("http: {learner: 9109}\n", "such as 127.0.0.1:9109 (HOST:PORT of the learner)"),
        ("pace:\n", "line 1: section pace is empty: write its options below it as NAME: VALUE"),
        (
            "run: x\noptimiser: {learning_rate: .nan}\n",
            "line 2: optimiser.learning_rate is nan: it must be a finite number above 0",
        ),
        ("journal.budget: 5\njournal:\n  budget: 6\n", "line 3: 'budget' is in line 1 already"),
        ("memory:\n  shares: {7: 0.5}\n", "line 2: the name 7 is no text; put it in quotes"),
        ("memory:\n  capacity: 010000\n", "line 2: YAML takes 010000 as octal, which is 4096; w"),
        ("memory: {}\nshadows: [{a: [1, -0_10]}]\n", "line 2: YAML takes -0_10 as octal, which is"),
        (
            "journal:\n  budget: 20:00:00\n",
            "line 2: YAML takes 20:00:00 in base 60; write it in ba",
        ),
        (
            "journal:\n  commit_seconds: 1:30.5\n",
            "line 2: YAML takes 1:30.5 in base 60; write it",
        ),
        ("? [a, b]\n: c\n", "config.yaml, line 1: a name is a list or a map; must be text"),
        ("run: x\nmemory: {? {a: b} : 5}\n", "line 2: a name is a list or a map; must be text"),
        ("run: 2026\n", "2026: must be text without null bytes; put a number in quotes"),
        ('run: "a\\0b"\n', "must be text without null bytes; put a number in quotes"),
        ("run: x\nmemory: {capacity: !secret size}\n", "line 2: the tag !secret is unknown; remov"),
        ("run: =\n", "config.yaml, line 1: the tag !!value is unknown; put = in quotes"),
        (
            "http: &a {learner: a}\njournal: {<<: *a}\n",
            "Group 'journal' does not accept option 'learner'",
        ),
        ("run: !!python/name:os.system\n", "line 1: the tag !!python/name:os.system is unknown"),
        ("run: x\n# caf\x01\n", "config.yaml, line 2: the control character 0x01 is not allowed"),
        (
            'run: "\\U00110000"\n',
            "config.yaml: an escape such as \\U00110000 in quotes names no char",
        ),
        ('run: "\\UFFFFFFFF"\n', "config.yaml: an escape such as \\U00110000 in quotes names"),
        (f"run: x\nmemory: {{capacity: {'9' * 5000}}}\n", "line 2: a number has 5000 digits; must"),
        ("http: {learner: '127.0.0.1:99999'}\n", ": the port must be 1 to 65535, or 0 for a free"),
        (f"http: {{learner: '127.0.0.1:{'9' * 5000}'}}\n", ": the port must be 1 to 65535, or 0"),
        ("run: ~/runs/x\n", "'~/runs/x': must not begin with ~ or a variable, which only shells r"),
        ("run: ${RUNS}/x\n", "'${RUNS}/x': must not begin with ~ or a variable, which only shells"),
    ],
)
def test_an_error_names_the_fault_of_a_config_file(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    text: str | bytes,
    message: str,
) -> None:
    assert refused(check.main, config_file(tmp_path, text)) == USAGE
    assert message in capsys.readouterr().err + caplog.text


def test_a_config_file_is_checked_in_every_way_to_name_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sound, bad = config_file(tmp_path), tmp_path / "bad.yaml"
    bad.write_text("memroy: {}\n")
    assert refused(check.main, sound, "--config", str(bad)) == USAGE
    assert refused(check.main, sound, f"--config={bad}") == USAGE
    arguments = ("--to", "tcp://127.0.0.1:1", "--name", "robot", "--config", str(bad))
    assert refused(produce.main, "synthetic", *arguments) == USAGE
    monkeypatch.setenv("STREAM_SSL_CONFIG", str(bad))
    assert refused(check.main, sound) == USAGE
    assert capsys.readouterr().err.count("there is no section 'memroy'") == 4
    monkeypatch.setenv("STREAM_SSL_CONFIG", "")  # as an unset variable of Compose gives
    assert refused(check.main, sound) == USAGE
    assert "STREAM_SSL_CONFIG) is empty: give a path" in capsys.readouterr().err


def test_an_error_names_a_misspelled_environment_variable(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = config_file(tmp_path)
    monkeypatch.setenv("STREAM_SSL_RECEIVER_PORT", "tcp://10.0.0.1:5557")  # set by Kubernetes
    monkeypatch.setenv("STREAM_SSL_BATCHES__WORKERS", "2")  # of the learner
    assert options.read(options.receiver_parser(), [file])
    for wrong, meant in (
        ("STREAM_SSL_MEMORY__CAPASITY", "did you mean STREAM_SSL_MEMORY__CAPACITY?"),
        ("STREAM_SSL_MEMORY_CAPACITY", "did you mean STREAM_SSL_MEMORY__CAPACITY?"),
        ("STREAM_SSL_JUORNAL__BUDGET", "did you mean STREAM_SSL_JOURNAL__BUDGET?"),
        ("STREAM_SSL_QQQQQ__QQQQQ", "remove it"),
        (
            "STREAM_SSL_LOSS__INIT_ARGS__TEMPERATURE",
            "write all of it in STREAM_SSL_LOSS, as YAML, such as {class_path: NAME, init_args: ",
        ),
        (
            "STREAM_SSL_SHADOWS__QUEUE",
            "write all of it in STREAM_SSL_SHADOWS, as YAML, such as {NAME: POLICY}",
        ),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(wrong, "5")
            assert refused(check.main, file) == USAGE
        told = f"{wrong} is set, and there is no such option; {meant}"
        assert told in capsys.readouterr().err


def test_an_environment_variable_with_quotes_or_line_ends_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = config_file(tmp_path)
    for name, value, fault in (
        ("RUN", "runs/a\r", "must not end with a carriage return; save the file that sets it"),
        ("MEMORY__CAPACITY", "64\r", "must not end with a carriage return"),
        ("RUN", "runs/a\n", "must not end with a line break; remove it"),
        ("RUN", "'runs/a'", "must have no quotes, which only shells remove; write runs/a"),
        ("HTTP__TOKEN_FILE", '"token"', "must have no quotes, which only shells remove"),
        ("RUN", "caf\udce9", "is not UTF-8; rename the file or folder"),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(f"STREAM_SSL_{name}", value)
            assert refused(check.main, file) == USAGE
        error = capsys.readouterr().err
        assert fault in error
        assert value.endswith("\n") or f"STREAM_SSL_{name} is " in error
    whole = "{class_path: infonce, init_args: {temperature: 0.3}}"
    monkeypatch.setenv("STREAM_SSL_LOSS", whole)
    found = options.read(options.learner_parser(), [file])
    assert found.loss.init_args.temperature == 0.3


def test_a_config_file_in_the_home_folder_is_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell leaves the ~ of --config=~/bad.yaml, and jsonargparse replaces it."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "bad.yaml").write_text("journal: {budget: 5}\njournal: {budget: 0100}\n")
    assert refused(check.main, "--config=~/bad.yaml") == USAGE
    assert "bad.yaml, line 2: 'journal' is in line 1 already" in capsys.readouterr().err
