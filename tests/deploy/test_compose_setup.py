"""The step of Compose that makes keys and token once, also if it was interrupted before."""

from __future__ import annotations

import runpy
import stat
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from stream_ssl.wire.keys import Keys

SETUP = Path(__file__).parents[2] / "deploy" / "compose" / "setup.py"


def setup(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Run the step, and return the content of its files."""
    monkeypatch.setattr(sys, "argv", [str(SETUP), str(folder)])
    runpy.run_path(str(SETUP))
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_a_second_setup_changes_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = setup(tmp_path, monkeypatch)
    names = ("allow.json", "http.token", "receiver.public.json", "receiver.secret.json")
    assert sorted(made) == sorted(names)
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in names]
    assert modes == [0o644, 0o640, 0o644, 0o600]
    assert len(made["http.token"]) > 16
    assert setup(tmp_path, monkeypatch) == made


def test_a_setup_completes_an_earlier_setup_that_was_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as interrupted:
        interrupted.setattr("secrets.token_urlsafe", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            setup(tmp_path, monkeypatch)
    (tmp_path / "receiver.public.json").unlink()
    made = setup(tmp_path, monkeypatch)
    assert len(made["http.token"]) > 16
    secret = Keys.load(tmp_path / "receiver.secret.json")
    assert Keys.load(tmp_path / "receiver.public.json").public == secret.public
