"""Tests of readers of small untrusted files: each reader has bounds, and names the fault."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from table import table

from stream_ssl import bounded_files
from stream_ssl.config import options
from stream_ssl.config.file_faults import check_files
from stream_ssl.daemon import endpoints
from stream_ssl.durable import MANIFEST, damage, seal
from stream_ssl.journal.consumer_offsets import ConsumerOffsets, Positions
from stream_ssl.journal.errors import JournalError
from stream_ssl.journal.journal import Journal
from stream_ssl.journal.segment import journal_id
from stream_ssl.journal.writer_lock import LOCK_FILE
from stream_ssl.observe.http_access import Token
from stream_ssl.producers._spool import Spool
from stream_ssl.receiver.allow_list import AllowList
from stream_ssl.wire import Keys

DEEP = "[" * 100_000 + "]" * 100_000


def planted(path: Path, kind: str) -> Path:
    """Put something in the place of a file that a reader opens, and return its path."""
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "endless":
        path.symlink_to("/dev/zero")
    elif kind == "link":
        path.with_name("elsewhere").write_text("{}")
        path.symlink_to(path.with_name("elsewhere"))
    elif kind == "folder":
        path.mkdir()
    elif kind == "large":
        with path.open("wb") as file:
            file.truncate(1 << 30)
    else:
        path.write_text(kind)
    return path


def test_read_map_ignores_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "written by a Windows editor.json"
    path.write_text('{"robot-1": "key"}', encoding="utf-8-sig")
    assert bounded_files.read_map(path) == {"robot-1": "key"}


@table(
    ("content", "says"),
    [
        (DEEP, "nested 100000 levels deep"),
        ('{"a":' * 70 + "1" + "}" * 70, "nested 70 levels deep"),
        ("1" + "0" * 20, "below 2\\^64"),
        ("9" * 5000, "below 2\\^64"),
        ("-1e999", "not finite"),
        ("NaN", "NaN"),
        ('{"a": -Infinity}', "-Infinity"),
        ('{"a": 1, "b": 2, "a": 3}', "key 'a' twice"),
        ("{", "is not JSON"),
        ("", "is not JSON"),
    ],
)
def test_parse_json_refuses_invalid_json_and_values_beyond_its_bounds(
    content: str, says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        bounded_files.parse_json(content)


def test_parse_json_reads_json_within_its_bounds() -> None:
    value = {"text": '[[{{"\\' * 100, "numbers": [1, -2.5, (1 << 64) - 1, 1e300], "deep": [[[{}]]]}
    assert bounded_files.parse_json(json.dumps(value)) == value


@table(
    ("kind", "says"),
    [
        ("pipe", "is a pipe"),
        ("endless", "is a link"),
        ("link", "is a link"),
        ("folder", "is a folder"),
        ("large", "larger than 1048576 bytes"),
        ("[1]", "must hold a map"),
    ],
)
def test_read_map_reads_only_small_regular_files_with_a_map(
    kind: str, says: str, tmp_path: Path
) -> None:
    folder = tmp_path
    with pytest.raises(ValueError, match=says):
        bounded_files.read_map(planted(folder / "file.json", kind))


def test_a_file_that_an_operator_names_may_be_a_link(tmp_path: Path) -> None:
    """Kubernetes mounts `NAME -> ..data/NAME`, and `..data` is a link too."""
    (tmp_path / "..2026").mkdir()
    (tmp_path / "..2026" / "allow.json").write_text("{}")
    (tmp_path / "..data").symlink_to("..2026")
    (tmp_path / "allow.json").symlink_to("..data/allow.json")
    assert AllowList(tmp_path / "allow.json").name_of("") is None
    device = tmp_path / "device"
    device.symlink_to("/dev/zero")
    with pytest.raises(ValueError, match="is a device"):
        bounded_files.read_bytes(device, links=True)


def test_read_map_works_on_a_system_without_the_flags_of_posix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows, on which producers run, has no such flags."""
    for name in ("O_NONBLOCK", "O_NOCTTY", "O_CLOEXEC", "O_NOFOLLOW"):
        monkeypatch.delattr(os, name)
    (tmp_path / "file.json").write_text("{}")
    assert bounded_files.read_map(tmp_path / "file.json") == {}


def load_config(path: Path) -> None:
    parser = options.receiver_parser()
    check_files(parser, ["--config", str(path)])


OPERATORS: dict[str, Callable[[Path], Any]] = {
    "allow-list": AllowList,
    "key file": Keys.load,
    "token file": Token.load,
    "config": load_config,
}
"""Readers of files that an operator names. These files may be links."""


@pytest.mark.timeout(30)
@table("reader", OPERATORS)
@table(
    ("kind", "says"),
    [
        ("pipe", "is a pipe"),
        ("endless", "is a device"),
        ("folder", "is a folder"),
        ("large", "larger than"),
        (DEEP, "nested|larger than|too deep"),
    ],
)
def test_files_that_operators_name_must_be_small_and_regular(
    reader: str, kind: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = planted(tmp_path / "robot.json", kind)
    if kind not in ("endless", "folder"):
        path.chmod(0o600)
    with pytest.raises((ValueError, SystemExit)) as caught:
        OPERATORS[reader](path)
    said = str(caught.value) + " ".join(capsys.readouterr().err.split())
    assert str(path) in said
    assert re.search(says, said)


def test_a_configuration_with_expanding_or_nested_yaml_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["a0: &a0 [" + ", ".join(["ha"] * 10) + "]"]
    lines += [f"a{n}: &a{n} [" + ", ".join([f"*a{n - 1}"] * 10) + "]" for n in range(1, 10)]
    for text, says in (
        ("\n".join(lines), "aliases expanded"),
        ("run: &a [*a]", "contains itself"),
        ("run: " + "[" * 90 + "]" * 90, "too deep"),
    ):
        (tmp_path / "config.yaml").write_text(text)
        with pytest.raises(SystemExit):
            load_config(tmp_path / "config.yaml")
        assert says in " ".join(capsys.readouterr().err.split())


@pytest.mark.timeout(30)
@table(
    "content",
    [
        '{"read": 100000000000000000000, "durable": 1}',
        '{"read": 9223372036854775808, "durable": 1}',
        '{"read": true, "durable": true}',
        '{"read": 9.5, "durable": 5}',
        '{"read": "9", "durable": "5"}',
        '{"read": 9, "durable": 5, "journal": []}',
        "[7, 5]",
        DEEP[:2000],
        "pipe",
        "link",
        "large",
    ],
)
def test_a_bad_file_of_positions_leaves_the_last_good_positions_in_force(
    content: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path
    offsets = ConsumerOffsets(folder)
    offsets.publish(7, 5)
    assert offsets.load() == Positions(7, 5)
    offsets.path.unlink()
    planted(offsets.path, content)
    with caplog.at_level(logging.WARNING):
        assert offsets.load() == Positions(7, 5)
    assert "cursor.json" in caplog.text


@pytest.mark.timeout(30)
def test_the_allow_list_keeps_its_last_good_keys_and_counts_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stream_ssl.receiver.allow_list._RELOAD_SECONDS", 0.0)
    key = Keys.generate("robot").public
    path = tmp_path / "allow.json"
    path.write_text(json.dumps({"robot": key}))
    listed = AllowList(path)
    for kind in (DEEP, '{"a": 1, "a": 2}', "[]", "pipe", "large", '{"robot": 5}'):
        path.unlink()
        planted(path, kind)
        listed.reload()
        assert listed.name_of(key) == "robot"
        assert listed.take_errors() == 1, kind[:20]
    path.unlink()
    path.write_text("{}")
    listed.reload()
    assert (listed.name_of(key), listed.take_errors()) == (None, 0)


@pytest.mark.timeout(30)
@table("kind", ["link", "pipe", "folder"])
def test_lock_files_must_be_regular_files(kind: str, tmp_path: Path) -> None:
    folder = tmp_path
    says = f"is a {kind}"
    planted(folder / "receiver.lock", kind)
    with pytest.raises(ValueError, match=says), endpoints.hold_role(folder, "receiver"):
        pass
    (folder / "journal").mkdir()
    planted(folder / "journal" / LOCK_FILE, kind)
    with pytest.raises(JournalError, match=says):
        Journal(folder / "journal")
    (folder / "spool").mkdir()
    planted(folder / "spool" / "lock", kind)
    with pytest.raises(ValueError, match=says):
        Spool(folder / "spool", "robot", 1 << 20)
    planted(folder / "endpoints.json.lock", kind)
    with pytest.raises(ValueError, match=says):
        endpoints.publish(folder, "receiver", http="http://127.0.0.1:1")
    assert all(path.read_text() == "{}" for path in folder.rglob("elsewhere"))


@pytest.mark.timeout(30)
@table("kind", ["link", "pipe", "large", DEEP[:2000], "[1]", '{"receiver": 5}'])
def test_planted_files_in_the_folder_of_a_run_count_as_damaged(kind: str, tmp_path: Path) -> None:
    folder = tmp_path
    planted(folder / endpoints.FILE, kind)
    assert endpoints.load(folder) == {}
    planted(folder / "id", kind)
    assert journal_id(folder) is None
    (sealed := folder / "sealed").mkdir()
    seal(sealed)
    assert damage(sealed) is None
    (sealed / MANIFEST).unlink()
    planted(sealed / MANIFEST, kind)
    assert damage(sealed) is not None


@pytest.mark.timeout(30)
def test_a_spool_names_the_fault_of_its_description(tmp_path: Path) -> None:
    for number, (kind, says) in enumerate(
        [
            (DEEP[:2000], "nested"),
            ("pipe", "is a pipe"),
            ('{"producer": "robot", "epoch": 100000000000000000000}', "2\\^64"),
            ('{"producer": "robot", "epoch": true}', "epoch is True"),
        ]
    ):
        (folder := tmp_path / str(number)).mkdir()
        planted(folder / "spool.json", kind)
        with pytest.raises(ValueError, match=f"is no spool's.*{says}.*another folder.*delete"):
            Spool(folder, "robot", 1 << 20)
