"""The study of memory policies: its streams, its results through kills, its tables."""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from forked import Forked
from PIL import Image
from table import table

from benchmarks.study import __main__ as study
from benchmarks.study.arms import (
    BASE,
    DESCRIPTORS,
    FOLLOWING,
    NOVEL,
    POLICIES,
    SEEDS,
    TITLES,
    USERS,
    Run,
    drawn,
    plan,
)
from benchmarks.study.oracle import ImageBalanced
from benchmarks.study.results import Results
from benchmarks.study.streams import CLASSES, STREAMS, STRIDE, frames, load
from benchmarks.study.streams import TITLES as STREAM_TITLES
from benchmarks.study.tables import gain, markdown, rows
from benchmarks.study.training import Data, Settings, distinct, linear_probe, run_once
from memory import WorkingMemory
from memory.eviction import Oldest
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
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    process = Forked(study.main, words, output=pipe)
    with pipe.open() as told:
        for line in told:
            if line.startswith("x27-iid queue/stream/stale seed0: kNN"):
                break
        process.kill()
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
    assert "| queue, trained on the stream (MoCo) | 3 |" in table
    assert "</svg>" in (tmp_path / "accuracy.svg").read_text()


def lines_of(text: list[str]) -> list[dict]:
    return [json.loads(line) for line in text if line.endswith("}")]


def test_the_streams_are_drawn(cifar: Path, tmp_path: Path) -> None:
    assert study.main(["--data", str(cifar), "--streams", str(tmp_path / "streams.png")]) == 0
    pixels = np.asarray(Image.open(tmp_path / "streams.png").convert("L"), np.float64)
    # Six streams of coloured noise: most of the picture is no paper.
    assert np.mean(pixels < 250) > 0.5


def test_a_repeated_run_gives_the_same_numbers(cifar: Path, tmp_path: Path) -> None:
    found = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        words = command(cifar, folder, "--only", NOVEL.name, "--runs", "1")
        assert study.main(words) == 0
        numbers = lines(folder)[0]["numbers"]
        found.append({name: n for name, n in numbers.items() if not name.endswith("_s")})
    assert found[0] == found[1]
    assert found[0]["written_back"] <= 1


# Every policy, descriptor and stream of the plan is in one of these runs.
PAIRS = [
    (policy, descriptor, stream)
    for policy, descriptor, stream in zip(
        POLICIES, itertools.cycle(DESCRIPTORS), itertools.cycle(STREAMS), strict=False
    )
]


@pytest.mark.parametrize(("policy", "descriptor", "stream"), PAIRS)
def test_every_policy_descriptor_and_stream_runs(
    cifar: Path, tmp_path: Path, policy: str, descriptor: str, stream: str
) -> None:
    data = Data(load(cifar, "train"), load(cifar, "train"), load(cifar, "test"))
    numbers = run_once(Run(stream, drawn(policy, descriptor), 0), Settings(**SETTINGS), data)
    assert 0 <= numbers["knn"] <= 1
    assert 0 <= numbers["copies"] < 1
    assert 1 <= numbers["distinct"] <= SETTINGS["capacity"]
    assert numbers["frames"] == SETTINGS["steps"] * SETTINGS["batch"]


def test_a_run_that_turns_copies_away_takes_more_frames_for_as_many_updates(cifar: Path) -> None:
    data = Data(load(cifar, "train"), load(cifar, "train"), load(cifar, "test"))
    settings = Settings(**{**SETTINGS, "steps": 12})
    follows, stays = (
        run_once(Run("parked", arm, 0), settings, data)["frames"] for arm in (FOLLOWING, NOVEL)
    )
    # Frames go to fill a batch with what is new, where the other arm updates on the memory.
    assert follows >= settings.steps / 4 * settings.batch
    assert stays == settings.steps * settings.batch


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
    assert "as shipped" in printed


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
        frames("x27-iid", only, 4, 0).next(0)


def test_the_plan_holds_every_run_once() -> None:
    names = [run.name for run in plan()]
    assert len(set(names)) == len(names)
    assert names[:2] == [f"{USERS[0]} {arm.name} seed0" for arm in (NOVEL, BASE)]
    assert {run.name.split(" ")[0] for run in plan()} == set(STREAMS) == set(STREAM_TITLES)
    for arm in TITLES:
        assert all(
            f"{stream} {arm.name} seed{seed}" in names for stream in STREAMS for seed in SEEDS
        )


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


@table("name", STREAMS)
def test_a_stream_repeats_itself_and_names_the_image_of_each_frame(name: str) -> None:
    draw = np.random.default_rng(0)
    images = Images(
        draw.integers(0, 256, (400, 32, 32, 3), dtype=np.uint8), np.arange(400) % CLASSES
    )
    one, other = (frames(name, images, 64, seed=5) for _ in range(2))
    ids: set[int] = set()
    near = []
    for _ in range(20):
        batch = one.next(0)
        assert np.array_equal(batch.images_BCHW, other.next(0).images_BCHW)
        assert (batch.hashes_B > 0).all()
        ids |= set(batch.ids_B.tolist())
        image_B = batch.ids_B % STRIDE
        assert np.array_equal(images.label_N[image_B], batch.labels_B)
        shown, source = batch.images_BCHW, images.image_NHWC[image_B].transpose(0, 3, 1, 2)
        near.append(np.corrcoef(shown.ravel(), source.ravel())[0, 1])
    assert len(ids) == 20 * 64
    copied = name in ("parked", "video", "crawl")
    assert np.mean(near) < 0.9 if copied else np.mean(near) == pytest.approx(1)
    share = np.bincount(batch.ids_B % STRIDE).max() / 64
    assert share > 0.1 or name not in ("parked", "stalls", "stalls-x27", "video")


def test_different_images_are_told_by_their_ids() -> None:
    memory = WorkingMemory(10, 4, Oldest())
    image_B = torch.tensor([0, 3, 3, 3, 1, 0, 16, 0])
    memory.add(torch.arange(8) * STRIDE + image_B, torch.eye(4)[torch.arange(8) % 4])
    assert distinct(memory) == 4


def test_an_oracle_evicts_the_oldest_frame_of_the_image_that_has_most() -> None:
    memory = WorkingMemory(4, 2, ImageBalanced())
    image_B = torch.tensor([7, 8, 8, 9, 7, 6, 7, 7])
    admission = memory.add(torch.arange(8) * STRIDE + image_B, torch.eye(2)[[0] * 8])
    # First a copy of 8; then the oldest, of 7; and of copies of 7 the older, twice.
    assert (admission.evicted // STRIDE).tolist() == [1, 0, 2, 4]
    assert sorted((memory.ids % STRIDE).tolist()) == [6, 7, 7, 9]


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
    for seed, base, other in ((0, 0.40, 0.45), (1, 0.50, 0.53), (2, None, 0.60)):
        for arm, value in ((BASE, base), (NOVEL, other)):
            if value is not None:
                numbers = dict.fromkeys(("entropy", "copies", "knn", "linear"), value)
                results.add(f"parked {arm.name} seed{seed}", numbers)
    results.add(f"shuffled {BASE.name} seed1", {"knn": 0.5, "linear": 0.5})
    ceiling, best, base = rows(Results(tmp_path, {}))
    assert (best.arm, base.arm, ceiling.stream) == (NOVEL.name, BASE.name, "shuffled")
    assert best.seeds == ("seed0", "seed1", "seed2")
    assert best.gains["knn"].values == pytest.approx((0.05, 0.03))
    assert gain(best.gains["knn"]) == "+4.0 ± 1.0"
    assert base.gains["knn"].values == ceiling.shares["knn"].values == ()
    assert best.shares["linear"].values == pytest.approx((1.06,))
    assert "| +4.0 ± 1.0 | +4.0 ± 1.0 | 106.0 | 106.0 |" in markdown([best, base])
    assert Results(tmp_path, {"steps": 1}).names() == []


def test_a_spread_of_one_value_has_no_deviation() -> None:
    assert Spread((0.5,)).text() == "50.0"
    assert Spread(()).text() == ""
    assert Spread((0.4, 0.6)).text() == "50.0 ± 14.1"
