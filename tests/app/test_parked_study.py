"""The study of a parked robot's stream counts near-copies, and goes on where it stopped."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import parked
from benchmarks.memory_policies.arms import DESCRIPTORS, SEEDS
from benchmarks.memory_policies.results import Results
from memory import WorkingMemory
from memory.eviction import Oldest
from stream_ssl.reproduction.data import Images

SETTINGS = {"steps": 3, "batch": 8, "capacity": 12, "dim": 8, "references": 4}


@pytest.fixture(scope="module")
def cifar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, draw = tmp_path_factory.mktemp("cifar"), np.random.default_rng(0)
    for name, each in (("data_batch_1.bin", 6), ("test_batch.bin", 2)):
        labels = draw.permutation(np.repeat(np.arange(10), each)).astype(np.uint8)
        planes = draw.integers(0, 256, (len(labels), 3 * 32 * 32), dtype=np.uint8)
        records = np.concatenate([labels[:, None], planes], axis=1)
        (folder / name).write_bytes(records.tobytes())
    return folder


def command(cifar: Path, folder: Path, *more: str) -> list[str]:
    settings = [word for name, value in SETTINGS.items() for word in (f"--{name}", str(value))]
    return ["--data", str(cifar), "--results", str(folder), *settings, *more]


@pytest.mark.parametrize("descriptor", sorted(DESCRIPTORS))
def test_every_descriptor_runs_and_a_finished_run_is_not_done_again(
    descriptor: str, cifar: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "plain" if descriptor == "embedding" else f"plain/{descriptor}"
    words = command(cifar, tmp_path, "--only", f"parked vmf0.1/memory/written/{name} seed0")
    for _ in range(2):
        assert parked.main(words) == 0
        assert "vmf0.1 / memory / written / plain" in capsys.readouterr().out
    (line,) = (tmp_path / "runs.jsonl").read_text().splitlines()
    numbers = json.loads(line)["numbers"]
    assert 0 <= numbers["copies"] < 1
    assert numbers["distinct"] == pytest.approx(12 * (1 - numbers["copies"]))
    assert 0 <= numbers["knn"] <= 1


def test_near_copies_are_the_slots_beyond_the_first_of_a_scene() -> None:
    memory = WorkingMemory(10, 4, Oldest())
    scenes = torch.tensor([0, 3, 3, 3, 1, 0, 16, 0])  # 0: an image that comes once
    ids = torch.arange(8) * parked.STRIDE + scenes
    memory.add(ids, torch.eye(4)[torch.arange(8) % 4])
    assert parked.near_copies(memory) == 2


def test_the_stream_names_its_scenes() -> None:
    draw = np.random.default_rng(0)
    images = Images(
        draw.integers(0, 256, (400, 32, 32, 3), dtype=np.uint8), draw.integers(0, 10, 400)
    )
    one, other = (parked.Robot().stream(images, 64, seed=5) for _ in range(2))
    scenes: dict[int, set[int]] = {}
    keys: set[int] = set()
    for _ in range(40):
        batch = one.next(0)
        assert np.array_equal(batch.images_BCHW, other.next(0).images_BCHW)
        keys |= set(batch.ids_B.tolist())
        for key, label in zip(batch.ids_B.tolist(), batch.labels_B.tolist(), strict=True):
            scenes.setdefault(key % parked.STRIDE, set()).add(label)
        assert (batch.hashes_B > 0).all()
    assert len(keys) == 40 * 64
    assert set(scenes) <= set(range(parked.SCENES + 1))
    assert all(len(labels) == 1 for scene, labels in scenes.items() if scene)


def test_the_plan_holds_every_run_once() -> None:
    names = [run.name for run in parked.plan()]
    assert len(set(names)) == len(names)
    for name in ("queue/memory/written/plain", "reservoir/memory/written/plain", "minred/memory"):
        assert sum(f"parked {name}" in one for one in names) >= len(SEEDS)
    first = {f"{one.name} seed0" for one in parked.TITLES}
    assert names[0] == "shuffled queue/stream/stale seed0"
    assert {name.removeprefix("parked ") for name in names[1 : 1 + len(first)]} == first


def test_the_picture_has_a_bar_for_each_arm_that_was_run(tmp_path: Path) -> None:
    results = Results(tmp_path, {})
    for run, knn in zip(parked.plan()[:3], (0.5, 0.25, 0.4), strict=True):
        results.add(run, {"knn": knn})
    parked.draw(results, parked.plan(), tmp_path / "bars.svg")
    drawn = (tmp_path / "bars.svg").read_text()
    assert all(text in drawn for text in ("shuffled (50.0)", ">25.0<", ">40.0<", "MoCo"))
    assert "reservoir" not in drawn
