"""Tests that the recipes of CONTRIBUTING.md work, and name existing files."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from table import table
from torch.nn.functional import normalize

from stream_ssl import losses, methods
from stream_ssl.config import options
from stream_ssl.losses import LOSSES
from stream_ssl.memory import WorkingMemory
from stream_ssl.memory.eviction import POLICIES
from stream_ssl.methods import METHODS
from stream_ssl.producers.sources import SOURCES

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
RECIPES = dict(re.findall(r"\*\*An? ([a-z ]+)\.\*\* (.*?)(?=\n\*\*|\n## )", PAGE, re.DOTALL))


@pytest.fixture(scope="module", autouse=True)
def plain_parser() -> None:
    """Build the parser, which tests share, before a test adds names to its help."""
    options.learner_parser()


def made(recipe: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return a module with the definitions of the recipe's snippet."""
    (code,) = re.findall(r"```python\n(.*?)```", RECIPES[recipe], re.DOTALL)
    module = ModuleType(f"recipe_of_a_{recipe.replace(' ', '_')}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(code, vars(module))
    return module


def test_there_are_eight_recipes() -> None:
    kinds = {"eviction policy", "policy that learns", "loss", "method", "source", "metric"}
    assert set(RECIPES) == kinds | {"message of the wire", "option"}


@table("recipe", sorted(RECIPES))
def test_a_recipe_names_existing_files_tables_and_tests(recipe: str) -> None:
    text = RECIPES[recipe]
    code = re.sub(r"```python.*?```", "", text, flags=re.DOTALL)
    files = [name for name in re.findall(r"`([a-z_/]+(?:/|\.)[a-z_/.]+)`", code) if "/" in name]
    assert len(files) >= 2
    assert [name for name in files if not (ROOT / name).exists()] == []
    for name, file in re.findall(r"`([A-Z_]+)` of\s+`([a-z_/.]+)`", code):
        assert re.search(rf"^{name}\b.*=", (ROOT / file).read_text(), re.MULTILINE), name
    (command,) = re.findall(r"^    \.venv/bin/python -m pytest (.*)$", text, re.MULTILINE)
    assert all((ROOT / place).exists() for place in command.split())


@table(("page", "package"), [("losses", losses), ("methods", methods)], ids=("losses", "methods"))
def test_the_package_exports_the_base_classes_that_the_docs_name(
    page: str, package: ModuleType
) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text()
    named = {
        name
        for sentence in re.findall(r"[Dd]erive\s+from\s[^.]+\.", text)
        for name in re.findall(r"`([A-Z][a-zA-Z]+)`", sentence)
    }
    assert len(named) > 3
    assert [name for name in sorted(named) if name not in package.__all__] == []


def test_the_files_and_folders_that_contributing_names_exist() -> None:
    folders = ("", "stream_ssl")
    named = re.findall(r"`([a-z_]+/[a-z_/]*(?:\.py)?)`", PAGE.partition("## Recipes")[0])
    assert len(named) > 15
    assert [n for n in named if not any((ROOT / f / n).exists() for f in folders)] == []


def configured(**settings: Any) -> Any:
    """Return the parts that a configuration with these settings builds."""
    parser = options.learner_parser()
    return parser.instantiate(parser.parse_string(json.dumps(settings)))


def test_the_policy_and_the_loss_of_the_recipes_work_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = made("eviction policy", monkeypatch).Lowest
    loss = made("loss", monkeypatch).Share
    monkeypatch.setitem(POLICIES, "lowest", policy)
    monkeypatch.setitem(LOSSES, "share", loss)
    z_ND = normalize(torch.randn(9, 4, generator=torch.Generator().manual_seed(0)), dim=1)
    memory = WorkingMemory(3, 4, policy())
    assert memory.add(torch.arange(9), z_ND).evicted.tolist() == [0, 3, 4, 5, 6, 7]
    share = loss(temperature=0.5)(z_ND[:2], z_ND[2:4].unsqueeze(1), z_ND[4:])
    shares = [
        torch.exp(z_ND[b] @ z_ND[b + 2] / 0.5) / torch.exp(z_ND[b] @ z_ND[4:].T / 0.5).sum()
        for b in range(2)
    ]
    expected = [float(1 - 1 / (1 + 1 / each)) for each in shares]
    assert share.per_anchor.tolist() == pytest.approx(expected, rel=1e-5)
    sizes = {"decoder": {"size": 8}, "batches": {"batch_size": 4}}
    found = configured(**sizes, memory={"capacity": 9, "eviction": "lowest"}, loss="share")
    assert type(found.memory.eviction) is policy
    assert type(found.loss) is loss


def test_the_policy_that_learns_tries_every_arm_and_resumes_from_its_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bandit = made("policy that learns", monkeypatch).KappaBandit
    z_ND = normalize(torch.randn(600, 6, generator=torch.Generator().manual_seed(1)), dim=1)
    memory = WorkingMemory(40, 6, bandit(batches=2))
    seen = set()
    for part in torch.arange(600).split(20):
        memory.add(part, z_ND[part])
        seen.add(memory.eviction.arm)
        loaded = WorkingMemory(40, 6, bandit(batches=2))
        loaded.load_state_dict(memory.state_dict())
        assert loaded.eviction.score == memory.eviction.score
        assert torch.equal(loaded.counts(), memory.counts())
        assert loaded.check_valid() == (True, "")
        memory = loaded
    assert seen == {0, 1, 2}


def test_the_source_of_the_recipe_continues_from_its_position(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = made("source", monkeypatch).Grey
    monkeypatch.setitem(SOURCES, "grey", source)
    every = list(source().samples())
    assert [sample.id for sample, _ in every] == [str(shade) for shade in range(256)]
    position = json.loads(json.dumps(every[99][1]))
    again = [(sample.id, bytes(sample.data), at) for sample, at in source().samples(position)]
    assert again == [(sample.id, bytes(sample.data), at) for sample, at in every[100:]]


@pytest.mark.parametrize(("option", "table"), [("loss", LOSSES), ("method", METHODS)])
def test_an_error_about_a_wrong_name_lists_the_known_names(
    option: str, table: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        configured(**{option: "no-such-name"})
    said = capsys.readouterr().err
    assert [name for name in table if name not in said] == []
