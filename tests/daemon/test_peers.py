"""The processes of a run report another process that exists and does not answer."""

from __future__ import annotations

import json
import os
import socket
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from table import table

from stream_ssl.daemon.endpoints import FILE, hold_role, publish
from stream_ssl.daemon.page import ending_of, peers_of
from stream_ssl.observe import peers
from stream_ssl.observe.ask import ask
from stream_ssl.observe.conditions import HUNG_SECONDS
from stream_ssl.observe.health import Health
from stream_ssl.observe.metrics import ReceiverMetrics
from stream_ssl.observe.peers import Peers
from stream_ssl.observe.server import Server


def test_a_peer_counts_as_hung_after_a_minute_without_an_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel accepts connections for a stopped process, and nobody answers."""
    monkeypatch.setattr(peers, "ASK_SECONDS", 0.05)
    now = 0.0
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        address = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        found = {"learner": (address, 7)}
        watching = Peers(lambda: found, clock=lambda: now)
        watching.ask()
        now = 59.0
        watching.ask()
        assert (watching.hung(), watching.why(address)) == ([], "")
        now = 61.0
        told = f"the learner (pid 7) exists and does not answer at {address}: no answer for 61 s"
        assert watching.why(address).startswith(told)
        assert watching.hung() == [watching.why(address)]
        found["learner"] = (address, 8)  # it was killed, and started again
        watching.ask()
        assert watching.hung() == []
        now = 130.0
        assert watching.hung()
        found.clear()  # it was stopped
        watching.ask()
        assert watching.hung() == []


@table("address", ["http://[::1", "http://a..b", f"http://{'a' * 80}", "http://127.0.0.1:x", ""])
def test_answers_is_false_for_an_invalid_address(address: str) -> None:
    """Somebody may have edited endpoints.json."""
    assert not peers.answers(address)


def test_a_peer_that_answers_with_an_error_does_not_count_as_hung() -> None:
    now, health = 0.0, Health()
    health.set("journal", False, "cannot be written")
    health.expect("receiver", 0.001)
    with Server(ReceiverMetrics(CollectorRegistry()).registry, health, "receiver") as server:
        watching = Peers(lambda: {"receiver": (server.address, 7)}, clock=lambda: now)
        watching.ask()
        now = 100.0
        watching.ask()
        assert watching.hung() == []


def test_an_endless_answer_times_out() -> None:
    """Another program may stream events at the former address of an ended process."""
    begun = b"HTTP/1.1 200 OK\r\n\r\n"

    def serve() -> None:
        connection, _ = other.accept()
        with connection, suppress(OSError):
            connection.sendall(begun)
            while not given_up.wait(0.02):
                connection.sendall(b": \n")

    given_up = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as other:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            with pytest.raises(TimeoutError, match="the answer takes longer"):
                ask(f"http://127.0.0.1:{other.getsockname()[1]}", "/healthz", 0.2)
        finally:
            given_up.set()
            thread.join()


def test_peers_of_finds_only_the_living_other_processes_of_a_run(tmp_path: Path) -> None:
    """The other entries are of this process, or stopped, starting, or on another machine."""
    run, pid = tmp_path / "run", os.getpid()
    entry = {"http": "http://127.0.0.1:1", "pid": pid}
    with hold_role(run, "receiver"), hold_role(run, "learner"), hold_role(run, "learner-1"):
        told = {
            "receiver": entry,
            "learner": entry,
            "learner-1": entry
            | {"pid": pid + 1},  # started again; its old address is still in the file
            "learner-2": entry,  # of another machine, or stopped
        }
        (run / FILE).write_text(json.dumps(told))
        assert peers_of(run, "learner") == {"receiver": ("http://127.0.0.1:1", pid)}
        assert peers_of(run, "receiver") == {"learner": ("http://127.0.0.1:1", pid)}
        nested = run / "receiver-0"
        with hold_role(nested, "receiver"):
            (nested / FILE).write_text(json.dumps({"receiver": entry}))
            assert set(peers_of(run, "learner")) == {"receiver", "receiver-0/receiver"}
            assert set(peers_of(nested, "receiver")) == {"run/receiver", "run/learner"}
    assert peers_of(run, "learner") == {}


def test_the_limits_report_a_hung_peer_within_two_minutes() -> None:
    assert peers.ASK_SECONDS + peers.ASK_EVERY + HUNG_SECONDS < 120


def test_a_page_knows_how_the_other_process_ended(tmp_path: Path) -> None:
    assert ending_of(tmp_path, "learner") == {
        "error": "no learner has started in this run folder",
        "absent": True,
    }
    with hold_role(tmp_path, "learner"):
        assert ending_of(tmp_path, "learner")["starting"]
        publish(tmp_path, "learner", http="http://127.0.0.1:1")
        assert ending_of(tmp_path, "learner") == {}, "it lives, and the page asks it"
    assert ending_of(tmp_path, "learner")["ended"]["end"] == "stopped"
