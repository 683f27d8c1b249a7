"""endpoints.json and the locks of the roles."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from forked import Forked
from harness import processes, stop
from table import table

from stream_ssl.daemon import endpoints
from stream_ssl.daemon.endpoints import FILE, Announcement, hold_role, load, publish
from stream_ssl.process.failures import Failure


def test_the_roles_of_a_run_share_the_file_of_endpoints(tmp_path: Path) -> None:
    assert load(tmp_path) == {}
    publish(tmp_path, "receiver", data="tcp://127.0.0.1:1", http="http://127.0.0.1:2")
    publish(tmp_path, "learner", http="http://127.0.0.1:3")
    publish(tmp_path, "receiver", data="tcp://127.0.0.1:4", http="http://127.0.0.1:5")
    assert load(tmp_path) == {
        "receiver": {"data": "tcp://127.0.0.1:4", "http": "http://127.0.0.1:5", "pid": os.getpid()},
        "learner": {"http": "http://127.0.0.1:3", "pid": os.getpid()},
    }


def _publish(run: Path, role: str) -> None:
    for number in range(20):
        publish(run, role, http=f"{role}:{number}")


def test_processes_that_write_at_the_same_time_lose_no_entry(tmp_path: Path) -> None:
    roles = [f"role-{n}" for n in range(6)]
    writers = [Forked(_publish, tmp_path, one, output=tmp_path / "log") for one in roles]
    assert [writer.wait(60) for writer in writers] == [0] * 6, (tmp_path / "log").read_text()
    written = {role: entry["http"] for role, entry in load(tmp_path).items()}
    assert written == {role: f"{role}:19" for role in roles}


def test_a_role_can_be_held_only_once_at_a_time(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with hold_role(run, "learner"):
        taken = rf"a learner already runs here \(pid {os.getpid()}\)"
        with pytest.raises(Failure, match=taken), hold_role(run, "learner"):
            pass
        with hold_role(run, "receiver"):
            pass
    with hold_role(run, "learner"):
        assert (run / "learner.lock").read_text() == str(os.getpid())


def test_a_folder_on_a_file_system_without_locks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", no_locks)
    refused = r"cannot lock learner\.lock \(Function not implemented\); choose another run folder"
    with pytest.raises(ValueError, match=refused), hold_role(tmp_path, "learner"):
        pass


@table(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"receiver": 5}',
        b'{"receiver": {}}',
        b"\x00" * 200,
        b"\xff\xfe",
    ],
)
def test_a_start_replaces_a_damaged_file_of_endpoints(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """A power cut may leave such a file, which must not prevent a start."""
    (tmp_path / FILE).write_bytes(content)
    for _ in range(9):  # `status` and the page load the file again and again
        assert load(tmp_path) == {}
    assert caplog.text.count("endpoints.json cannot be used") == 1
    publish(tmp_path, "receiver", http="http://127.0.0.1:2")
    assert load(tmp_path) == {"receiver": {"http": "http://127.0.0.1:2", "pid": os.getpid()}}


@pytest.mark.parametrize("harm", ["lost", "damaged", "pipe", "replaced"])
def test_a_running_process_repairs_a_lost_or_damaged_file_of_endpoints(
    tmp_path: Path, harm: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    monkeypatch.setattr(endpoints.time, "monotonic", lambda: now[0])
    receiver = Announcement(tmp_path, "receiver", http="http://127.0.0.1:2")
    learner = Announcement(tmp_path, "learner", http="http://127.0.0.1:3")
    whole = load(tmp_path)
    (tmp_path / FILE).unlink()
    if harm == "damaged":
        (tmp_path / FILE).write_text("{")
    elif harm == "pipe":
        os.mkfifo(tmp_path / FILE)
    elif harm == "replaced":
        (tmp_path / FILE).write_text('{"receiver": {"http": "http://127.0.0.1:9", "pid": 1}}')
    for _ in range(3):
        now[0] += endpoints.CHECK_SECONDS
        receiver.write()
        learner.write()
    assert load(tmp_path) == whole
    assert caplog.text.count("has been written again") == 2  # once by each process


def test_a_receiver_starts_beside_a_damaged_file(tmp_path: Path) -> None:
    with processes(tmp_path) as run:
        (tmp_path / FILE).write_bytes(b"")
        receiver = run.role("receiver")
        assert stop(receiver) == 0, run.log("receiver")
