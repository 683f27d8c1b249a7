"""The overlay file system of a container, which renames no folder that comes from the image."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest


def as_image(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all folders that are below `root` now come from the image."""
    folders = {path for path in root.rglob("*") if path.is_dir() and not path.is_symlink()}
    rename = Path.rename

    def renamed(self: Path, target: Path) -> Path:
        if self in folders:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), str(self))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", renamed)
