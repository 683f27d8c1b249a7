"""The commands and code of README.md and of the pages under docs/ run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from forked import Forked, run_script
from harness import TINY

from stream_ssl.app.commands import check
from stream_ssl.producers.sources import SOURCES

ROOT = Path(__file__).parents[2]


def snippets(page: str) -> list[str]:
    """Return the page's Python, without the snippets that need a running daemon."""
    found = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    return [code for code in found if "from stream_ssl.producers" not in code]


@pytest.mark.parametrize(
    ("page", "least"), [("README.md", 1), ("docs/memory.md", 8), ("docs/methods.md", 1)]
)
def test_the_snippets_of_a_page_run_one_after_the_other(
    page: str, least: int, tmp_path: Path
) -> None:
    codes = snippets(page)
    assert len(codes) >= least
    check = "\nok, reason = memory.check_valid()\nassert ok and len(memory), reason\n"
    script = tmp_path / "page.py"
    script.write_text("\n".join(codes) + check)
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    quiet = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    output = tmp_path / "output.log"
    reader = Forked(run_script, script, alone | quiet, output=output)
    assert reader.wait(120) == 0, output.read_text()


def test_check_accepts_the_configuration_on_the_page_about_the_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "docs" / "memory.md").read_text()
    found = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert len(found) == 1
    settings = yaml.safe_load(found[0])
    assert set(settings) == {"memory", "shadows"}
    file = tmp_path / "config.yaml"  # JSON is YAML
    file.write_text(json.dumps(TINY | settings | {"run": str(tmp_path / "run")}))
    status = check.main([str(file)])
    assert status == 0
    assert "memory       4096 slots" in capsys.readouterr().out


PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    *(f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md"))),
]


def test_links_lead_to_existing_files() -> None:
    missing = []
    for page in PAGES:
        targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / page).read_text())
        there = (ROOT / page).parent
        missing += [f"{page}: {name}" for name in targets if not there.joinpath(name).exists()]
    assert not missing


def test_the_page_on_deployment_copies_no_file_to_the_terminal() -> None:
    """For "-", Docker writes a tar archive, and not the content of the file."""
    page = (ROOT / "deploy" / "README.md").read_text()
    copies = [line for line in page.splitlines() if "compose cp" in line]
    assert copies
    assert not [line for line in copies if re.search(r"compose cp \S+ -(\W|$)", line)]


def test_the_page_on_upgrades_names_the_formats_that_are_written() -> None:
    from stream_ssl.journal import segment
    from stream_ssl.learning import checkpoint_layout
    from stream_ssl.memory import state

    page = (ROOT / "docs" / "upgrade.md").read_text()
    assert f"| checkpoint {checkpoint_layout.FORMAT}, memory {state.VERSION} |" in page
    assert f"| journal {segment.FORMAT} |" in page


def test_the_page_on_the_memory_names_every_policy_and_score() -> None:
    from stream_ssl.memory import scores
    from stream_ssl.memory.eviction import POLICIES

    text = (ROOT / "docs" / "memory.md").read_text()
    named = [found.__name__ for found in POLICIES.values()]
    ours = [found for found in scores.Score.__subclasses__() if found.__module__ == scores.__name__]
    named += [found.__name__ for found in ours]  # other tests have scores of their own
    assert len(named) >= 11
    assert [name for name in named if f"`{name}(" not in text] == []


def test_the_page_on_methods_names_every_method_loss_and_preset() -> None:
    from stream_ssl.losses import LOSSES
    from stream_ssl.methods import METHODS

    text = (ROOT / "docs" / "methods.md").read_text()
    named = [found.__name__ for found in [*METHODS.values(), *LOSSES.values()]]
    named += [file.name for file in (ROOT / "deploy" / "configs" / "presets").iterdir()]
    assert len(named) >= 20
    assert [name for name in named if f"`{name}`" not in text] == []


def test_every_source_that_a_page_names_exists() -> None:
    pages = [*map(ROOT.joinpath, PAGES), *(ROOT / "deploy").rglob("*.md")]
    named = {
        name
        for page in pages
        for name in re.findall(r"stream-ssl produce ([a-z_]+(?![\w.]))", page.read_text())
    } - {"table"}  # of the package in docs/own-source.md
    assert len(named) >= 5
    assert named <= SOURCES.keys()
