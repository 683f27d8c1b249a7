"""Errors of a start in a run folder with files of another account, such as root's."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from jsonargparse import Namespace

from stream_ssl.app.commands import check
from stream_ssl.bounded_files import named
from stream_ssl.config import options
from stream_ssl.daemon.receive import _opened
from stream_ssl.journal.writer_lock import LOCK_FILE
from stream_ssl.process.failures import Misconfigured, configuring


@pytest.mark.parametrize("file", [".", LOCK_FILE])
def test_a_receiver_names_a_file_of_its_journal_that_it_may_not_use(
    unprivileged: Path, file: str
) -> None:
    """If the receiver may not enter the folder, it names the first file that it opens."""
    settings = Namespace(run=unprivileged, journal=Namespace(budget=1 << 20))
    _opened(settings).close()
    place = unprivileged.joinpath("journal", file)
    place.chmod(0)
    refused = f"this user may not use {unprivileged}/journal/{LOCK_FILE}: .*chown -R"
    with pytest.raises(Misconfigured, match=refused), configuring():
        _opened(settings)
    place.chmod(0o700)


def test_a_permission_error_of_a_port_passes_unchanged() -> None:
    with pytest.raises(PermissionError, match="port 80"), configuring():
        raise PermissionError("port 80")


def test_check_names_a_journal_segment_that_this_user_may_not_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment = tmp_path / "journal" / "segment"
    segment.mkdir(parents=True)
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != segment and access(path, mode))
    settings = options.read(options.receiver_parser(), [f"--run={tmp_path}"])
    with pytest.raises(ValueError, match=f"may not use {re.escape(str(segment))}: "):
        check.check_receiver(settings)


def test_the_error_of_an_unreadable_key_does_not_advise_to_remove_the_key(
    unprivileged: Path,
) -> None:
    file = unprivileged / "key"
    file.touch(0)
    with (
        pytest.raises(ValueError, match=r"key .*: Permission denied; let this user read it"),
        named("key", file, "remove that file"),
    ):
        file.read_bytes()
