"""A receiver outside the run's folder, as on each of several hosts: `ranks.receivers`."""

from __future__ import annotations

from pathlib import Path

import httpx
from harness import TINY, processes, stop, until

from stream_ssl.daemon.endpoints import load
from stream_ssl.daemon.page import ending_of
from stream_ssl.daemon.run_states import RunFolder, receivers_of


def test_status_and_pages_find_the_whole_run(tmp_path: Path) -> None:
    """Else a healthy run has a condition forever, because one of its processes seems missing."""
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


def test_receivers_elsewhere_have_names_that_are_free(tmp_path: Path) -> None:
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
