"""`stream-ssl init` from a checkout and from inside a wheel."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from stream_ssl.app.commands import init

ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "deploy" / "configs"
NAMES = sorted(
    file.relative_to(SHIPPED).with_suffix("").as_posix() for file in SHIPPED.rglob("*.yaml")
)


def test_init_prints_each_configuration_unchanged(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(NAMES) >= 13
    for name in NAMES:
        assert init.main([name]) == 0
        assert capsys.readouterr().out == (SHIPPED / f"{name}.yaml").read_text()


def test_init_without_a_name_lists_all_configurations(capsys: pytest.CaptureFixture[str]) -> None:
    assert init.main([]) == 0
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert sorted(name for name, _ in lines) == NAMES
    assert [name for name, text in lines if not 20 < len(text) <= 90] == []


def test_init_refuses_an_unknown_name_and_lists_the_known_names(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as end:
        init.main(["desktop"])
    assert end.value.code == 2
    told = capsys.readouterr().err
    assert "desktop" in told
    assert "laptop" in told
    with pytest.raises(SystemExit):
        init.main(["laptopp"])
    assert "; did you mean laptop?" in capsys.readouterr().err


def test_a_wheel_has_the_configurations(tmp_path: Path) -> None:
    def run(*words: str, folder: Path = tmp_path) -> str:
        command = [sys.executable, "-m", *words]
        apart = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
        done = subprocess.run(
            command, cwd=folder, env=apart, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("hatchling", "build", "-t", "wheel", "-d", str(tmp_path), folder=ROOT)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
        named = archive.namelist()
    assert "stream_ssl/app/configs/laptop.yaml" in named
    assert run("stream_ssl", "init", "laptop") == (SHIPPED / "laptop.yaml").read_text()
    probe = tmp_path / "probe.py"
    probe.write_text("from stream_ssl.app.commands import init\nprint(*init.configs().values())")
    files = [Path(name) for name in run("probe").split()]
    inside = tmp_path / "installed" / "stream_ssl" / "app" / "configs"
    assert sorted(file.relative_to(inside).with_suffix("").as_posix() for file in files) == NAMES
