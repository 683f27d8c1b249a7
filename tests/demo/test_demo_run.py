"""The demo itself, as a user starts it: short, but with the real processes."""

import json
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from forked import Forked, fork_commands
from harness import until

from stream_ssl.daemon import supervisor
from stream_ssl.demo import children, folder, run
from stream_ssl.demo.data import CLASSES


def short(seconds: int, out: Path) -> int:
    """Run a demo that is shorter than a user may choose. It learns little in a few steps."""
    run.LEAST_SECONDS = 1.0
    return run.run(float(seconds), out)


def short_with_forks(seconds: int, out: Path) -> int:
    """A short demo that forks its daemons and producers, because their imports take longer."""
    fork_commands(children, supervisor)
    return short(seconds, out)


def demo(
    main: Callable[[int, Path], int], seconds: int, out: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Forked, Path]:
    """Return the demo, and the file that it prints to."""
    monkeypatch.setenv("COLUMNS", "200")
    printed = out.with_name("printed")
    return Forked(main, seconds, out, output=printed), printed


def pids(out: Path) -> list[int]:
    return [entry["pid"] for entry in json.loads((out / "endpoints.json").read_text()).values()]


def below(process: Forked) -> list[int]:
    """Process ids of its children, and of theirs."""
    return [child.pid for child in psutil.Process(process.pid).children(recursive=True)]


def alive(pid: int) -> bool:
    try:  # an orphan that has ended is a zombie until the first process reaps it
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.timeout(600)
def test_a_short_demo_learns_and_writes_its_report(tmp_path, monkeypatch):
    out = tmp_path / "out"
    one, file = demo(short_with_forks, 6, out, monkeypatch)  # sees more than the first scene
    assert one.wait(580) == 0, file.read_text()
    printed = file.read_text()
    assert "training: " in printed
    assert "kNN accuracy, held-out images" in printed
    assert str(out / folder.REPORT) in printed
    figures = json.loads((out / folder.SUMMARY).read_text())
    assert figures["updates"] > 0
    state = json.loads((out / "checkpoints" / "latest" / "state.json").read_text())
    batch = state["config"]["batches"]["batch_size"]
    due = state["pace"]["target_numerator"]
    assert figures["read_samples"] == batch * due
    assert figures["updates"] <= due  # the first scene alone makes no batch: some come later
    assert figures["acked_samples"] <= figures["received_samples"]
    assert figures["read_samples"] <= figures["received_samples"] + 1024
    one_scene = figures["received_samples"] < 2000  # is all that a slow machine may have seen
    assert 0.1 < figures["stream_largest_class_share"] < (1.01 if one_scene else 0.9)
    assert figures["memory_slots"] > 0
    assert 0.3 < figures["knn_pixels_accuracy"] < 1
    page = (out / folder.REPORT).read_text()
    assert all(name in page for name in CLASSES)
    assert (out / "checkpoints" / "latest" / "manifest.json").is_file()
    assert not [pid for pid in pids(out) if alive(pid)]


@pytest.mark.timeout(600)
def test_an_interrupted_demo_leaves_no_process_running(tmp_path, monkeypatch):
    out = tmp_path / "out"
    one, file = demo(short, 300, out, monkeypatch)
    # Two daemons, and the receiver and the learner of each.
    until(lambda: one.poll() is not None or len(below(one)) == 6, lambda: "no daemons", seconds=300)
    started = below(one)
    one.send_signal(signal.SIGINT)
    assert one.wait(200) == 130, file.read_text()
    printed = file.read_text()
    assert "Interrupted; all processes have ended." in printed
    assert len(started) == 6
    assert not [pid for pid in started if alive(pid)]
