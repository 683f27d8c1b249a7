"""The schema of the config file agrees with the parser, which decides what is right."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from jsonargparse import ArgumentParser
from table import table

from stream_ssl.app.commands import schema as command
from stream_ssl.config import options
from stream_ssl.config.schema import config_schema

ROOT = Path(__file__).parents[2]
SHIPPED = sorted((ROOT / "deploy" / "configs").rglob("*.yaml"))


@pytest.fixture(scope="module")
def parser() -> ArgumentParser:
    return options.run_parser("learner")


@pytest.fixture(scope="module")
def schema(parser: ArgumentParser) -> dict[str, Any]:
    made = config_schema(parser, "test")
    jsonschema.Draft202012Validator.check_schema(made)
    return made


def faults(schema: dict[str, Any], settings: object) -> list[str]:
    found = jsonschema.Draft202012Validator(schema).iter_errors(settings)
    return [error.json_path for error in found]


def accepted(parser: ArgumentParser, settings: dict[str, Any], folder: Path) -> bool:
    """Whether the parser reads the settings, which lack nothing."""
    file = folder / "config.yaml"
    whole = {"memory": {"capacity": 64}, "batches": {"batch_size": 16}}
    for name, section in settings.items():
        both = isinstance(section, dict) and isinstance(whole.get(name), dict)
        whole[name] = {**whole[name], **section} if both else section
    file.write_text(yaml.safe_dump(whole))
    try:
        options.read(parser, [str(file)])
    except SystemExit:
        return False
    return True


def test_each_shipped_configuration_matches_the_schema(schema: dict[str, Any]) -> None:
    assert len(SHIPPED) >= 13
    found = {file.name: faults(schema, yaml.safe_load(file.read_text())) for file in SHIPPED}
    assert found == {file.name: [] for file in SHIPPED}


def test_the_printed_configuration_of_a_run_matches_the_schema(
    schema: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    laptop = ROOT / "deploy" / "configs" / "laptop.yaml"
    with pytest.raises(SystemExit) as end:
        options.read(options.learner_parser(), [str(laptop), "--print_config"])
    assert end.value.code in (None, 0)
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["memory"]["capacity"] == 2048
    assert faults(schema, printed) == []


def own(kind: str, **arguments: Any) -> dict[str, Any]:
    return {"class_path": kind, "init_args": arguments}


RIGHT: dict[str, dict[str, Any]] = {
    "a short name": {"loss": "debiased"},
    "the name of a class": {"loss": "InfoNCE"},
    "a class path with arguments": {"loss": own("stream_ssl.losses.InfoNCE", temperature=0.2)},
    "a path in the module of a class": {
        "memory": {"eviction": {"class_path": "stream_ssl.memory.eviction.oldest.Oldest"}}
    },
    "another package's network": {"encoder": {"model": own("torchvision.models.resnet18")}},
    "a number where null is the default": {"learner": {"threads": 2}},
    "null": {"learner": {"threads": None, "novelty": None}, "schedule": None},
    "a whole number for a fraction": {"optimiser": {"learning_rate": 1}},
    "one of two types": {"memory": {"shares": {"robot-1": 2.0}}},
    "a word or files": {"access": "plain"},
    "files": {"access": {"keys": "a.secret.json", "allow": "b.json"}},
    "arguments without a class": {
        "observe": {"held_out": {"source": own("images", root="photos"), "k": 5}}
    },
    "a dictionary of classes": {"shadows": {"queue": {"class_path": "oldest"}}},
    "a class within a class": {
        "memory": {"eviction": own("most-duplicated", score=own("von-mises-fisher", kappa=0.1))}
    },
}

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown section": ({"memmory": {}}, "$"),
    "an unknown option": ({"memory": {"capcity": 5}}, "$.memory"),
    "a word for a number": ({"memory": {"capacity": "many"}}, "$.memory.capacity"),
    "a fraction for a whole number": ({"batches": {"workers": 1.5}}, "$.batches.workers"),
    "a list for a number": ({"optimiser": {"learning_rate": [1]}}, "$.optimiser.learning_rate"),
    "a choice that does not exist": ({"optimiser": {"name": "lion"}}, "$.optimiser.name"),
    "a number among choices": ({"decoder": {"channels": 2}}, "$.decoder.channels"),
    "three numbers for two": ({"views": {"crop": [0.1, 0.2, 0.3]}}, "$.views.crop"),
    "an unknown short name": ({"loss": "infonec"}, "$.loss"),
    "an unknown class of ours": ({"loss": {"class_path": "stream_ssl.losses.Wrong"}}, "$.loss"),
    "an unknown argument": ({"loss": own("infonce", temprature=1.0)}, "$.loss"),
    "a wrong type of an argument": ({"method": own("moco", momentum="much")}, "$.method"),
    "a score as a policy": (
        {"memory": {"eviction": "von-mises-fisher"}},
        "$.memory.eviction",
    ),
    "a shadow of no policy": ({"shadows": {"one": "nothing"}}, "$.shadows.one"),
}


@table("case", RIGHT)
def test_the_schema_and_the_parser_accept_right_settings(
    case: str, schema: dict[str, Any], parser: ArgumentParser, tmp_path: Path
) -> None:
    assert faults(schema, RIGHT[case]) == []
    assert accepted(parser, RIGHT[case], tmp_path)


@table("case", WRONG)
def test_the_schema_and_the_parser_refuse_wrong_settings(
    case: str, schema: dict[str, Any], parser: ArgumentParser, tmp_path: Path
) -> None:
    settings, place = WRONG[case]
    assert faults(schema, settings) == [place]
    assert not accepted(parser, settings, tmp_path)


def test_the_schema_refuses_null_for_an_option_that_needs_a_value(schema: dict[str, Any]) -> None:
    assert faults(schema, {"learner": {"device": None}}) == ["$.learner.device"]


def test_every_option_has_a_description(schema: dict[str, Any]) -> None:
    options = page().leaves("config", schema)
    found = {name: option["description"] for name, option in options}
    assert len(found) > 80
    assert [name for name, text in found.items() if not text] == []


def test_the_schema_of_the_receiver_ignores_options_of_the_learner(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command.main(["receiver"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert faults(made, {"receiver": {"bnd": 1}}) == ["$.receiver"]
    assert faults(made, {"memory": {"capcity": 5}}) == []


def page() -> Any:
    """Return the module that writes the site's page of options."""
    place = ROOT / "docs" / "site" / "options.py"
    spec = importlib.util.spec_from_file_location("site_options", place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_sites_page_has_every_option_and_class(schema: dict[str, Any]) -> None:
    text = page().page(ROOT)
    options = [f"{section}.{name}".lstrip(".") for section, name in named(schema)]
    assert len(options) > 80
    assert [name for name in options if f"\n### `{name}`\n" not in text] == []
    assert "\n### `memory.capacity`\n\ninteger, required, *fixed*\n" in text
    assert "\n### `infonce`\n" in text
    assert "When to change it: [" in text


def named(schema: dict[str, Any], section: str = "") -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for name, option in schema["properties"].items():
        inner = f"{section}.{name}".lstrip(".")
        found += named(option, inner) if "properties" in option else [(section, name)]
    return found


def test_every_page_is_in_the_sites_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    pages = [file.name for file in (ROOT / "docs").glob("*.md")]
    assert len(pages) >= 20
    assert [name for name in pages if f"- {name}\n" not in f"{text}\n"] == []
