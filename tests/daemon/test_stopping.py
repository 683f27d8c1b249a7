"""SIGTERM ends each command soon, with status 0. A port in use ends a receiver."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from pathlib import Path

import httpx
import pytest
from harness import TINY, processes, until
from table import table

from stream_ssl.daemon.endpoints import load
from stream_ssl.process.failures import USAGE

SOON = 15.0  # seconds, on a busy machine: less than the 20 that what is under way may take


def test_produce_stops_while_it_connects(tmp_path: Path) -> None:
    with processes(tmp_path) as run, socket.create_server(("127.0.0.1", 0)) as deaf:
        producer = run.start(
            *("produce", "synthetic", "--to", f"tcp://127.0.0.1:{deaf.getsockname()[1]}"),
            *("--name", "robot", "--producer.linger", "0.1", "--connect_seconds", "3600"),
        )
        deaf.settimeout(60)
        deaf.accept()[0].close()  # it has begun to connect
        producer.send_signal(signal.SIGTERM)
        assert producer.wait(60) == 0, run.log("produce")


SLOW = """
import pathlib
import time

class Slow:
    name = "slow"

    def __init__(self, begun: pathlib.Path):
        begun.touch()
        time.sleep(3600)

    def samples(self, position=None):
        yield from ()

    def stop(self):
        pass
"""


def test_produce_stops_while_its_source_is_made(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    (tmp_path / "slow_source.py").write_text(SLOW)
    with processes(tmp_path) as run:
        run.environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        producer = run.start(
            *("produce", "slow_source.Slow", "--source.begun", str(begun)),
            *("--to", "tcp://127.0.0.1:1", "--name", "robot"),
        )
        until(begun.exists, lambda: run.log("produce"))
        producer.send_signal(signal.SIGTERM)
        assert producer.wait(60) == 0, run.log("produce")


def test_produce_stops_while_the_journal_is_full(tmp_path: Path) -> None:
    small = {
        **TINY,
        "journal": {"budget": 1 << 20},
        "receiver": {**TINY["receiver"], "max_packet": 1 << 16},
    }
    with processes(tmp_path, small) as run:
        run.role("receiver")  # and no learner
        producer = run.produce(100_000)
        until(lambda: run.metric("credit_bytes") == 0, lambda: run.log("receiver"))
        until(lambda: (tmp_path / "journal.full").exists(), lambda: run.log("receiver"))
        ready = f"{load(tmp_path)['receiver']['http']}/readyz"
        until(lambda: httpx.get(ready).status_code == 503, lambda: run.log("receiver"))
        assert "credit" in httpx.get(ready).json()["failing"]
        began = time.monotonic()
        producer.send_signal(signal.SIGTERM)
        assert producer.wait(60) == 0, run.log("robot")
        assert time.monotonic() - began < SOON
        said = run.log("robot")
        assert "The same command sends these samples again" in said
        assert "before the end of the source; the same command goes on" in said
        assert not re.search(r"waiting, \d+ dropped", said)


def test_produce_spools_its_unsent_samples_when_it_stops(tmp_path: Path) -> None:
    spool = tmp_path / "spool"
    options = ("--producer.on_full", "spool", "--producer.spool", str(spool), "--shape.rate", "300")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]  # for both receivers: the next run asks who had its samples
    settings = TINY | {"receiver": {"bind": f"tcp://127.0.0.1:{port}"}}
    with processes(tmp_path, settings) as run:
        receiver = run.role("receiver")
        producer = run.produce(100_000, *options)
        until(lambda: run.metric("acked_samples_total") > 0, lambda: run.log("receiver"))
        receiver.kill()
        receiver.wait()
        until(lambda: bool(list(spool.glob("*.spool"))), lambda: run.log("robot"))
        began = time.monotonic()
        producer.send_signal(signal.SIGTERM)
        assert producer.wait(60) == 0, run.log("robot")
        assert time.monotonic() - began < SOON
        assert f"samples are left in the spool {spool}, for the next run" in run.log("robot")
        assert "lost" not in run.log("robot")
        run.role("receiver")
        again = run.produce(2000, *options[:4])
        assert again.wait(60) == 0, run.log("robot")
        assert not list(spool.glob("*.spool"))


def takes_sigterm(pid: int) -> bool:
    """Return whether a process handles SIGTERM. Before that, the interpreter is starting."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


@table("wait", [0.0, 0.2, 0.7])
def test_a_starting_receiver_stops_normally_at_sigterm(tmp_path: Path, wait: float) -> None:
    with processes(tmp_path, whole=True) as run:
        receiver = run.start("receiver", str(run.config))
        until(lambda: takes_sigterm(receiver.pid), lambda: run.log("receiver"))
        time.sleep(wait)
        receiver.send_signal(signal.SIGTERM)
        assert receiver.wait(60) == 0, run.log("receiver")


@pytest.mark.parametrize("option", ["receiver.bind", "http.receiver"])
def test_a_port_in_use_ends_the_receiver_with_a_usage_error(tmp_path: Path, option: str) -> None:
    with processes(tmp_path) as run, socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        value = f"tcp://{address}" if option == "receiver.bind" else address
        # A supervisor ends the run at the status USAGE.
        receiver = run.start("receiver", str(run.config), f"--{option}", value)
        assert receiver.wait(60) == USAGE, run.log("receiver")
        said = run.log("receiver")
        assert "choose another port, or 0 for a free one" in said
        assert option in said
