"""The supervisor restarts ended children, stops them in order, and leaves none running."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest
import torch
from table import table
from waiting import until

from stream_ssl.app.commands.run import learner_parsed
from stream_ssl.daemon import launch_ranks
from stream_ssl.daemon.launch_ranks import status_of
from stream_ssl.daemon.supervisor import (
    BackOff,
    Child,
    Supervisor,
    command,
    learner_command,
    signal_of,
)
from stream_ssl.observe.catalogue import LAST_END
from stream_ssl.process.failures import DONE, USAGE
from stream_ssl.process.signals import PARENT, TOGETHER, watch_parent

# Each child appends its pid when it starts, so that a test sees starts without asking the child.
LIVES = "import os, sys, time; open(sys.argv[1], 'a').write(f'{os.getpid()}\\n'); time.sleep(60)"
DIES = "import os, sys; open(sys.argv[1], 'a').write(f'{os.getpid()}\\n'); sys.exit(3)"
DEAF = (
    "import os, signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "open(sys.argv[1], 'a').write(f'{os.getpid()}\\n'); time.sleep(60)"
)


def python(code: str, *arguments: object) -> list[str]:
    return [sys.executable, "-c", code, *map(str, arguments)]


def starts(path: Path) -> list[int]:
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


class Running:
    """A supervisor in a thread."""

    def __init__(self, supervisor: Supervisor) -> None:
        self.stop = threading.Event()
        self.status: int | None = None
        self._thread = threading.Thread(target=self._run, args=(supervisor,))
        self._thread.start()

    def _run(self, supervisor: Supervisor) -> None:
        self.status = supervisor.run(self.stop, poll=0.02)

    def join(self, ask: bool = True) -> int:
        if ask:
            self.stop.set()
        self._thread.join(60)
        assert self.status is not None, "the supervisor did not stop"
        return self.status


def test_a_back_off_doubles_to_its_bound_and_resets_after_a_healthy_time() -> None:
    back_off = BackOff(first=1, longest=5, healthy=60)
    assert [back_off.after(0.1) for _ in range(5)] == [1, 2, 4, 5, 5]
    assert back_off.after(61) == 1
    assert back_off.after(0.1) == 2


def test_a_killed_child_is_started_again(tmp_path: Path) -> None:
    log = tmp_path / "pids"
    supervisor = Supervisor({"child": python(LIVES, log)})
    supervisor.children[0].back_off = BackOff(first=0.05)
    running = Running(supervisor)
    until(lambda: len(starts(log)) == 1)
    os.kill(starts(log)[0], signal.SIGKILL)
    until(lambda: len(starts(log)) == 2)
    assert running.join() == 0
    assert supervisor.children[0].restarts == 1
    assert not any(alive(pid) for pid in starts(log))


def test_a_child_can_read_how_the_child_before_ended(tmp_path: Path) -> None:
    log = tmp_path / "ends"
    tells = (
        f"import os, sys; open(sys.argv[1], 'a').write(os.environ['{LAST_END}'] + '\\n'); exit(3)"
    )
    supervisor = Supervisor({"child": python(tells, log)})
    supervisor.children[0].back_off = BackOff(first=0.01, longest=0.02)
    running = Running(supervisor)
    until(lambda: log.exists() and log.read_text().count("\n") >= 2)
    running.join()
    assert log.read_text().splitlines()[:2] == ["", "ended with status 3"]


def test_the_supervisor_retries_a_child_that_cannot_be_started(tmp_path: Path) -> None:
    program, log = tmp_path / "program", tmp_path / "pids"
    supervisor = Supervisor({"child": [str(program)], "other": python(LIVES, log)})
    supervisor.children[0].back_off = BackOff(first=0.01, longest=0.02)
    running = Running(supervisor)
    until(lambda: supervisor.children[0].restarts >= 2 and len(starts(log)) == 1)
    beside = tmp_path / "upgrade"
    beside.write_text(f"#!/bin/sh\nexec {shlex.join(python(LIVES, log))}\n")
    beside.chmod(0o755)
    beside.rename(program)
    until(lambda: len(starts(log)) == 2)
    assert running.join() == 0


def test_a_child_that_ends_again_and_again_does_not_disturb_another(tmp_path: Path) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    supervisor = Supervisor({"good": python(LIVES, good), "bad": python(DIES, bad)})
    supervisor.children[1].back_off = BackOff(first=0.01, longest=0.02)
    running = Running(supervisor)
    until(lambda: len(starts(bad)) >= 3 and len(starts(good)) >= 1)
    assert len(starts(good)) == 1
    assert alive(starts(good)[0])
    running.join()
    assert not alive(starts(good)[0])


def test_a_child_with_a_wrong_configuration_stops_all_children(tmp_path: Path) -> None:
    good = tmp_path / "good"
    usage = python(f"import sys; sys.exit({USAGE})")
    running = Running(Supervisor({"good": python(LIVES, good), "bad": usage}))
    assert running.join(ask=False) == USAGE
    assert not any(alive(pid) for pid in starts(good))


EDITED = f"import os, sys; os.path.exists(sys.argv[2]) and sys.exit({USAGE}); {LIVES}"


def test_a_usage_error_of_a_child_that_worked_before_stops_no_other_child(tmp_path: Path) -> None:
    """The file was being edited, or a disk that it names is away, when the child had to restart."""
    good, log, broken = tmp_path / "good", tmp_path / "pids", tmp_path / "broken"
    supervisor = Supervisor({"good": python(LIVES, good), "edited": python(EDITED, log, broken)})
    supervisor.children[1].back_off = BackOff(first=0.05, longest=0.05, healthy=0.0)
    running = Running(supervisor)
    until(lambda: len(starts(good)) == len(starts(log)) == 1)
    broken.touch()
    os.kill(starts(log)[0], signal.SIGKILL)
    until(lambda: supervisor.children[1].restarts >= 3)
    broken.unlink()
    until(lambda: len(starts(log)) == 2)
    assert running.join() == 0
    assert len(starts(good)) == 1


def test_a_child_that_ignores_sigterm_is_killed_and_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    log = tmp_path / "pids"
    running = Running(Supervisor({"deaf": python(DEAF, log)}, stop_seconds=0.3))
    until(lambda: len(starts(log)) == 1)
    assert running.join() == 1
    assert not alive(starts(log)[0])
    said = [record.getMessage() for record in caplog.records]
    waits = said.index("stopping deaf; this may take up to 0 s")
    assert "deaf did not stop within 0 s, and was killed" in said[waits:]


ORPHAN = (
    "import sys; from stream_ssl.process.signals import stop_on_signals; stop = stop_on_signals(); "
    "print('up', flush=True); sys.exit(0 if stop.wait(60) else 9)"
)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_set_the_stop_event(number: signal.Signals) -> None:
    as_usual = (
        f"import signal; signal.signal({number}, signal.SIG_DFL); {ORPHAN}"  # under nohup too
    )
    with subprocess.Popen(python(as_usual), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        process.send_signal(number)
        assert process.wait(60) == 0


READING = (
    "import os, signal; from stream_ssl.process.signals import stop_on_signals\n"
    "stop = stop_on_signals()\n"
    # No signal interrupts this thread, as if the signal came just before the read.
    "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\n"
    "import threading; threading.Thread(target=lambda: stop.wait() and os._exit(0)).start()\n"
    "print('up', flush=True); os.read(0, 1)"
)


def test_a_signal_just_before_a_read_sets_the_event() -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen(python(READING), stdin=pipe, stdout=pipe) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"up\n"
            process.terminate()
            assert process.wait(20) == 0
        finally:
            process.kill()


WAITING = (
    "import signal; from stream_ssl.process.signals import stop_on_signals\n"
    "stop = stop_on_signals()\n"
    "with stop._cond: signal.raise_signal(signal.SIGTERM)\n"  # as at any moment of stop.wait()
    "raise SystemExit(0 if stop.wait(60) else 9)"
)


def test_a_signal_during_a_wait_for_the_stop_event_sets_the_event() -> None:
    with subprocess.Popen(python(WAITING)) as process:
        try:
            assert process.wait(20) == 0
        finally:
            process.kill()


def test_a_process_under_nohup_outlives_its_terminal() -> None:
    with subprocess.Popen(["nohup", *python(ORPHAN)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        process.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        process.terminate()
        assert process.wait(60) == 0


SLOW = (
    "import sys; from stream_ssl.process.signals import stop_on_signals; stop = stop_on_signals(); "
    "print('up', flush=True); stop.wait(60); print('asked', flush=True); sys.stdin.readline()"
)


@pytest.mark.parametrize("by", ["", PARENT, "TORCHELASTIC_RUN_ID"])
def test_a_second_signal_ends_an_unsupervised_process(by: str) -> None:
    """systemd signals each process of a service, and then our supervisor or torchrun does so.

    If both counted, a learner would have no time for its last checkpoint.
    """
    environment = {**os.environ, by: str(os.getpid())} if by else None
    pipe = subprocess.PIPE
    with subprocess.Popen(python(SLOW), stdin=pipe, stdout=pipe, env=environment) as process:
        assert process.stdout is not None
        for line in (b"up\n", b"asked\n"):
            assert process.stdout.readline() == line
            time.sleep(2 * TOGETHER)
            process.send_signal(signal.SIGTERM)
        if by:
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.3)
            process.communicate(b"done\n", timeout=60)
        assert process.wait(60) == (0 if by else 128 + signal.SIGTERM)


def test_signals_that_come_together_count_as_one() -> None:
    """`timeout` of coreutils signals its child, and then the group of its child."""
    pipe = subprocess.PIPE
    patient = "from stream_ssl.process import signals; signals.TOGETHER = 20.0; "
    with subprocess.Popen(python(patient + SLOW), stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        for _ in range(3):
            process.send_signal(signal.SIGTERM)
            time.sleep(0.05)  # signals of one number that wait to be handled are one
        assert process.stdout.readline() == b"asked\n"
        process.communicate(b"done\n", timeout=60)
        assert process.returncode == 0


def test_an_orphaned_process_stops(tmp_path: Path) -> None:
    log = tmp_path / "pids"
    parent = (
        "import subprocess, sys, os, time\n"
        "from stream_ssl.process.signals import PARENT\n"
        "child = subprocess.Popen(sys.argv[2:], env={**os.environ, PARENT: str(os.getpid())},"
        " stdout=subprocess.PIPE)\n"
        "assert child.stdout.readline() == b'up\\n'\n"
        "open(sys.argv[1], 'a').write(f'{child.pid}\\n')\n"
        "os._exit(0)\n"
    )
    subprocess.run(python(parent, log, *python(ORPHAN)), check=True, timeout=60)
    until(lambda: not _running(starts(log)[0]))


def _running(pid: int) -> bool:
    """Return whether the process runs. In a container, an orphan may stay as a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_child_starts_once_its_condition_holds(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    supervisor = Supervisor({"receiver": python(LIVES, first), "learner": python(LIVES, second)})
    allowed = threading.Event()
    supervisor.children[0].may_start = allowed.is_set
    running = Running(supervisor)
    until(lambda: bool(starts(second)))
    assert not starts(first)
    allowed.set()
    until(lambda: bool(starts(first)))
    running.join()


def test_a_receiver_waits_until_the_learner_has_parsed_or_restarted(tmp_path: Path) -> None:
    learner, marker = Child("learner", []), tmp_path / "parsed"
    parsed = learner_parsed(marker, learner)
    assert not parsed()
    marker.touch()
    assert parsed()
    marker.unlink()
    assert not parsed()
    learner.restarts = 1
    assert parsed()


@pytest.mark.parametrize(
    "words", [command("keys", "--help"), [sys.executable, "-m", "stream_ssl", "keys", "--help"]]
)
def test_a_file_of_the_working_folder_replaces_no_library(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "argparse.py").write_text("raise SystemExit('the wrong argparse')")
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_ranks_do_not_import_modules_of_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher is started with -P, and gives the same setting to torchrun's children."""
    assert learner_command(2, ["config.yaml"])[1] == "-P"
    seen: list[str | None] = []
    fake = types.ModuleType("torch.distributed.run")
    fake.main = lambda _: seen.append(os.environ.get("PYTHONSAFEPATH"))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.distributed.run", fake)
    monkeypatch.setattr(torch.distributed, "run", fake, raising=False)
    monkeypatch.setenv("PYTHONSAFEPATH", "")
    monkeypatch.setattr(launch_ranks, "share_cores", lambda: None)
    assert launch_ranks.main(["2"]) == DONE
    assert seen == ["1"]


def test_ranks_of_one_host_connect_without_the_name_of_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a container the host's own name often has no address, and ranks waited for it."""
    from torch.distributed import run

    given: list[list[str]] = []
    monkeypatch.setattr(run, "main", given.append)
    monkeypatch.setattr(launch_ranks, "share_cores", lambda: None)
    monkeypatch.setenv("PYTHONSAFEPATH", "")
    assert launch_ranks.main(["2"]) == DONE
    assert run.config_from_args(run.parse_args(given[0]))[0].local_addr == "localhost"


def test_torchrun_ends_with_sigterm_without_its_supervisor() -> None:
    code = "from stream_ssl.daemon import launch_ranks; launch_ranks._terminate_without(-1)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    assert ended.returncode == -signal.SIGTERM, ended.stderr


CRASHES = "import os, signal; os.kill(os.getpid(), getattr(signal, '{}'))"


@table(
    ("name", "advice"), [("SIGSEGV", "encoder.width 16 or more"), ("SIGKILL", "memory.capacity")]
)
def test_repeated_crashes_by_one_signal_log_a_remedy(
    caplog: pytest.LogCaptureFixture, name: str, advice: str
) -> None:
    supervisor = Supervisor({"child": python(CRASHES.format(name))})
    supervisor.children[0].back_off = BackOff(first=0.01, longest=0.02)
    running = Running(supervisor)
    until(lambda: supervisor.children[0].restarts >= 4)
    running.join()
    number = getattr(signal, name).value
    assert f"child was killed by {name} (signal {number})" in caplog.text
    assert ("Fatal Python error" in caplog.text) == (name == "SIGSEGV"), "where the stacks are"
    assert f"by {name} 3 times within 5 minutes" in caplog.text
    assert advice in caplog.text


def test_crashes_that_differ_or_are_far_apart_log_no_remedy(
    caplog: pytest.LogCaptureFixture,
) -> None:
    supervisor = Supervisor({})
    child = Child("child", [])
    for at, number in [(0, 11), (1, 6), (2, 11), (400, 11), (702, 11), (703, None)]:
        found = None if number is None else signal.Signals(number)
        supervisor._log_remedy(child, float(at), found)
    assert "times within" not in caplog.text
    for at in (704.0, 705.0, 706.0):
        supervisor._log_remedy(child, at, signal.SIGABRT)
    assert "by SIGABRT 3 times within 5 minutes" in caplog.text


@table(
    ("statuses", "status"),
    [([1], 1), ([-11, 1], 139), ([1, -6], 134), ([-15, 1], 1), ([-15], 1), ([USAGE, -11], USAGE)],
)
def test_a_group_of_ranks_ends_with_the_status_of_the_rank_that_crashed(
    statuses: list[int], status: int
) -> None:
    assert status_of(statuses) == status
    killed = signal_of(status)
    assert (killed is None) == (status < 128)


def test_a_crash_of_any_command_writes_its_stacks() -> None:
    crash = (
        "import ctypes, sys; from stream_ssl.app import cli\n"
        "try: cli.main(['--version'])\n"
        "except SystemExit: ctypes.string_at(0)"
    )
    ended = subprocess.run(python(crash), capture_output=True, text=True, timeout=60)
    assert signal_of(ended.returncode) == signal.SIGSEGV
    assert "Fatal Python error: Segmentation fault" in ended.stderr
    assert "string_at" in ended.stderr


def test_a_signal_writes_the_stacks_of_a_process_that_goes_on() -> None:
    alive = (
        "import os, signal; from stream_ssl.app import cli\n"
        "def busy(): os.kill(os.getpid(), signal.SIGUSR1)\n"
        "try: cli.main(['--version'])\n"
        "except SystemExit: busy()"
    )
    ended = subprocess.run(python(alive), capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0
    assert "in busy" in ended.stderr


def test_an_orphaned_process_logs_why_it_stops(caplog: pytest.LogCaptureFixture) -> None:
    stop, gone = threading.Event(), os.getpid()  # no process is its own parent
    watch_parent(gone, stop)
    assert stop.is_set()
    assert f"the supervisor (process {gone}) has ended, so this process stops" in caplog.text
