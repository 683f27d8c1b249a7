"""The package is whole in a folder that lacks the links to `memory` and `producers`."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import stream_ssl


@pytest.mark.parametrize("link", [None, "../memory"])
def test_the_package_finds_its_folders_without_links(link: str | None, tmp_path: Path) -> None:
    package, folder = tmp_path / "stream_ssl", tmp_path / "memory"
    package.mkdir()
    folder.mkdir()
    shutil.copy(stream_ssl.__file__, package)
    (folder / "__init__.py").write_text("print('found')")
    if link is not None:
        (package / "memory").write_text(link)  # as git writes it if core.symlinks is false
    done = subprocess.run(
        [sys.executable, "-I", "-c", "import sys; sys.path[0:0] = ['.']; import stream_ssl.memory"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout, done.stderr) == ("found\n", "")
