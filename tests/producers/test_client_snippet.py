"""The producer in ten lines, as documented, runs."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path
from typing import Any, get_args

import pytest
from client_peer import Peer
from PIL import Image

from stream_ssl import producers
from stream_ssl.producers.client import OnFull
from stream_ssl.producers.stats import Outcome, State

RUN = '"runs/laptop"'
README = Path(__file__).parents[2] / "README.md"


def snippet() -> str:
    documented = producers.__doc__
    assert documented is not None
    return textwrap.dedent(documented[documented.index("    import numpy") :])


def run(code: str, folder: Path, address: str) -> None:
    """Run a snippet whose run folder names a receiver in plain text at an address."""
    (folder / "endpoints.json").write_text(json.dumps({"receiver": {"data": address}}))
    assert RUN in code
    code = code.replace(RUN, repr(str(folder)))
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(code, "snippet", "exec"), names)


@pytest.mark.parametrize("position", [None, 990])
def test_the_documented_snippet_resumes_and_sends_every_image(
    tmp_path: Path, position: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    with Peer() as peer, peer.serving(position=position) as journal:
        run(snippet(), tmp_path, peer.address)
    sent = [sample for data in journal for sample in data.samples()]
    assert [sample.id for sample in sent] == [f"frame-{n}" for n in range(position or 0, 1000)]
    assert (journal[-1].position, sent[-1].shape, sent[-1].source) == (
        1000,
        (32, 32, 3),
        "camera-1",
    )
    assert "every image" in capsys.readouterr().out


def test_the_documented_snippet_has_at_most_ten_lines() -> None:
    assert len([line for line in snippet().splitlines() if line]) <= 10


def test_the_snippet_of_the_readme_sends_a_folder_of_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    (shown,) = [block for block in blocks if "from stream_ssl.producers import Producer" in block]
    photos = tmp_path / "photos" / "more"
    photos.mkdir(parents=True)
    for number in range(5):
        Image.new("RGB", (20, 10), (number, 0, 0)).save(photos / f"{number}.jpg")
    monkeypatch.chdir(tmp_path)
    with Peer() as peer, peer.serving(position=2) as journal:
        run(shown, tmp_path, peer.address)
    sent = [sample for data in journal for sample in data.samples()]
    assert [(sample.id, sample.codec) for sample in sent] == [
        (f"{number}.jpg", "jpeg") for number in range(2, 5)
    ]
    assert journal[-1].position == 5
    assert "every image" in capsys.readouterr().out


@pytest.mark.parametrize("number", [0, 1])
def test_the_snippets_of_the_producers_page_run(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (README.parent / "docs" / "producers.md").read_text(encoding="utf-8")
    code, sent = [
        (block, block.count("producer.s"))
        for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    ][number]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "frame.jpg").write_bytes(b"\xff\xd8\xff and so on")
    with Peer() as peer, peer.serving() as journal:
        run(code, tmp_path, peer.address)
    assert sum(len(data) for data in journal) == sent


def test_the_producers_page_names_every_choice_state_and_outcome() -> None:
    page = (README.parent / "docs" / "producers.md").read_text(encoding="utf-8")
    for choice in get_args(OnFull):
        assert f'| `"{choice}"` |' in page
    for state in (*get_args(State), *get_args(Outcome)):
        assert f"`{state}`" in page
