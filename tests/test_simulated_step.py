"""Budgets of a learner's step on a GPU, by the model of `python -m benchmarks gpu --simulated`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from benchmarks import __main__ as command
from benchmarks import simulated

# The kernels depend neither on the images' side nor on the width.
SMALL = {
    "memory.capacity": "2048",
    "decoder.size": "16",
    "batches.batch_size": "256",
    "encoder.width": "8",
    "encoder.depths": "[1,1,1,1]",
    "learner.reencode": "64",
}

# Most kernels and host waits of each part.
BUDGETS = {
    simulated.NOVELTY: (419, 1),
    simulated.VIEWS: (40, 0),
    simulated.TRAIN: (385, 0),
    simulated.KEYS: (125, 1),
    simulated.ADD: (138, 3),
    simulated.MEMORY: (125, 0),
    simulated.OPTIMISER: (30, 0),
    simulated.OBSERVERS: (75, 0),
    simulated.READING: (16, 2),
    simulated.REST: (6, 0),
}


@pytest.fixture(scope="module")
def found() -> dict:
    return simulated.simulate([str(simulated.CONFIG), *(f"--{n}={v}" for n, v in SMALL.items())])


def test_each_part_of_a_step_keeps_its_budget(found: dict) -> None:
    for name, (kernels, waits) in BUDGETS.items():
        part = found["parts"][name]
        assert part["kernels"] <= kernels, name
        assert part["host_waits"] <= waits, name


def test_the_step_is_the_sum_of_its_parts(found: dict) -> None:
    parts = dict(found["parts"])
    step = parts.pop("step")
    for name, value in step.items():
        assert value == pytest.approx(sum(part[name] for part in parts.values()))
    assert found["images_per_s"] == pytest.approx(1000 * 256 / step["ms"])
    assert 0 < found["memory_share"] < 1
    assert all(part["kernels"] and part["ms"] > 0 for part in parts.values())


def test_a_convolution_is_counted_at_its_real_size() -> None:
    conv = torch.nn.Conv2d(3, 8, 3, bias=False)
    hollow = simulated.Hollow(conv, 8, False, simulated.Meter())
    forward, backward = hollow.costs(torch.Size((4, 3, 10, 12)), learn=True)
    products = (4 * 8 * 8 * 10) * (3 * 3 * 3)
    assert (forward.kernels, forward.operations) == (1, 2 * products)
    assert forward.bytes == 4 * (4 * 3 * 10 * 12 + 8 * 27 + 4 * 8 * 8 * 10)
    assert (backward.kernels, backward.operations) == (1, 2 * products)
    assert hollow.costs(torch.Size((4, 3, 10, 12)), learn=False)[1].kernels == 0


def test_only_the_rows_that_an_index_reads_or_writes_are_counted() -> None:
    table_KD, rows_B, cost = torch.zeros(1000, 8), torch.arange(5), simulated.Cost()
    with simulated.OnShapes(cost):
        taken_BD = table_KD[rows_B]
    assert (cost.kernels, cost.bytes) == (1, 2 * 4 * 5 * 8 + 8 * 5)
    with simulated.OnShapes(cost):
        table_KD[rows_B] = taken_BD
    assert (cost.kernels, cost.bytes) == (2, 2 * (2 * 4 * 5 * 8 + 8 * 5))


def test_the_time_of_a_part_is_the_longer_time_of_launches_and_device() -> None:
    cost = simulated.Cost(kernels=100, waits=2, device=0.25)
    assert cost.seconds(1e-3) == pytest.approx(0.25 + 2 * simulated.ROUND_TRIP)
    assert cost.seconds(1e-2) == pytest.approx(1.0 + 2 * simulated.ROUND_TRIP)


def test_the_command_prints_a_table_and_writes_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: dict
) -> None:
    monkeypatch.setattr(simulated, "simulate", lambda _: found)
    file, console = tmp_path / "numbers.json", Console(width=180, record=True)
    simulated.report(simulated.CONFIG, file, console)
    text = console.export_text()
    assert all(name in text for name in simulated.PARTS)
    assert "5.0 us a launch" in text or found["launch_us"] > 5
    assert json.loads(file.read_text()) == found


def test_the_whole_step_keeps_its_budget(found: dict) -> None:
    assert found["kernels"] <= 1302
    assert found["host_waits"] <= 7


def test_options_after_the_configuration_reach_the_simulation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = []
    monkeypatch.setattr(simulated, "report", lambda *told: given.append(told))
    assert command.main(["gpu", "--simulated", "some.yaml", "--decoder.size=32"]) == 0
    assert given[0][0] == Path("some.yaml")
    assert given[0][3] == ["--decoder.size=32"]
    with pytest.raises(SystemExit):
        command.main(["gpu", "--decoder.size=32"])
    assert "unknown options: --decoder.size=32" in capsys.readouterr().err


@pytest.mark.parametrize(
    "wrong", [["--simulated"], ["gpu", "--json", "x"], ["page", "--simulated"]]
)
def test_the_options_of_the_simulation_need_the_benchmark_gpu(
    wrong: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command.main(wrong)
    assert "give gpu --simulated [CONFIG] [--json FILE]" in capsys.readouterr().err
