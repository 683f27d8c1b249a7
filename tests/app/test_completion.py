"""The completion script in a real bash, and zsh's for its form."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from table import table

from stream_ssl.app.cli import COMMANDS
from stream_ssl.app.commands import completion

ASK = """
source "$1"; shift
read -r -a registered <<< "$(complete -p stream-ssl)"
COMP_WORDS=(stream-ssl "$@"); COMP_CWORD=$#
for at in "${!registered[@]}"; do
  [ "${registered[$at]}" = -F ] && "${registered[$((at + 1))]}" stream-ssl "${@: -1}" "${@: -2:1}"
done
printf '%s\\n' "${COMPREPLY[@]}"
"""
"""Calls the function that the script registered, as bash does at TAB."""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import shtab

    file = tmp_path_factory.mktemp("completion") / "stream-ssl.bash"
    parser = completion.command_line()
    file.write_text(shtab.complete(parser, "bash"))
    file.with_suffix(".zsh").write_text(shtab.complete(parser, "zsh"))
    return file


def answer(script: Path, *words: str, folder: Path | None = None) -> list[str]:
    """What bash offers for the last of the words."""
    done = subprocess.run(
        ["bash", "--norc", "-c", ASK, "bash", script, *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd=folder,
    )
    return done.stdout.split()


OFFERED: dict[str, tuple[list[str], list[str]]] = {
    "commands": (["ex"], ["export"]),
    "sources": (["produce", "lero"], ["lerobot"]),
    "sources to curate": (["curate", "kaf"], []),
    "options of a source to curate": (["curate", "images", "--kee"], ["--keep"]),
    "options of a run": (["run", "--memory.ca"], ["--memory.capacity"]),
    "an option of the receiver in a run": (["run", "--receiver.bi"], ["--receiver.bind"]),
    "an option of run": (["run", "--receivers"], ["--receivers"]),
    "an option of check": (["check", "--receivers"], ["--receivers"]),
    "no vectors to curate": (["curate", "np"], []),
    "options of a receiver": (["receiver", "--memory.ca"], []),
    "options of a source": (["produce", "watch", "--source.roo"], ["--source.root"]),
    "choices": (["run", "--optimiser.name", "s"], ["sgd"]),
    "short names of classes": (["learner", "--loss", "info"], ["infonce"]),
    "short names of policies": (["run", "--memory.eviction", "most"], ["most-duplicated"]),
    "true and false": (["produce", "crawl", "--source.robots", "t"], ["true"]),
    "shells": (["completion", ""], ["bash", "zsh"]),
    "an argument of a function": (["status", "--he"], ["--health"]),
}


@table("case", OFFERED)
def test_bash_offers(case: str, script: Path) -> None:
    words, expected = OFFERED[case]
    found = [word for word in answer(script, *words) if word != "--help"]
    assert found == expected


def test_bash_offers_every_command(script: Path) -> None:
    assert set(answer(script, "")) == {*COMMANDS}


def test_bash_offers_config_files(script: Path, tmp_path: Path) -> None:
    (tmp_path / "robot.yaml").touch()
    assert answer(script, "run", "rob", folder=tmp_path) == ["robot.yaml"]
    assert answer(script, "check", "--config", "rob", folder=tmp_path) == ["robot.yaml"]


def test_zsh_gets_every_command_with_its_options(script: Path) -> None:
    text = script.with_suffix(".zsh").read_text()
    assert text.startswith("#compdef stream-ssl")
    assert [name for name in COMMANDS if f"    {name}:'" not in text] == []
    assert "--memory.capacity" in text


def test_the_command_prints_the_script(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def without(words: list[str]) -> list[object]:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr(completion, "options", without)
    assert completion.main(["bash"]) == 0
    printed = capsys.readouterr().out
    assert "complete " in printed
    assert "conform" in printed
    assert "--memory.capacity" not in printed
