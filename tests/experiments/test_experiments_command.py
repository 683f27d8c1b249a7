"""python -m benchmarks.experiments: its files, how it resumes after a stop, and wrong usage."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from forked import Forked, fork_workers
from table import table
from tiny_reproduction import TINY, write_cifar

from benchmarks.experiments import pool, work
from benchmarks.experiments.__main__ import main
from benchmarks.experiments.papers import presets

ONLY = ["--only", "one-hot"]


@pytest.fixture(scope="module")
def cifar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_cifar(tmp_path_factory.mktemp("cifar"))


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(presets.PRESETS, "cpu-small", TINY)


def command(cifar: Path, out: Path, *more: str) -> list[str]:
    data = f"cifar:{cifar}"
    return ["self-labeling", "--data", data, "--out", str(out), "--workers", "1", *more]


@pytest.mark.usefixtures("tiny")
def test_a_finished_run_is_not_repeated_and_its_report_stays_the_same(
    cifar: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fork_workers(monkeypatch, pool)
    assert main(command(cifar, tmp_path, *ONLY)) == 0
    told = capsys.readouterr().out
    assert "self-labeling: 2 of 2 runs" in told
    assert "x1 / one-hot / seed1: linear" in told
    stored = tmp_path / "self-labeling-cpu-small.jsonl"
    lines = [json.loads(line) for line in stored.read_text().splitlines()]
    assert [line["run"] for line in lines] == ["x1 / one-hot / seed0", "x1 / one-hot / seed1"]
    assert lines[0]["settings"]["data"] == "cifar10"
    reports = sorted(tmp_path.glob("*-self-labeling-cpu-small-*"))
    assert [path.suffix for path in reports] == [".md", ".png"]
    assert "2 of 9 planned runs are done" in reports[0].read_text()
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}

    def train_again(*_: object) -> None:
        raise AssertionError("all runs are done")

    monkeypatch.setattr(work, "finished", train_again)
    assert main(command(cifar, tmp_path, *ONLY)) == 0
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert main(["self-labeling", "--report", "--out", str(tmp_path)]) == 0
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    capsys.readouterr()
    assert main(["self-labeling", "--list", "--out", str(tmp_path)]) == 0
    listed = capsys.readouterr().out.splitlines()
    done = [line.removeprefix("done  ") for line in listed if line.startswith("done")]
    assert done == ["x1 / one-hot / seed0", "x1 / one-hot / seed1"]
    assert "      x1 / both / seed0" in listed


def test_an_interrupted_experiment_leaves_no_worker_running(cifar: Path, tmp_path: Path) -> None:
    process = Forked(main, command(cifar, tmp_path), output=tmp_path / "output.log")
    children: list[int] = []
    try:
        deadline = time.monotonic() + 100
        while not _children(process.pid) and time.monotonic() < deadline:
            assert process.poll() is None
            time.sleep(0.1)
        children = _children(process.pid)
        assert children
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 130
        deadline = time.monotonic() + 30
        while any(map(_runs, children)) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not any(map(_runs, children))
    finally:
        for pid in filter(_runs, [*children, process.pid]):
            os.kill(pid, signal.SIGKILL)
        process.wait()


def _children(parent: int) -> list[int]:
    found = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [int(child) for child in found]


def _runs(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


def test_the_command_reports_that_no_run_is_finished(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["duel", "--report", "--out", str(tmp_path / "none")]) == 0
    assert "no run is finished" in capsys.readouterr().out
    assert not (tmp_path / "none").exists()


@table(
    ("arguments", "message"),
    [
        (["duel"], "--data is missing"),
        (["dual", "--list"], "'dual' is no experiment: choose of duel"),
        (["duel", "--list", "--preset", "tpu"], "'tpu' (choose from 'cpu-small', 'cpu', 'gpu')"),
        (["duel", "--data", "cifar10"], "must begin with one of"),
    ],
    ids=["no data", "name", "preset", "source"],
)
def test_the_command_refuses_wrong_arguments(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@table(
    ("arguments", "message"),
    [
        (["--list", "--only", "x28"], "no run's name holds all of ['x28']: --list"),
        (["--list", "--seeds", "0"], "--seeds 0: must be above 0"),
        (["--list", "--minutes", "-1"], "--minutes -1.0: must be above 0"),
    ],
    ids=["only", "seeds", "minutes"],
)
def test_the_command_refuses_options_that_cannot_work(
    arguments: list[str], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert main(["duel", *arguments]) == 2
    assert message in caplog.text


def test_the_command_reports_missing_data(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert main(["duel", "--data", f"cifar:{tmp_path}"]) == 1
    assert "no test_batch.bin" in caplog.text
    assert "such as cifar:FOLDER" in caplog.text


@pytest.mark.parametrize("name", ["steps", "batch", "capacity", "dim", "references"])
def test_the_study_refuses_numbers_below_1(name: str, caplog: pytest.LogCaptureFixture) -> None:
    assert main(["study", "--list", f"--{name}", "0"]) == 2
    assert f"--{name} 0: must be at least 1" in caplog.text
