"""Tests of the ranks of a run as processes: reading, parking, rejecting, and `run --ranks`."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from forked import Forked
from harness import TINY, Processes, processes, stop, until

from stream_ssl.app import cli
from stream_ssl.app.commands import status
from stream_ssl.daemon import run_states
from stream_ssl.daemon.endpoints import load
from stream_ssl.journal.journal import Journal
from stream_ssl.journal.segment import JournalEntry
from stream_ssl.producers import Producer
from stream_ssl.wire import Data, Sample

SETTINGS: dict[str, Any] = TINY | {
    "checkpoints": {"every_steps": 1000, "every_seconds": None},
    "ranks": {"timeout": 30.0},
}
PACKET = 8


def fill(folder: Path, packets: int) -> str:
    """Append packets to the journal of a receiver's folder, and return the journal's id."""
    journal = Journal(folder / "journal", budget=64 << 20)
    journal.identify()
    draw = np.random.default_rng(len(folder.name))
    first = journal.state("robot").sequence
    for sequence in range(first + 1, first + 1 + packets):
        samples = [
            Sample.from_array(
                draw.integers(0, 256, (16, 16, 1), dtype=np.uint8), f"{sequence}-{n}", source="x"
            )
            for n in range(PACKET)
        ]
        data = Data.pack(sequence, samples)
        journal.append(
            [JournalEntry("robot", sequence, None, time.time(), data.header, data.payload)]
        )
    found = journal.id
    journal.close()
    assert found is not None
    return found


class Group:
    """Learner processes that meet like those of torchrun, each with its own configuration."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder, self._patch = folder, monkeypatch
        self.ranks: list[Forked] = []

    def start(self, *settings: dict[str, Any], port: int | None = None) -> None:
        """Start one rank on this host for each of these settings."""
        self._folder.mkdir(exist_ok=True)
        if port is None:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
        count = str(len(settings))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": count}
        meeting |= {"GLOO_SOCKET_IFNAME": "lo", "LOCAL_WORLD_SIZE": count}
        self.ranks = []
        for rank, own in enumerate(settings):
            config = self._folder / f"config-{rank}.yaml"
            config.write_text(json.dumps({"run": str(self._folder)} | SETTINGS | own))
            for name, value in {**meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)}.items():
                self._patch.setenv(name, value)
            log = self._folder / f"rank-{rank}.log"
            log.unlink(missing_ok=True)
            self.ranks.append(Forked(cli.main, ("learner", str(config)), output=log))

    def log(self, rank: int = 0) -> str:
        path = self._folder / f"rank-{rank}.log"
        return path.read_text() if path.exists() else ""

    def until_read(self, reads: dict[Path, int]) -> None:
        """Wait until the learner has told each receiver its read position."""

        def read(folder: Path) -> int:
            path = folder / "cursor.json"
            return int(json.loads(path.read_text())["read"]) if path.exists() else 0

        until(
            lambda: all(read(folder) == last for folder, last in reads.items()),
            lambda: f"{[read(folder) for folder in reads]} of {reads}\n{self.log()}{self.log(1)}",
        )

    def ready(self) -> str:
        """Return the text of /readyz of the first rank; empty if it is ready."""
        answer = self.ask("readyz")
        return "" if answer.status_code == 200 else answer.text

    def ask(self, page: str) -> httpx.Response:
        """Return a page of the first rank's HTTP server."""
        return httpx.get(f"{load(self._folder)['learner']['http']}/{page}")

    def stop(self) -> dict[str, Any]:
        """Send SIGTERM to one rank, which ends all. Return the facts of the checkpoint."""
        self.ranks[-1].send_signal(15)
        statuses = [rank.wait(90) for rank in self.ranks]
        assert statuses == [0] * len(self.ranks), self.log()
        return self.facts()

    def facts(self) -> dict[str, Any]:
        """Return the facts of the newest checkpoint; empty if there is none."""
        path = self._folder / "checkpoints/latest/state.json"
        facts: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        return facts

    def refused(self) -> list[str]:
        """Return the last line of each rank's log, after all ranks have failed."""
        statuses = [rank.wait(90) for rank in self.ranks]
        assert all(statuses), statuses
        return [self.log(rank).splitlines()[-1] for rank in range(len(self.ranks))]

    def end(self) -> None:
        for rank in self.ranks:
            rank.kill()


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    group = Group(tmp_path / "run", monkeypatch)
    yield group
    group.end()


def test_ranks_read_their_own_journals_and_park_the_journals_of_missing_hosts(
    tmp_path: Path, group: Group
) -> None:
    """Read from two hosts, then from one, then from both in another order: each sample once."""
    folders = [tmp_path / "a", tmp_path / "b"]
    ids = [fill(folder, 4) for folder in folders]
    apart = [{"ranks": {"timeout": 30.0, "receivers": [str(folder)]}} for folder in folders]
    group.start(*apart)
    group.until_read({folders[0]: 5, folders[1]: 5})
    cursor = folders[1] / "cursor.json"
    while not cursor.is_dir():  # the rank writes the file twice a second
        cursor.unlink(missing_ok=True)
        with contextlib.suppress(FileExistsError):
            cursor.mkdir()
    (cursor / "in the way").mkdir()  # so the second rank cannot write its cursor
    until(lambda: "not ready: rank 1" in group.ready(), group.ready)
    shutil.rmtree(cursor)
    until(lambda: not group.ready(), group.ready)
    facts = group.stop()
    assert (facts["samples"], facts["version"]) == (8 * PACKET, 3)
    assert facts["step"] == 8 * PACKET // 16, "a step is on half a batch of each"
    places = {
        journal: divisions[-1][0]["record"] for journal, divisions in facts["journals"].items()
    }
    assert places == dict.fromkeys(ids, 5)

    fill(folders[0], 4)  # host b is gone, and its later samples are parked
    fill(folders[1], 2)
    mistyped = {"ranks": {**apart[0]["ranks"], "lost": ["zzz"]}}
    group.start(mistyped)
    group.until_read({folders[0]: 9, folders[1]: 5})
    facts = group.stop()
    assert f"parked: {ids[1]}" in group.log()
    assert "ranks.lost names none of them: zzz" in group.log()
    assert facts["samples"] == 12 * PACKET
    assert facts["journals"][ids[1]] == [[{"record": 5, "sample": 0}]]

    fill(folders[0], 2)  # host b is back, and the order has changed
    group.start(*reversed(apart))
    group.until_read({folders[0]: 11, folders[1]: 7})
    facts = group.stop()
    assert facts["samples"] == 16 * PACKET
    assert "parked" not in group.log()
    assert facts["journals"][ids[0]][-1] == [{"record": 11, "sample": 0}]


def test_ranks_read_every_record_of_a_journal_that_replaces_a_lost_journal(
    tmp_path: Path, group: Group
) -> None:
    """The receiver of the second host starts on a new disk while the ranks read."""
    folders = [tmp_path / "a", tmp_path / "b"]
    _, lost = [fill(folder, 4) for folder in folders]
    apart = [{"ranks": {"timeout": 30.0, "receivers": [str(folder)]}} for folder in folders]
    often = {"checkpoints": {"every_steps": 1, "every_seconds": None}}
    group.start(*[one | often for one in apart])
    until(lambda: group.facts().get("samples") == 8 * PACKET, group.log)
    before = group.facts()
    (folders[1] / "journal").rename(tmp_path / "gone")
    new = fill(folders[1], 6)
    first, second = group.refused()
    assert f"journal {lost} was replaced by {new} while it was read" in second
    assert "all ranks continue from the last checkpoint" in first

    fill(folders[0], 2)
    group.start(*[one | often for one in apart])
    group.until_read({folders[0]: 7, folders[1]: 7})
    assert "stream_ssl_parked_journals 1.0" in group.ask("metrics").text
    until(lambda: group.facts()["samples"] == before["samples"] + 8 * PACKET, group.log)
    facts = group.stop()
    assert "damaged" not in group.log(), "a checkpoint that is there is not written again"
    assert f"parked: {lost}" in group.log()
    assert f"rank 1 stream_ssl.learner: journal {new} in {folders[1]} is new" in group.log(1)
    assert facts["journals"][lost] == before["journals"][lost]
    assert facts["journals"][new] == [[{"record": 7, "sample": 0}]]


def test_all_ranks_notice_that_their_common_journal_was_replaced(
    tmp_path: Path, group: Group
) -> None:
    """This includes the rank that finds no record of its own in the new journal yet."""
    often = {"checkpoints": {"every_steps": 1, "every_seconds": None}}
    fill(tmp_path / "run", 8)
    group.start(often, often)
    until(lambda: group.facts().get("samples") == 8 * PACKET, group.log)
    lost = group.stop()["journal"]
    shutil.rmtree(tmp_path / "run" / "journal")
    new = fill(tmp_path / "run", 1)  # a record of the second rank
    group.start(often, often)
    until(lambda: group.facts()["samples"] == 9 * PACKET, group.log)
    facts = group.stop()
    assert f"continues in journal {lost}, and" in group.log()
    assert facts["journal"] == new
    assert facts["divisions"] == [[{"record": 1, "sample": 0}, {"record": 2, "sample": 0}]]


def test_ranks_with_different_configurations_fail_and_log_both_values(group: Group) -> None:
    other = {"memory": {"capacity": 128}}
    group.start({}, other)
    for line in group.refused():
        assert "memory.capacity is '64' on rank 0 and '128' on rank 1" in line


def test_ranks_refuse_a_batch_size_that_they_cannot_divide(group: Group) -> None:
    odd = {"batches": {"batch_size": 15}}
    group.start(odd, odd)
    for line in group.refused():
        assert "batches.batch_size 15 cannot be divided by 2 ranks: choose 14 or 16" in line


def test_ranks_that_cannot_reach_the_first_rank_log_the_remedy(group: Group) -> None:
    """The first rank is missing. The others give up after `ranks.timeout`."""
    with socket.socket() as taken:  # but no process listens
        taken.bind(("127.0.0.1", 0))
        soon = {"ranks": {"timeout": 2.0}}
        group.start(soon, soon, port=taken.getsockname()[1])
        for line in group.refused():
            assert "cannot connect to the other ranks at 127.0.0.1:" in line
            assert "GLOO_SOCKET_IFNAME" in line


@pytest.mark.timeout(300)
def test_run_starts_ranks_and_a_receiver_for_each_rank(tmp_path: Path) -> None:
    """Start a supervisor, two receivers, torchrun and two ranks. SIGTERM ends all of them."""
    with processes(tmp_path / "run", SETTINGS) as run:
        daemon = run.start("run", str(run.config), "--ranks", "2", "--receivers", "2")
        folders = [run.folder / f"receiver-{number}" for number in range(2)]
        addresses = [_address(run, folder) for folder in folders]
        names = {0: "robot", 1: "robot"}
        for number, address in enumerate(addresses):
            with Producer(address, names[number]) as producer:
                for sample in range(64):
                    producer.send(np.full((16, 16), sample, np.uint8), f"{number}-{sample}")
        cursors = [folder / "cursor.json" for folder in folders]
        until(
            lambda: all(c.exists() and json.loads(c.read_text())["read"] == 2 for c in cursors),
            lambda: run.log("run"),
            240,
        )
        figures = until(lambda: _figures(run.folder), lambda: run.log("run"), 240)
        assert set(figures["up"]) == {"learner", "learner-1", "receiver-0", "receiver-1"}
        assert figures["receiver"]["samples"] == 128
        assert figures["learner"]["memory_capacity_slots"] == 64
        for role in figures["up"]:
            assert httpx.get(f"{_endpoint(run.folder, role)}/readyz").status_code == 200, role
        for number, learner in enumerate(("learner", "learner-1")):  # pages ask each other
            page, other = (_endpoint(run.folder, r) for r in (learner, f"receiver-{number}"))
            assert httpx.get(f"{page}/api/receiver/state").json()["run"] == f"receiver-{number}"
            assert len(httpx.get(f"{other}/api/learner/ranks").json()["ranks"]) == 2
        assert stop(daemon) == 0
    facts = json.loads((run.folder / "checkpoints/latest/state.json").read_text())
    assert (facts["ranks"], facts["samples"], len(facts["journals"])) == (2, 128, 2)


def _figures(folder: Path) -> dict[str, Any] | None:
    """Return the figures of `status`, once all processes answer and report a full memory."""
    addresses = {role: entry["http"] for role, entry in run_states.endpoints_of(folder).items()}
    found = status.measure(addresses, 0.2)
    if not all(found["up"].values()) or found["group"] is None:
        return None
    assert found["group"]["ranks"] == 2
    return found if found["learner"]["memory_slots"] == 64 else None


def _endpoint(folder: Path, role: str) -> str:
    return str(run_states.endpoints_of(folder)[role]["http"])


def _address(run: Processes, folder: Path) -> str:
    endpoint = until(lambda: load(folder).get("receiver"), lambda: run.log("run"))
    return str(endpoint["data"])
