"""The completion script in a real bash, and the form of the script for zsh."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

from stream_ssl.app.cli import COMMANDS
from stream_ssl.app.commands import completion

ASK = """
source "$1"
read -r -a registered <<< "$(complete -p stream-ssl)"
while read -r -a words; do
  [ "${words[-1]}" = . ] && words[-1]=
  COMP_WORDS=(stream-ssl "${words[@]}"); COMP_CWORD=${#words[@]}; COMPREPLY=()
  for at in "${!registered[@]}"; do
    [ "${registered[$at]}" = -F ] &&
      "${registered[$((at + 1))]}" stream-ssl "${COMP_WORDS[-1]}" "${COMP_WORDS[-2]}"
  done
  echo "${COMPREPLY[@]}"
done
"""
"""Calls the function that the script registered, as bash does at TAB, for each line of words. A
point is an empty last word.
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import shtab

    file = tmp_path_factory.mktemp("completion") / "stream-ssl.bash"
    parser = completion.command_line()
    file.write_text(shtab.complete(parser, "bash"))
    file.with_suffix(".zsh").write_text(shtab.complete(parser, "zsh"))
    return file


def answers(script: Path, lines: Iterable[str], folder: Path | None = None) -> list[list[str]]:
    """Return what bash offers for the last word of each line."""
    done = subprocess.run(
        ["bash", "--norc", "-c", ASK, "bash", script],
        input="".join(f"{line}\n" for line in lines),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd=folder,
    )
    return [line.split() for line in done.stdout.splitlines()]


OFFERED: dict[str, str] = {
    "ex": "export",
    "produce lero": "lerobot",
    "curate kaf": "",
    "curate np": "",  # no vectors
    "curate images --kee": "--keep",
    "run --memory.ca": "--memory.capacity",
    "run --receiver.bi": "--receiver.bind",
    "run --receivers": "--receivers",
    "check --receivers": "--receivers",
    "receiver --memory.ca": "",
    "produce watch --source.roo": "--source.root",
    "run --optimiser.name s": "sgd",
    "learner --loss info": "infonce",  # a short name of a class
    "run --memory.eviction most": "most-duplicated",
    "produce crawl --source.robots t": "true",
    "completion .": "bash zsh",
    "status --he": "--health",  # an argument of a function
    ".": " ".join(COMMANDS),
    "run rob": "robot.yaml",
    "check --config rob": "robot.yaml",
}


def test_bash_offers_commands_options_values_and_files(script: Path, tmp_path: Path) -> None:
    (tmp_path / "robot.yaml").touch()
    found = answers(script, OFFERED, tmp_path)
    told = [" ".join(sorted({*words} - {"--help"})) for words in found]
    expected = [" ".join(sorted(words.split())) for words in OFFERED.values()]
    assert dict(zip(OFFERED, told, strict=True)) == dict(zip(OFFERED, expected, strict=True))


def test_zsh_gets_every_command_with_its_options(script: Path) -> None:
    text = script.with_suffix(".zsh").read_text()
    assert text.startswith("#compdef stream-ssl")
    assert [name for name in COMMANDS if f"    {name}:'" not in text] == []
    assert "--memory.capacity" in text


def test_the_completion_command_prints_a_script_without_torch(
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
