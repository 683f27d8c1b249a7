"""How a process of a run ended: `stream-ssl status` distinguishes a stop from a crash."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from harness import processes, stop, until
from test_status import held_by_another, shown

from stream_ssl.app.commands import status
from stream_ssl.daemon import endings
from stream_ssl.daemon.endings import ending
from stream_ssl.daemon.endpoints import hold_role, holder
from stream_ssl.daemon.supervisor import Supervisor
from stream_ssl.process.signals import TOGETHER

CRASH = "import os, signal; os.kill(os.getpid(), signal.SIGABRT)"

TWICE = """
import sys
from pathlib import Path
from stream_ssl.daemon.endpoints import hold_role
from stream_ssl.process.signals import stop_on_signals
stop = stop_on_signals()
with hold_role(Path(sys.argv[1]), "learner") as life:
    stop.interrupted = life.interrupted
    print("up", flush=True)
    stop.wait()
    print("stops", flush=True)
    sys.stdin.readline()
"""
WORDS = """
import logging, os, signal, sys
from pathlib import Path
from stream_ssl.daemon.endpoints import hold_role
with hold_role(Path(sys.argv[1]), "learner") as life:
    logging.getLogger("stream_ssl.learner").error("the disk is full")
    life.beat()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_record_distinguishes_killed_stopped_and_failed_processes(tmp_path: Path) -> None:
    assert ending(tmp_path, "learner") is None
    subprocess.run([sys.executable, "-c", WORDS, str(tmp_path)], check=False)
    killed = ending(tmp_path, "learner")
    assert killed is not None
    assert (killed.end, killed.words) == ("killed", "the last line of its log: the disk is full")
    assert "was killed or crashed at about 20" in killed.says
    with hold_role(tmp_path, "learner"):
        pass
    stopped = ending(tmp_path, "learner")
    assert stopped is not None
    assert (stopped.end, stopped.words) == ("stopped", "")
    with pytest.raises(OSError, match="no room"), hold_role(tmp_path, "learner"):
        raise OSError("no room")
    failed = ending(tmp_path, "learner")
    assert failed is not None
    assert (failed.end, failed.words) == ("failed", "no room")


def interrupted_twice(run: Path, code: str) -> bytes:
    """Start a learner that runs this code, interrupt it twice, and return its log."""
    pipe = subprocess.PIPE
    ours = [sys.executable, "-c", code, str(run)]
    with subprocess.Popen(ours, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdout is not None
        for line in (b"up\n", b"stops\n"):
            assert process.stdout.readline() == line
            time.sleep(2 * TOGETHER)
            process.send_signal(signal.SIGINT)
        assert process.wait(20) == 128 + signal.SIGINT
        return process.communicate()[1]


def test_an_end_by_a_second_signal_is_not_recorded_as_a_crash(tmp_path: Path) -> None:
    said = interrupted_twice(tmp_path, TWICE)
    assert b"ended at once by a second signal (SIGINT)" in said
    found = ending(tmp_path, "learner")
    assert found is not None
    assert found.end == "stopped"
    assert found.says.startswith("a second signal ended the learner at 20")


def test_a_second_signal_is_logged_in_the_configured_format(tmp_path: Path) -> None:
    set_up = 'from stream_ssl.process.logs import configure; configure({FORM: "json"})'
    code = TWICE.replace(
        "import", f"{set_up}; import".replace("FORM", '"STREAM_SSL_LOG_FORMAT"'), 1
    )
    line = json.loads(interrupted_twice(tmp_path, code))
    assert line["message"] == "ended at once by a second signal (SIGINT)"
    assert line["level"] == "WARNING"


def test_a_second_signal_ends_a_process_whose_disk_hangs(tmp_path: Path) -> None:
    hangs = "import os, time; os.replace = lambda *_: time.sleep(60); stop.wait()"
    assert b"ended at once" in interrupted_twice(tmp_path, TWICE.replace("stop.wait()", hangs))


def test_the_time_of_a_kill_is_the_time_of_the_last_beat(tmp_path: Path) -> None:
    """After a power cut, the file has no end, and the lock is older than this boot."""
    record = {"pid": 1, "parent": 0, "command": "stream-ssl learner x.yaml", "words": ""}
    (tmp_path / "learner.last.json").write_text(json.dumps(record))
    (tmp_path / "learner.lock").touch()
    os.utime(tmp_path / "learner.lock", (86_400.0 * 365, 86_400.0 * 365))
    found = ending(tmp_path, "learner")
    assert found is not None
    assert (found.end, found.again) == ("killed", "stream-ssl learner x.yaml")
    assert "at about 1971-01-01" in found.says or "at about 1970-12-31" in found.says


@pytest.mark.parametrize(("started", "words"), [(5.0, "kappa is -1"), (15.0, "wrong")])
def test_a_process_that_failed_in_a_failed_run_names_its_own_error(
    tmp_path: Path, started: float, words: str
) -> None:
    """`status` shows the error of the process, unless that error is of an earlier start."""
    record = {"pid": 1, "parent": 1, "command": "stream-ssl run x.yaml", "end": "failed"}
    learner = record | {"words": "kappa is -1", "started": 6.0, "ended": 10.0}
    boss = record | {"parent": 0, "words": "wrong", "started": started, "ended": 20.0}
    for role, told in (("learner", learner), ("supervisor", boss)):
        (tmp_path / f"{role}.last.json").write_text(json.dumps(told))
        (tmp_path / f"{role}.lock").touch()
    found = ending(tmp_path, "learner")
    assert found is not None
    assert found.words == words


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"words": 1, "parent": "x", "command": 1}'])
def test_a_damaged_record_of_an_end_is_ignored(tmp_path: Path, text: str) -> None:
    (tmp_path / "learner.lock").touch()
    (tmp_path / "learner.last.json").write_text(text)
    assert ending(tmp_path, "learner") is None


def test_a_record_cannot_control_the_terminal(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """The command of a record may contain the name of a config file that is not valid text."""
    record = {
        "pid": 1,
        "parent": 0,
        "command": "stream-ssl run \udce9.yaml",
        "words": "\x1b[2J\ud800",
    }
    for role in ("receiver", "learner", "supervisor"):
        (tmp_path / f"{role}.last.json").write_text(json.dumps(record))
        (tmp_path / f"{role}.lock").touch()
    found = ending(tmp_path, "learner")
    assert found is not None
    assert (found.again, found.words) == (
        "stream-ssl run ?.yaml",
        "the last line of its log: ?[2J?",
    )
    status.main([str(tmp_path)])
    out = capfdbinary.readouterr().out
    assert b"?[2J?" in out
    assert b"\x1b" not in out


def test_an_old_record_that_cannot_be_replaced_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise, `status` would show the end of an earlier process."""
    with hold_role(tmp_path, "receiver"):
        pass

    def full(*_: object, **__: object) -> None:
        raise OSError("No space left on device")

    with hold_role(tmp_path, "receiver"):
        monkeypatch.setattr(endings, "write", full)
    assert ending(tmp_path, "receiver") is None
    monkeypatch.undo()
    with hold_role(tmp_path, "receiver"):
        pass
    assert ending(tmp_path, "receiver") is not None, "the disk has room again"


def test_status_shows_how_a_restarting_process_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with held_by_another(tmp_path, "supervisor") as pid:
        for parent, shown_again in ((pid, True), (pid + 1, False)):  # an earlier start of the run
            record = {
                "pid": 1,
                "parent": parent,
                "command": "stream-ssl learner",
                "words": "step 7",
            }
            (tmp_path / "learner.last.json").write_text(json.dumps(record))
            (tmp_path / "learner.lock").write_text("1")
            said = shown(tmp_path, capsys)
            assert f"learner starting (pid {pid})" in said
            killed = "restarting (the learner was killed or crashed at about"
            assert (killed in said) == shown_again
            assert ("the last line of its log: step 7" in said) == shown_again


def test_status_shows_the_end_of_a_process_that_crashed_without_a_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A learner may crash while it imports torch."""
    supervisor, stop = Supervisor({"learner": [sys.executable, "-c", CRASH]}), threading.Event()
    with hold_role(tmp_path, "supervisor") as life:
        supervisor.ended = life.child_ended
        work = threading.Thread(target=supervisor.run, args=(stop, 0.01))
        work.start()
        try:
            until(lambda: supervisor.children[0].restarts, lambda: "")
            said = shown(tmp_path, capsys)
        finally:
            stop.set()
            work.join()
    assert "restarting (the learner was killed by SIGABRT (signal 6) at 20" in said


@pytest.mark.parametrize(
    ("number", "how", "again"),
    [
        (signal.SIGKILL, "because its supervisor was killed", "then start it again with"),
        (signal.SIGTERM, "stopped normally at", "Start it again with"),
    ],
)
def test_status_shows_whether_a_run_was_killed_or_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], number: int, how: str, again: str
) -> None:
    """The processes are real: one daemon is killed, and another is stopped."""

    def up() -> bool:
        return status.main([str(tmp_path), "--seconds", "0.01"]) == 0

    def living() -> bool:
        roles = ("supervisor", "receiver", "learner")
        return any(holder(tmp_path, role) is not None for role in roles)

    with processes(tmp_path) as run:
        daemon = run.start("run", str(run.config))
        until(up, lambda: run.log("run"))
        daemon.send_signal(number)
        daemon.wait(150)
        until(lambda: not living(), lambda: run.log("run"))
        capsys.readouterr()
        said = shown(tmp_path, capsys)
    assert said.count(how) >= 2, said
    assert f"{again}: stream-ssl run" in said


def test_status_shows_that_a_run_failed_by_a_wrong_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise, `status` shows the ends of an earlier start, and advises this command."""
    with processes(tmp_path) as run:
        for role in ("receiver", "learner"):
            assert stop(run.role(role)) == 0
        assert run.start("run", str(run.config), "--memory.capacity", "many").wait(60) == 2
    said = shown(tmp_path, capsys)
    assert said.count("the run failed at") >= 2, said
    assert "learner: wrong configuration" in said
    assert "Correct the error, then start it again with: stream-ssl" in said
    assert said.count("wrong configuration") == 3, "once in Health, and once for each process"
