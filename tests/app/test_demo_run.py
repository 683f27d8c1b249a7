"""The demo itself, as a user starts it: short, but with the real processes."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from harness import until

from stream_ssl.app.demo import folder
from stream_ssl.app.demo.data import CLASSES

START = (  # shorter than a user may have it: with a few steps it cannot learn much
    "import sys; from pathlib import Path; from stream_ssl.app.demo import run; "
    "run.LEAST_SECONDS = 1.0; sys.exit(run.run(float(sys.argv[1]), Path(sys.argv[2])))"
)


def demo(seconds: int, out: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", START, str(seconds), str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "COLUMNS": "200"},
    )


def pids(out: Path) -> list[int]:
    return [entry["pid"] for entry in json.loads((out / "endpoints.json").read_text()).values()]


def below(process: subprocess.Popen[str]) -> list[int]:
    """Process ids of its children, and of theirs."""
    return [child.pid for child in psutil.Process(process.pid).children(recursive=True)]


def alive(pid: int) -> bool:
    try:  # an orphan that has ended is there until the machine's first process has asked for it
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.timeout(600)
def test_a_short_demo_from_start_to_report(tmp_path):
    out = tmp_path / "out"
    one = demo(6, out)  # sees more than the first scene
    printed, _ = one.communicate(timeout=580)
    assert one.returncode == 0, printed
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
def test_an_interrupted_demo_leaves_nothing_running(tmp_path):
    out = tmp_path / "out"
    one = demo(300, out)
    # Two daemons, and the receiver and the learner of each.
    until(lambda: one.poll() is not None or len(below(one)) == 6, lambda: "no daemons", seconds=300)
    started = below(one)
    one.send_signal(signal.SIGINT)
    printed, _ = one.communicate(timeout=200)
    assert one.returncode == 130, printed
    assert "Interrupted; all processes have ended." in printed
    assert len(started) == 6
    assert not [pid for pid in started if alive(pid)]
