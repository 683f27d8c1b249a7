"""The study of memory policies: its streams, its results through kills, its tables."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.memory_policies import __main__ as study
from benchmarks.memory_policies.arms import (
    BASE,
    CONTROLS,
    FAVOURITE,
    PAIR,
    POLICIES,
    RIVALS,
    SEEDS,
    STREAMS,
    TRAINING,
    VARIED,
    Run,
    plan,
)
from benchmarks.memory_policies.evaluation import linear_probe
from benchmarks.memory_policies.results import Results
from benchmarks.memory_policies.stream import CLASSES, Shape, load
from benchmarks.memory_policies.tables import markdown, rows
from stream_ssl.reproduction.data import Images, first_of_each
from stream_ssl.reproduction.spread import Spread

ROOT = Path(__file__).parents[2]
SETTINGS = {"steps": 3, "batch": 8, "capacity": 12, "dim": 8, "references": 4}


@pytest.fixture(scope="module")
def cifar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cifar")
    draw = np.random.default_rng(0)
    for name, each in (("data_batch_1.bin", 6), ("test_batch.bin", 2)):
        labels = draw.permutation(np.repeat(np.arange(CLASSES), each))
        image_NHWC = draw.integers(0, 256, (len(labels), 32, 32, 3), dtype=np.uint8)
        planes = image_NHWC.transpose(0, 3, 1, 2).reshape(len(labels), -1)
        records = np.concatenate([labels[:, None].astype(np.uint8), planes], axis=1)
        (folder / name).write_bytes(records.tobytes())
    return folder


def command(cifar: Path, folder: Path, *more: str) -> list[str]:
    settings = [word for name, value in SETTINGS.items() for word in (f"--{name}", str(value))]
    return ["--data", str(cifar), "--results", str(folder), *settings, *more]


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "runs.jsonl").read_text().splitlines()]


def test_a_killed_study_goes_on_where_it_was(cifar: Path, tmp_path: Path) -> None:
    words = command(cifar, tmp_path, "--only", "x27-iid", "--only", "queue/stream/stale")
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.memory_policies", *words],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("x27-iid queue/stream/stale seed0: kNN"):
            break
    process.send_signal(signal.SIGKILL)
    process.stdout.close()
    assert process.wait() == -signal.SIGKILL
    before = lines(tmp_path)
    assert 1 <= len(before) < 3
    with (tmp_path / "runs.jsonl").open("a") as file:
        file.write('{"run": "x27-iid queue/stream/stale seed2", "settin')  # as a kill may leave it
    assert study.main(words) == 0
    text = (tmp_path / "runs.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in text[: len(before)]] == before
    names = [json.loads(line)["run"] for line in text if line.endswith("}")]
    assert names == [f"x27-iid queue/stream/stale seed{seed}" for seed in range(3)]
    numbers = lines_of(text)[0]["numbers"]
    assert 0 <= numbers["knn"] <= 1
    assert 0 <= numbers["entropy"] <= math.log(CLASSES)
    table = (tmp_path / "tables.md").read_text()
    assert "| queue / stream / stale | 3 |" in table
    for name in ("accuracy.svg", "balance.svg"):
        assert "</svg>" in (tmp_path / name).read_text()


def lines_of(text: list[str]) -> list[dict]:
    return [json.loads(line) for line in text if line.endswith("}")]


def test_a_repeated_run_gives_the_same_numbers(cifar: Path, tmp_path: Path) -> None:
    found = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        words = command(cifar, folder, "--only", FAVOURITE.name, "--runs", "1")
        assert study.main(words) == 0
        numbers = lines(folder)[0]["numbers"]
        found.append({name: n for name, n in numbers.items() if not name.endswith("_s")})
    assert found[0] == found[1]
    assert found[0]["written_back"] <= 1


@pytest.mark.parametrize("training", ["stream/reencoded", "memory/reencoded", "memory/stale"])
def test_every_way_of_training_runs(cifar: Path, tmp_path: Path, training: str) -> None:
    words = command(cifar, tmp_path, "--only", f"x9-blocks64 reservoir/{training} seed1")
    assert study.main(words) == 0
    numbers = lines(tmp_path)[0]["numbers"]
    assert ("drift" in numbers) == training.endswith("reencoded")
    assert ("written_back" in numbers) == (training == "memory/reencoded")


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_policy_runs(cifar: Path, tmp_path: Path, name: str) -> None:
    assert (
        study.main(command(cifar, tmp_path, "--only", f"x1-iid {name}/memory/written seed0")) == 0
    )
    assert len(lines(tmp_path)) == 1


def test_listing_and_reporting_train_nothing(tmp_path: Path, capsys) -> None:
    assert study.main(["--results", str(tmp_path), "--list", "--only", "seed0"]) == 0
    assert f"      {plan()[0].name}" in capsys.readouterr().out
    assert study.main(["--results", str(tmp_path), "--report", str(tmp_path / "out")]) == 0
    assert "nothing to report" in capsys.readouterr().out
    assert not (tmp_path / "runs.jsonl").exists()


def test_an_interrupted_study_reports_what_it_has(cifar, tmp_path, monkeypatch, capsys) -> None:
    plain, begun = study.run_once, []

    def run_once(run, *rest):
        begun.append(run)
        if len(begun) == 2:
            raise KeyboardInterrupt
        return plain(run, *rest)

    monkeypatch.setattr(study, "run_once", run_once)
    assert study.main(command(cifar, tmp_path)) == 130
    assert [line["run"] for line in lines(tmp_path)] == [begun[0].name]
    printed = capsys.readouterr().out
    assert "stopped" in printed
    assert "queue / stream / stale" in printed


def test_what_cannot_work_is_refused(tmp_path: Path, capsys) -> None:
    for words, says in (
        (["--only", "x3"], "no run's name holds all of ['x3']"),
        ([], "--data FOLDER is due"),
    ):
        with pytest.raises(SystemExit) as ended:
            study.main(["--results", str(tmp_path), *words])
        assert ended.value.code == 2
        assert says in capsys.readouterr().err
    only = Images(np.zeros((3, 32, 32, 3), np.uint8), np.arange(3))
    with pytest.raises(ValueError, match="none of class 3"):
        Shape(1, 1).stream(only, 4, 0)


def test_the_plan_holds_every_run_once() -> None:
    names = [run.name for run in plan()]
    assert len(set(names)) == len(names)
    assert names[:2] == [f"x27-iid {arm.name} seed0" for arm in (BASE, FAVOURITE)]
    named = {*PAIR, *CONTROLS, *RIVALS, *VARIED}
    special = [arm for arm in named if arm.draw != "uniform" or arm.plain]
    ways = len(TRAINING) * len(POLICIES) + len(special)
    assert len(names) == ways * len(STREAMS) * len(SEEDS)


def test_images_come_back_as_they_were_written(cifar: Path) -> None:
    images = load(cifar, "train")
    assert len(images) == 6 * CLASSES
    raw = np.fromfile(cifar / "data_batch_1.bin", np.uint8).reshape(-1, 3073)
    planes = images.image_NHWC.transpose(0, 3, 1, 2).reshape(len(images), -1)
    ours = np.concatenate([images.label_N[:, None], planes], axis=1)
    assert sorted(ours.tolist()) == sorted(raw.tolist())
    few = first_of_each(images, 2)
    assert np.bincount(few.label_N).tolist() == [2] * CLASSES
    assert len(first_of_each(images, 100)) == len(images)


@pytest.mark.parametrize("shape", STREAMS, ids=lambda shape: shape.name)
def test_classes_come_by_their_shares(cifar: Path, shape: Shape) -> None:
    stream = shape.stream(load(cifar, "train"), 4096, seed=2)
    label_B = np.concatenate([stream.next(0).labels_B for _ in range(16)])
    assert stream.share_C[0] == pytest.approx(shape.bias / (shape.bias + CLASSES - 1))
    blocks = label_B.reshape(-1, shape.block)
    assert (blocks == blocks[:, :1]).all()
    found = np.bincount(blocks[:, 0], minlength=CLASSES) / len(blocks)
    error = np.sqrt(stream.share_C * (1 - stream.share_C) / len(blocks))
    assert (np.abs(found - stream.share_C) < 4.5 * error).all()


def test_a_stream_repeats_itself_and_names_its_samples(cifar: Path) -> None:
    images = load(cifar, "train")
    one, other = (Shape(27, 1).stream(images, 32, seed=5) for _ in range(2))
    first, second = one.next(0), one.next(0)
    assert np.array_equal(first.images_BCHW, other.next(0).images_BCHW)
    assert len({*first.ids_B, *second.ids_B}) == 64
    for batch in (first, second):
        assert np.array_equal(
            images.image_NHWC[batch.hashes_B - 1], batch.images_BCHW.transpose(0, 2, 3, 1)
        )
        assert np.array_equal(images.label_N[batch.hashes_B - 1], batch.labels_B)
    # A class is gone through before any of its images comes again: 6 of each here.
    dominant = [h for batch in (first, second) for h in batch.hashes_B[batch.labels_B == 0]]
    assert sorted(dominant[:6]) == sorted(set(dominant))


def test_the_linear_probe_separates_what_is_separable() -> None:
    generator = torch.Generator().manual_seed(0)
    label_N = torch.arange(400) % CLASSES
    centre_CF = 3 * torch.randn(CLASSES, 16, generator=generator)
    feature_NF = centre_CF[label_N] + torch.randn(400, 16, generator=generator)
    feature_NF[:, 3] = 7.0  # a dead feature has no variance to scale by
    half = slice(None, 200), slice(200, None)
    parts = [part for side in half for part in (feature_NF[side], label_N[side])]
    assert linear_probe(*parts) > 0.97
    shuffled_N = label_N[:200][torch.randperm(200, generator=generator)]
    assert linear_probe(parts[0], shuffled_N, *parts[2:]) < 0.3


def test_rows_pair_each_run_with_the_queue_of_its_seed(tmp_path: Path) -> None:
    results = Results(tmp_path, {})
    shape = STREAMS[0]
    for seed, base, other in ((0, 0.40, 0.45), (1, 0.50, 0.53), (2, None, 0.60)):
        for arm, value in ((BASE, base), (FAVOURITE, other)):
            if value is not None:
                numbers = dict.fromkeys(("entropy", "collision", "knn", "linear"), value)
                results.add(Run(shape, arm, seed), numbers)
    best, base = rows(Results(tmp_path, {}), plan())
    assert (best.arm, best.seeds, base.seeds) == (FAVOURITE, 3, 2)
    assert best.knn_gain.values == pytest.approx((0.05, 0.03))
    assert base.knn_gain.values == ()
    assert best.knn_gain.text(sign=True) == "+4.0 ± 1.4"
    assert best.entropy.mean == pytest.approx((0.45 + 0.53 + 0.6) / 3 / math.log(CLASSES))
    assert "| vmf0.1 / memory / written / plain | 3 |" in markdown([best, base])
    assert len(Results(tmp_path, {"steps": 1})) == 0


def test_a_spread_of_one_value_has_no_deviation() -> None:
    assert Spread((0.5,)).text() == "50.0"
    assert Spread(()).text() == ""
    assert Spread((0.4, 0.6)).text() == "50.0 ± 14.1"
