"""Receivers outside the run's folder (`ranks.receivers`), such as one on each host."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
import torch
from harness import TINY, processes, stop, until
from jsonargparse import Namespace

from stream_ssl.config.options import RanksSettings
from stream_ssl.daemon.endpoints import load
from stream_ssl.daemon.page import ending_of
from stream_ssl.daemon.ranks import Part, part_of
from stream_ssl.daemon.run_states import RunFolder, receivers_of
from stream_ssl.journal.segment import ID_FILE
from stream_ssl.learning.ranks import Ranks
from stream_ssl.memory.process_group import SINGLE_PROCESS
from stream_ssl.process.failures import Misconfigured


def test_status_and_pages_find_all_processes_of_a_run_in_several_folders(tmp_path: Path) -> None:
    """Otherwise, a healthy run has a condition forever, because a process seems missing."""
    run, inbox = tmp_path / "run", tmp_path / "inbox"
    settings = TINY | {"ranks": {"receivers": [str(inbox)]}}
    with processes(inbox) as of_inbox, processes(run, settings) as of_run:
        receiver = of_inbox.role("receiver")
        learner = of_run.role("learner")
        until(lambda: "learner" in load(inbox), lambda: of_run.log("learner"))
        for folder, names in ((run, {"learner", "receiver-0"}), (inbox, {"learner", "receiver"})):
            states = RunFolder(folder).read().states
            assert states.keys() == names
            assert [state["error"] for state in states.values() if "error" in state] == []
        page = load(inbox)["receiver"]["http"]
        assert httpx.get(f"{page}/api/run", trust_env=False).json()["states"].keys() == {
            "receiver",
            "learner",
        }
        assert stop(receiver) == stop(learner) == 0
        for folder, names in ((run, {"learner", "receiver-0"}), (inbox, {"learner", "receiver"})):
            states = RunFolder(folder).read().states
            ends = {name: state["ended"]["end"] for name, state in states.items()}
            assert ends == dict.fromkeys(names, "stopped")
        assert ending_of(inbox, "learner")["ended"]["end"] == "stopped"


def test_receivers_elsewhere_get_free_names(tmp_path: Path) -> None:
    (tmp_path / "receiver-1").mkdir()
    (tmp_path / "endpoints.json").write_text(
        '{"learner": {"http": "", "receiver": "/b"}, "learner-1": {"http": "", "receiver": "/a"}, '
        '"learner-2": {"http": "", "receiver": "/b"}, "learner-3": {"http": "", "receiver": 1}}'
    )
    assert receivers_of(tmp_path) == {
        "receiver-0": Path("/a"),
        "receiver-1": tmp_path / "receiver-1",
        "receiver-2": Path("/b"),
    }


def test_the_folder_of_another_run_is_refused_as_a_receiver(tmp_path: Path) -> None:
    """Otherwise, the receiver trims samples that the other run still needs."""
    run, other = tmp_path / "run", tmp_path / "other"
    for folder in (run, other):
        (folder / "checkpoints" / "step-000000001").mkdir(parents=True)
        (folder / "journal").mkdir()
        (folder / "journal" / ID_FILE).write_text(f"{folder.name}\n{folder.name}\n")
    group = Ranks(SINGLE_PROCESS, torch.device("cpu"))

    def part(receiver: Path) -> Part:
        return part_of(Namespace(run=run, ranks=RanksSettings(receivers=[receiver])), group, None)

    with pytest.raises(Misconfigured, match="other, which holds the checkpoints of another run"):
        part(other)
    assert part(run / ".." / "run").readers == [0], "the run's own folder"
    (other / "checkpoints").rename(tmp_path / "elsewhere")
    assert part(other).folder == other
