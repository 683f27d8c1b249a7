"""The version names the commit that the program was made from."""

from __future__ import annotations

from pathlib import Path

import pytest

from stream_ssl import __version__
from stream_ssl import version as module

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def shown(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(module, "CHECKOUT", folder)
    monkeypatch.setattr(module, "_of_package", lambda: None)
    module.version.cache_clear()
    try:
        return module.version()
    finally:
        module.version.cache_clear()


@pytest.mark.parametrize("kind", ["branch", "packed", "detached", "work tree"])
def test_the_version_of_a_checkout_contains_its_commit(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git = tmp_path / ".git"
    (git / "refs" / "heads").mkdir(parents=True)
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    if kind == "packed":
        (git / "packed-refs").write_text(f"# pack-refs\n{COMMIT} refs/heads/main\n")
    elif kind == "detached":
        (git / "HEAD").write_text(f"{COMMIT}\n")
    else:
        (git / "refs" / "heads" / "main").write_text(f"{COMMIT}\n")
    folder = tmp_path
    if kind == "work tree":
        folder, beside = tmp_path / "tree", git / "worktrees" / "tree"
        folder.mkdir()
        beside.mkdir(parents=True)
        (folder / ".git").write_text(f"gitdir: {beside}\n")
        (beside / "HEAD").write_text("ref: refs/heads/main\n")
        (beside / "commondir").write_text("../..\n")
    assert shown(folder, monkeypatch) == f"{__version__} (01234567)"


@pytest.mark.parametrize("head", [None, "ref: refs/heads/none", "not a commit"])
def test_the_version_contains_no_commit_if_the_checkout_has_none(
    head: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if head is not None:
        (tmp_path / ".git").mkdir()
        (tmp_path / ".git" / "HEAD").write_text(head)
    assert shown(tmp_path, monkeypatch) == __version__
