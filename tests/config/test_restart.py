"""Options that a restart may change take effect; the others stay. The log names both."""

from __future__ import annotations

import copy
import json
import logging
import re
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from config_files import config_file
from harness import TINY, processes, stop, until

from stream_ssl.app.commands import check
from stream_ssl.config import options, restart
from stream_ssl.config.restart import FIXED, MAY_CHANGE
from stream_ssl.daemon import learn
from stream_ssl.journal.consumer_offsets import ConsumerOffsets
from stream_ssl.process.failures import USAGE, Misconfigured

PAGE = (Path(__file__).parents[2] / "docs" / "restart.md").read_text()


def all_options() -> set[str]:
    """Return every option of every section, of both roles."""
    found = set()
    for role, own in (
        ("receiver", options.RECEIVER_SECTIONS),
        ("learner", options.LEARNER_SECTIONS),
    ):
        names = {action.dest for action in getattr(options, f"{role}_parser")()._actions}
        names = {name for name in names if not name.endswith(".help")}
        of_sections = {name for name in names if name.partition(".")[0] in (*own, "http")}
        # A section that has options is left out, because its options are listed.
        found |= {n for n in of_sections if not any(o.startswith(f"{n}.") for o in of_sections)}
    return found


def test_runbooks_change_fixed_options_only_in_a_new_run() -> None:
    wrong = []
    for file in sorted((Path(__file__).parents[2] / "docs" / "runbooks").glob("*.md")):
        _, _, act = file.read_text().partition("## Act\n")
        for remedy in act.partition("## Verify")[0].split("\n- "):
            named = {
                name.removesuffix(":") for name in re.findall(r"`([a-z_]+\.[a-z_.]+:?)", remedy)
            }
            if named & set(FIXED) or any(name.startswith(("loss.", "method.")) for name in named):
                wrong += [] if "new run" in " ".join(remedy.split()) else [(file.name, remedy)]
    assert wrong == []


def plain(file: str, *arguments: str) -> dict[str, Any]:
    parser = options.learner_parser()
    return options.resolved(parser, options.read(parser, [file, *arguments]))


def changed(settings: dict[str, Any], path: str) -> None:
    """Give an option a value that it cannot have had."""
    *sections, option = path.split(".")
    for section in sections:
        if settings.get(section) is None:
            settings[section] = {}
        settings = settings[section]
    settings[option] = "another"


def test_each_option_is_on_one_of_the_two_lists() -> None:
    listed = [*FIXED, *MAY_CHANGE]
    assert len(listed) == len(set(listed))
    missing, gone = all_options() - set(listed), set(listed) - all_options()
    assert not missing, f"say in restart.py whether a restart may change {sorted(missing)}"
    assert not gone, f"restart.py lists what is no option: {sorted(gone)}"


def test_the_page_about_restarts_has_the_same_lists() -> None:
    lists = PAGE.split("## Fixed by the run")[1].split("## A new run")[0]
    fixed, may_change = lists.split("## May change")
    for text, listed in ((fixed, FIXED), (may_change, MAY_CHANGE)):
        assert set(re.findall(r"`([a-z_]+(?:\.[a-z_]+)*)`", text)) == set(listed)


def test_a_restart_keeps_every_fixed_option_and_takes_over_every_other_option(
    tmp_path: Path,
) -> None:
    run = plain(config_file(tmp_path))
    asked = copy.deepcopy(run)
    for path in (*FIXED, *MAY_CHANGE):
        changed(asked, path)
    found = restart.merge(asked, run)
    for path in FIXED:
        assert restart._get(found.config, path) == restart._get(run, path), path
    for path in MAY_CHANGE:
        assert restart._get(found.config, path) == "another", path
    assert [line.partition(": ")[0] for line in found.kept] == list(FIXED)
    assert [line.partition(": ")[0] for line in found.changed] == list(MAY_CHANGE)
    assert "memory.capacity: 64 (requested: 'another')" in found.kept
    found = restart.merge(asked, run, {"memory": {"capacity": "another"}})
    assert "memory.capacity: 64 (now the default: 'another')" in found.kept
    assert "checkpoints.keep: 3 -> 'another'" in found.changed


def test_a_restart_with_the_same_configuration_changes_no_option(tmp_path: Path) -> None:
    run = plain(config_file(tmp_path))
    found = restart.merge(run, json.loads(json.dumps(run)))
    assert (found.config, found.kept, found.changed) == (run, [], [])


@pytest.mark.parametrize(("stored", "asked"), [("4194304", 4194304), (4194304, "4194304")])
def test_a_learner_compares_options_of_the_receiver_as_values(stored: Any, asked: Any) -> None:
    """The learner has such options from the command line as text."""
    run, now = {"journal": {"budget": stored}}, {"journal": {"budget": asked}}
    assert restart.merge(now, run).changed == []
    now = {"journal": {"budget": "8388608"}, "receiver": {"bind": "tcp://a:1"}}
    assert restart.merge(now, run).changed == [
        "journal.budget: 4194304 -> 8388608",
        "receiver.bind: default -> 'tcp://a:1'",
    ]


@pytest.mark.parametrize("given", [["--journal.budget", "8388608"], ["--journal.budget=8388608"]])
def test_a_restart_names_changed_options_of_the_receiver(tmp_path: Path, given: list[str]) -> None:
    """Otherwise the log says that an option of the command line got its default."""
    file = config_file(tmp_path)
    run, now = plain(file), plain(file, *given, "--receiver.max_packet", "4096")
    assert sorted(restart.merge(now, run).changed) == [
        f"journal.budget: {run['journal']['budget']} -> 8388608",
        f"receiver.max_packet: {run['receiver'].get('max_packet', 'default')} -> 4096",
    ]
    assert now["receiver"] == run["receiver"] | {"max_packet": "4096"}


def test_an_option_that_the_stored_run_lacks_comes_from_the_file(tmp_path: Path) -> None:
    asked = plain(config_file(tmp_path))
    run = copy.deepcopy(asked)
    del run["learner"]["draw"], run["learner"]["reencode"], run["observe"], run["views"]
    found = restart.merge(asked, run)
    assert (found.config, found.kept, found.changed) == (asked, [], [])


def test_arguments_of_another_class_are_not_compared(tmp_path: Path) -> None:
    file = config_file(tmp_path)
    run = plain(file, "--loss", "InfoNCE")
    asked = plain(file, "--loss", "Decoupled")
    losses = "stream_ssl.losses"
    assert restart.merge(asked, run).kept == [
        f"loss.class_path: '{losses}.InfoNCE' (requested: '{losses}.Decoupled')"
    ]


def test_a_restart_names_a_kept_argument_by_its_path(tmp_path: Path) -> None:
    file = config_file(tmp_path)
    run, asked = plain(file), plain(file, "--loss.temperature", "0.3", "--memory.capacity", "9")
    found = restart.merge(asked, run)
    assert found.kept == [
        "loss.init_args.temperature: 0.2 (requested: 0.3)",
        "memory.capacity: 64 (requested: 9)",
    ]
    assert found.config["loss"] == run["loss"]


def test_a_restart_keeps_options_that_are_null(tmp_path: Path) -> None:
    """Defaults would change what is trained (`views.crop`) and when it is saved."""
    file = config_file(
        tmp_path, views={"crop": None}, checkpoints={"every_seconds": None, "every_steps": 5}
    )
    parser = options.learner_parser()
    began = options.read(parser, [str(file)])
    for _ in range(2):  # each restart stores what it went on with
        stored = json.loads(json.dumps(options.resolved(parser, began)))
        began = restart.resume(parser, options.read(parser, [str(file)]), stored)
        assert began.views.crop is None
        assert began.checkpoints.every_seconds is None
        assert parser.instantiate(began).views["crop"] is None
    now = plain(file, "--views.crop", "[0.5, 1.0]")
    assert restart.merge(now, stored).config["views"]["crop"] is None


def test_a_run_whose_checkpoints_are_away_does_not_start_from_the_beginning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Their disk may not be mounted. A new beginning would trim the journal that they need."""
    file, run = config_file(tmp_path), tmp_path / "run"
    checkpoints, away = run / "checkpoints", tmp_path / "not mounted"
    ConsumerOffsets(run).publish(9, 5, step=400)
    assert check.main([str(file)]) == USAGE
    assert "the run had one at step 400: if the folder is on a disk" in caplog.text
    parser = options.learner_parser()
    settings = options.read(parser, [str(file)])
    with ExitStack() as stack, pytest.raises(Misconfigured, match="To begin with new weights"):
        learn.Process(parser, settings, stack)
    (checkpoints / "damaged-step-000000000400").mkdir(parents=True)
    assert check.main([str(file)]) == 0
    shutil.rmtree(checkpoints)
    (run / "cursor.json").unlink()
    assert check.main([str(file)]) == 0
    checkpoints.symlink_to(away)
    assert check.main([str(file)]) == USAGE
    assert "not mounted, which does not exist: mount its disk, or make it" in caplog.text
    with ExitStack() as stack, pytest.raises(FileNotFoundError, match="mount its disk"):
        learn.Process(parser, settings, stack)
    away.mkdir()
    assert check.main([str(file)]) == 0


def test_a_restarted_run_applies_changeable_options_and_keeps_fixed_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "run"
    with processes(folder) as run:
        run.role("receiver")
        learner = run.role("learner")
        run.produce(160)
        until(lambda: run.metric("checkpoint_step") >= 5, lambda: run.log("learner"))
        assert run.metric("learning_rate") == 0.001
        assert stop(learner) == 0
        assert ConsumerOffsets(folder).load().step >= 5
        asked = TINY | {
            "memory": {"capacity": 32, "shares": 0.25},
            "optimiser": {"name": "sgd", "learning_rate": 0.004},
            "schedule": {
                "class_path": "stream_ssl.learning.schedule.Constant",
                "init_args": {"warmup": 0},
            },
            "checkpoints": {"keep": 1, "every_steps": 2, "every_seconds": None},
        }
        run.config.write_text(json.dumps({**asked, "run": str(folder)}))

        caplog.set_level(logging.INFO)
        assert check.main([str(run.config)]) == 0
        assert "memory       64 slots" in capsys.readouterr().out
        foretold = caplog.text

        run.role("learner")
        run.produce(160, name="another")
        until(lambda: run.metric("learning_rate") == 0.004, lambda: run.log("learner"))
        until(
            # The newest, and the newest whose weights took another update.
            lambda: len(list((folder / "checkpoints").glob("step-*"))) == 2,
            lambda: run.log("learner"),
        )
        for told in (foretold, run.log("learner")):
            for line in (
                "from its beginning: optimiser.name: 'adam' (requested: 'sgd'); memory.capacity",
                "memory.capacity: 64 (requested: 32). To use other settings",
                "from now on: optimiser.learning_rate: 0.001 -> 0.004",
                "from now on: schedule: None -> ",
                "from now on: memory.shares: 0.5 -> 0.25",
                "from now on: checkpoints.keep: 3 -> 1",
            ):
                assert line in told
