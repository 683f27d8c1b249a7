"""The runner of the benchmarks and its reports."""

import io
import re
import sys
import types
from datetime import date

import pytest
from rich.console import Console

from benchmarks import __main__ as runner
from benchmarks import gpu
from benchmarks.report import Result, columns, markdown, path_of, table, text

ROWS = [
    {"case": "32 x 32", "samples_per_second": 41234.5, "target": ">= 30,000", "met": True},
    {"case": "100 KB", "megabytes_per_second": 93.21, "target": ">= 100", "met": False},
]


def test_columns_keep_their_order_with_the_target_last():
    assert columns(ROWS) == [
        "case",
        "samples_per_second",
        "megabytes_per_second",
        "target",
        "met",
    ]


def test_values_are_formatted_for_a_reader():
    assert [text(value) for value in (None, True, False, 2048, 41234.5, 93.21, "x")] == [
        *("", "yes", "NO", "2,048", "41,234", "93.2", "x"),
    ]


def test_markdown_aligns_numbers_to_the_right():
    lines = markdown(Result("ingest", ROWS, 12.3)).splitlines()
    assert lines[0] == "## ingest"
    assert lines[4] == "| case | samples_per_second | megabytes_per_second | target | met |"
    assert lines[5] == "| --- | ---: | ---: | --- | --- |"
    assert lines[6] == "| 32 x 32 | 41,234 |  | >= 30,000 | yes |"
    assert lines[7].endswith("| >= 100 | NO |")


def test_the_table_marks_a_missed_target():
    console = Console(width=120, record=True, file=io.StringIO())
    found = table(Result("ingest", ROWS, 1))
    console.print(found)
    assert "93.2" in console.export_text()
    assert [row.style for row in found.rows] == [None, "red"]


def test_a_report_is_named_by_day_and_hardware(tmp_path):
    name = path_of(tmp_path, date(2026, 1, 2)).name
    assert name.startswith("2026-01-02-")
    assert name.endswith("-cores.md")
    assert name == name.lower()


@pytest.fixture
def fake(monkeypatch):
    for name in runner.NAMES:
        module = types.ModuleType(f"benchmarks.{name}")
        module.run = lambda name=name: [{"case": name, "met": None}]
        monkeypatch.setitem(sys.modules, f"benchmarks.{name}", module)
    return sys.modules


def test_all_benchmarks_write_into_one_report(fake, tmp_path, capsys):
    assert runner.main(["--reports", str(tmp_path)]) == 0
    report = next(tmp_path.glob("*.md")).read_text()
    printed = capsys.readouterr().out
    for name in runner.NAMES:
        assert f"## {name}" in report
        assert re.search(rf"^{name} \(\d s\)", printed, re.MULTILINE)
    assert "`python -m benchmarks`" in report
    assert "Targets met: 0 of 0" in report
    assert "- processor: " in report
    assert "- torch: " in report


def test_a_benchmark_that_fails_does_not_stop_the_next(fake, tmp_path):
    def broken():
        raise OSError("no room")

    fake["benchmarks.ingest"].run = broken
    assert runner.main(["ingest", "eviction", "--reports", str(tmp_path)]) == 1
    report = next(tmp_path.glob("*.md")).read_text()
    assert "Failed: OSError: no room" in report
    assert "## eviction" in report
    assert "## learner" not in report


def test_an_unknown_name_of_a_benchmark_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        runner.main(["speed", "--reports", str(tmp_path)])
    assert ended.value.code == 2
    assert "invalid choice: 'speed'" in capsys.readouterr().err


def test_the_benchmark_of_a_gpu_runs_on_a_cpu_at_a_small_size(monkeypatch):
    small = "--batches.batch_size=8 --encoder.width=8 --memory.capacity=64 --learner.reencode=4"
    sizes = gpu.Sizes(64, batch=8, dim=16, warm_up=1, steps=4, options=tuple(small.split()))
    monkeypatch.setattr(gpu, "STEPS", {"small": gpu.SMALL})
    step, host, *rows = gpu.run("cpu", sizes)
    assert [row["what"].split(",")[0] for row in rows] == (
        ["add 8"] * len(gpu.POLICIES) + ["InfoNCE"] * 2
    )
    assert all(row["ms"] > 0 for row in (step, *rows))
    assert step["updates"] == 1
    parts = {name: ms for name, ms in host.items() if name != "what"}
    assert parts["forward, backward, loss ms"] > 0
    assert sum(parts.values()) > 0.2 * step["ms"]  # the rest of so small a step is the host's
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(RuntimeError, match="no CUDA GPU"):
        next(gpu.run())


def test_a_report_of_a_gpu_is_named_by_the_gpu(monkeypatch, tmp_path):
    monkeypatch.setattr("benchmarks.report.gpu_name", lambda: "NVIDIA H200")
    assert path_of(tmp_path, date(2026, 1, 2), gpu=True).name == "2026-01-02-nvidia-h200.md"
    assert "gpu" not in runner.NAMES  # it runs only if it is named
