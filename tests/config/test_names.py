"""Losses, methods, policies, scores and sources by short names, wherever a setting may stand."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import pytest
import yaml
from harness import TINY
from table import table

from stream_ssl.app.commands import check, learner, receiver, run
from stream_ssl.config import build, options
from stream_ssl.config.names import TABLES, checked_lookup, class_path, with_source
from stream_ssl.memory.scores import Gaussian, Linear
from stream_ssl.process.failures import USAGE

ROOT = Path(__file__).parents[2]

# What has no default.
NEEDED = ("--decoder.size=16", "--batches.batch_size=8", "--memory.capacity=64")


@table("kind", TABLES, ids=lambda kind: kind.__name__)
def test_every_short_name_stands_for_the_path_of_its_class(kind: type) -> None:
    _, table = TABLES[kind]
    for name, found in table.items():
        path = class_path(kind, name)
        package, _, own = path.rpartition(".")
        assert getattr(importlib.import_module(package), own) is found
        assert f"{found.__module__}.".startswith(f"{package}.")  # as checkpoints store it
        assert class_path(kind, own) == class_path(kind, path) == path


def flat(*arguments: str) -> dict[str, str]:
    """Return the settings as {"memory.capacity": "2048"}."""
    parser = options.learner_parser()
    return options.flat(options.resolved(parser, options.read(parser, [*arguments, *NEEDED])))


def test_the_command_line_accepts_short_names() -> None:
    found = flat(
        *("--loss", "decoupled", "--loss.sigma", "0.5", "--method=d-simclr", "--method.views=4"),
        *("--memory.eviction", "most-duplicated", "--memory.eviction.score", "von-mises-fisher"),
        *("--shadows", "{queue: oldest}", "--observe.held_out.source", "synthetic"),
    )
    expected = {
        "loss.class_path": "stream_ssl.losses.Decoupled",
        "loss.init_args.sigma": "0.5",
        "method.class_path": "stream_ssl.methods.DSimCLR",
        "method.init_args.views": "4",
        "memory.eviction.class_path": "stream_ssl.memory.eviction.MostDuplicated",
        "memory.eviction.init_args.score.class_path": "stream_ssl.memory.scores.VonMisesFisher",
        "memory.eviction.init_args.score.init_args.kappa": "0.1",
        "shadows.queue.class_path": "stream_ssl.memory.eviction.Oldest",
        "observe.held_out.init_args.source.class_path": "stream_ssl.producers.sources.Synthetic",
    }
    found = {
        key.replace("held_out.source", "held_out.init_args.source"): v for key, v in found.items()
    }
    assert expected.items() <= found.items()


@pytest.mark.parametrize(
    "words",
    [
        ("--observe.held_out", "cifar:a:b", "--observe.held_out.every", "200"),
        ("--observe.held_out=cifar:a:b", "--observe.held_out.every=200"),
        ("--observe.held_out.every", "200", "--observe.held_out", "cifar:a:b"),
        (
            "--observe.held_out",
            "idx:x",
            "--observe.held_out.every=200",
            "--observe.held_out=cifar:a:b",
        ),
    ],
)
def test_a_held_out_source_can_be_combined_with_other_options_of_its_section(
    words: tuple[str, ...],
) -> None:
    found = flat(*words)
    assert found["observe.held_out.every"] == "200"
    source = "observe.held_out.source"
    assert found[f"{source}.class_path"] == "stream_ssl.producers.sources.CifarBinary"
    options = {key: found[f"{source}.init_args.{key}"] for key in ("root", "split", "shuffle")}
    assert options == {"root": "a:b", "split": "test", "shuffle": "False"}, "as the place alone"


@pytest.mark.parametrize("value", ["null", "mnist:x", "images:", "synthetic:x", ""])
def test_with_source_leaves_a_text_that_names_no_source_unchanged(value: str) -> None:
    words = ["run.yaml", "--observe.held_out", value, "--observe.held_out.k=5"]
    expected = ["run.yaml", f"--observe.held_out={value}", "--observe.held_out.k=5"]
    assert with_source(words) == expected


def test_with_source_leaves_a_source_without_other_options_unchanged(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump({**TINY, "run": str(tmp_path / "run")}))
    words = [str(file), "--observe.held_out", f"images:{tmp_path / 'gone'}"]
    assert with_source(words) == words
    assert check.main(words) == USAGE
    assert "observe.held_out: no folder" in capfd.readouterr().err + caplog.text
    assert check.main([*words, "--observe.held_out.k", "5"]) == USAGE
    assert "Expected a" not in capfd.readouterr().err + caplog.text


def test_with_source_keeps_a_source_after_the_preceding_configurations() -> None:
    words = [
        "--observe.held_out",
        "--config",
        "a.yaml",
        "--observe.held_out.k=5",
        "--config=b.yaml",
    ]
    assert with_source(words) == words, "without a value, as it is"
    source = "--observe.held_out=idx:x"
    found = with_source([*words[1:], source, "--run", "here"])
    assert found[:3] == ["--config", "a.yaml", "--config=b.yaml"]
    assert json.loads(found[3].partition("=")[2])["source"]["class_path"] == "idx"
    assert found[4:] == ["--observe.held_out.k=5", "--run", "here"]


def test_a_file_and_the_environment_accept_short_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        "loss: {class_path: hard-negative, init_args: {beta: 2}}\n"
        "memory:\n"
        "  eviction: {class_path: redundant, init_args: {score: {class_path: gaussian}}}\n"
        "shadows: {queue: oldest, kept: {class_path: reservoir}}\n"
    )
    monkeypatch.setenv("STREAM_SSL_METHOD", "self-labeling")
    parser = options.learner_parser()
    settings = parser.instantiate(options.read(parser, [str(file), *NEEDED]))
    assert (type(settings.loss).__name__, settings.loss.beta) == ("HardNegative", 2)
    assert settings.method.class_path == "stream_ssl.methods.SelfLabelingMoCo"
    assert type(settings.memory.eviction).__name__ == "Redundant"
    assert settings.memory.eviction.score == Gaussian()
    assert [policy.name for policy in settings.shadows.values()] == ["oldest", "reservoir"]


WRONG = {
    "loss": ("decoupld", "there is no loss 'decoupld': choose one of debiased, decoupled, hard-"),
    "method": (
        "d-mocco",
        "there is no method 'd-mocco': choose one of byol, d-simclr, moco, self",
    ),
    "memory.eviction": (
        "duell",
        "no eviction policy 'duell': choose one of duel, minimum-redundancy, most-duplicated, ",
    ),
    "memory.eviction.score": (
        "sharp",
        "no score 'sharp': choose one of gaussian, linear, quadratic",
    ),
    "observe.held_out.source": ("mnist", "no source 'mnist': choose one of camera, cifar, crawl, "),
}


@table("option", WRONG)
def test_an_error_about_a_wrong_name_lists_the_choices(
    capsys: pytest.CaptureFixture[str], option: str
) -> None:
    name, message = WRONG[option]
    with pytest.raises(SystemExit) as end:
        flat("--memory.eviction", "most-duplicated", f"--{option}", name)
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert message in said
    assert "or a class path such as package.module.Class" in said


def test_an_error_about_an_option_of_another_policy_lists_the_valid_options(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        flat("--memory.eviction.score", "gaussian")
    said = capsys.readouterr().err
    assert "Duel takes kappa, index; to set score, first name a class that takes it" in said


@pytest.mark.parametrize("found", [None, lambda cls, name, closed: name])
def test_an_unknown_lookup_of_jsonargparse_raises_an_error(found: object) -> None:
    """Otherwise a newer jsonargparse would know no short name, or fail in the middle of a call."""
    with pytest.raises(ImportError, match=r"jsonargparse [0-9.]+ finds .*: install the version in"):
        checked_lookup(found)


def test_the_error_about_d_moco_names_a_preset_with_the_settings_of_the_paper(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The name of a method cannot set the memory, and the default memory counts otherwise."""
    with pytest.raises(SystemExit):
        flat("--method", "d-moco")
    preset = re.search("add --config ([^ \n]+)$", capsys.readouterr().err, re.MULTILINE)
    assert preset is not None
    parser = options.learner_parser()
    settings = parser.instantiate(
        options.read(parser, [*NEEDED, "--config", str(ROOT / preset.group(1))])
    )
    assert type(build.method(settings)).__name__ == "MoCo"
    policy = settings.memory.eviction
    assert (policy.name, repr(policy.score)) == ("most-duplicated", repr(Linear()))
    assert repr(settings.memory.descriptor) == "Embedding()"
    assert settings.learner.novelty is None, "near-duplicates reach the memory"


@table("command", [check, run, learner, receiver], ids=lambda c: c.__name__[24:])
def test_print_config_shows_the_complete_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: object
) -> None:
    with pytest.raises(SystemExit) as end:
        command.main(
            ["--run", str(tmp_path / "run"), "--loss", "decoupled", *NEEDED, "--print_config"]
        )
    assert end.value.code == 0
    text = capsys.readouterr().out
    shown = yaml.safe_load(text)
    sections = {*options.RECEIVER_SECTIONS, *options.LEARNER_SECTIONS, "run", "http", "from"}
    assert set(shown) == sections
    assert {name for name, value in shown.items() if value is None} == {
        "access",
        "from",
        "schedule",
    }
    assert shown["method"]["init_args"]["momentum"] == 0.99
    assert shown["loss"]["class_path"] == "stream_ssl.losses.Decoupled"
    assert shown["memory"]["eviction"] == options.EVICTION
    assert not (tmp_path / "run").exists()
    again = tmp_path / "again.yaml"
    again.write_text(text)
    read_again = flat(str(again))
    assert {k: v for k, v in options.flat(shown).items() if read_again[k] != v} == {}
