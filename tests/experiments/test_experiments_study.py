"""The study of memory policies: its streams, its tables, and its results after a kill."""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from forked import Forked, fork_workers
from PIL import Image
from table import table
from tiny_reproduction import DATA, write_cifar

from benchmarks.experiments import pool, work
from benchmarks.experiments.__main__ import REPORTS, load, main, parser_of
from benchmarks.experiments.data import LabelledImages
from benchmarks.experiments.findings import Spread
from benchmarks.experiments.results import Results
from benchmarks.experiments.study import report
from benchmarks.experiments.study.arms import (
    BASE,
    BASELINES,
    CMP,
    DESCRIPTORS,
    FOLLOWING,
    NOVEL,
    POLICIES,
    SEEDS,
    TITLES,
    USERS,
    StudyArm,
    StudyRun,
    drawn,
    plan,
)
from benchmarks.experiments.study.oracles import ClassBalanced, ImageBalanced
from benchmarks.experiments.study.streams import CLASSES, STREAMS, STRIDE, frames
from benchmarks.experiments.study.streams import TITLES as STREAM_TITLES
from benchmarks.experiments.study.training import StudySettings, build, distinct, run_once
from benchmarks.experiments.study.work import Study
from stream_ssl.evaluation import sets
from stream_ssl.learning.views import Views
from stream_ssl.memory import WorkingMemory
from stream_ssl.memory.eviction import Oldest
from tests import naive_policies as naive

SETTINGS = {"steps": 3, "batch": 8, "capacity": 12, "dim": 8, "references": 4}


@pytest.fixture(scope="module")
def cifar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_cifar(tmp_path_factory.mktemp("cifar"))


def command(cifar: Path, folder: Path, *more: str) -> list[str]:
    settings = [word for name, value in SETTINGS.items() for word in (f"--{name}", str(value))]
    words = ["study", "--data", f"cifar:{cifar}", "--out", str(folder), "--workers", "1"]
    return [*words, *settings, *more]


def lines(folder: Path) -> list[dict]:
    text = (folder / "runs.jsonl").read_text().splitlines()
    return [json.loads(line) for line in text if line.endswith("}")]


def test_a_killed_study_continues_with_its_missing_runs(
    cifar: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The killed study starts its worker as the product does, and the second one forks it."""
    words = command(cifar, tmp_path, "--only", "x27-iid", "reservoir/memory/written/plain")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    process = Forked(main, words, output=pipe)
    with pipe.open() as told:
        for line in told:
            if line.startswith("x27-iid reservoir/memory/written/plain seed0: linear"):
                break
        workers = psutil.Process(process.pid).children(recursive=True)
        process.kill()
    assert process.wait() == -signal.SIGKILL
    assert workers
    assert not psutil.wait_procs(workers, timeout=30)[1], "a worker outlives the study"
    before = lines(tmp_path)
    assert 1 <= len(before) < 3
    with (tmp_path / "runs.jsonl").open("a") as file:
        file.write(
            '{"run": "x27-iid reservoir/memory/written/plain seed2", "settin'
        )  # as a kill may leave it
    fork_workers(monkeypatch, pool)
    assert main(words) == 0
    after = lines(tmp_path)
    assert after[: len(before)] == before
    assert [line["run"] for line in after] == [
        f"x27-iid reservoir/memory/written/plain seed{seed}" for seed in range(3)
    ]
    assert after[0]["settings"] == {**StudySettings(**SETTINGS).facts(), "threads": 1}
    numbers = after[0]["numbers"]
    assert 0 <= numbers["knn"] <= 1
    assert 0 <= numbers["entropy"] <= math.log(CLASSES)
    table = (tmp_path / "tables.md").read_text()
    assert "| reservoir | 3 |" in table
    Image.open(tmp_path / "accuracy.png").verify()


def test_the_study_draws_a_picture_of_the_streams(cifar: Path, tmp_path: Path) -> None:
    picture = tmp_path / "streams.png"
    assert main(["study", "--data", f"cifar:{cifar}", "--streams", str(picture)]) == 0
    pixels = np.asarray(Image.open(picture).convert("L"), np.float64)
    # Six streams of coloured noise: most of the picture is no paper.
    assert np.mean(pixels < 250) > 0.5


def test_the_settings_of_a_run_do_not_depend_on_the_device() -> None:
    assert StudySettings(device="cuda:0").facts() == StudySettings().facts()


def test_a_repeated_run_gives_the_same_numbers() -> None:
    found = []
    for _ in range(2):
        numbers = run_once(StudySettings(**SETTINGS), StudyRun("parked", NOVEL, 0), DATA)
        found.append({name: n for name, n in numbers.items() if not name.endswith("_s")})
    assert found[0] == found[1]
    assert found[0]["written_back"] <= 1


def test_the_study_reads_the_stored_runs_of_the_repository() -> None:
    study = Study(StudySettings(), REPORTS / "study")
    done = [run.name for run in study.planned() if study.results.get(run) is not None]
    assert len(done) >= 178
    assert set(done) <= set(study.results.by_name())


# Every policy, descriptor and stream of the plan is in one of these runs.
PAIRS = [
    (policy, descriptor, stream)
    for policy, descriptor, stream in zip(
        POLICIES, itertools.cycle(DESCRIPTORS), itertools.cycle(STREAMS), strict=False
    )
]


@pytest.mark.parametrize(("policy", "descriptor", "stream"), PAIRS)
def test_every_policy_descriptor_and_stream_runs(policy: str, descriptor: str, stream: str) -> None:
    numbers = run_once(
        StudySettings(**SETTINGS), StudyRun(stream, drawn(policy, descriptor), 0), DATA
    )
    assert 0 <= numbers["knn"] <= 1
    assert 0 <= numbers["copies"] < 1
    assert 1 <= numbers["distinct"] <= SETTINGS["capacity"]
    assert numbers["frames"] == SETTINGS["steps"] * SETTINGS["batch"]


@table("arm", list(BASELINES))
def test_every_baseline_runs(arm: StudyArm) -> None:
    settings = StudySettings(**{**SETTINGS, "batch": 32})
    numbers = run_once(settings, StudyRun("shift", arm, 0), DATA)
    assert 0 <= numbers["knn"] <= 1
    assert math.isfinite(numbers["loss"])
    samples = 2 if arm == CMP else settings.batch  # of 16 views
    assert numbers["frames"] == settings.steps * samples


def test_batches_of_used_frames_contain_only_the_first_frames() -> None:
    whole, part = (frames("shift", DATA.train, 8, seed=0, used=used) for used in (None, 3))
    for _ in range(2):
        all_of, first = whole.next(0.0), part.next(0.0)
        assert first.ids_B.tolist() == all_of.ids_B[:3].tolist()
        assert np.array_equal(first.images_BCHW, all_of.images_BCHW[:3])


def test_arms_of_a_seed_share_weights_under_every_method() -> None:
    views = Views(32)
    alike = [
        build(StudyRun("shift", arm, 1), StudySettings(**SETTINGS), DATA, views).method
        for arm in (BASE, *BASELINES)
    ]
    for method in alike[1:]:
        for part in ("encoder", "projector"):
            theirs, ours = (getattr(one, part).state_dict() for one in (alike[0], method))
            torch.testing.assert_close(theirs, ours, rtol=0, atol=0)
        assert not any(name.startswith("augment") for name in method.state_dict())


def test_a_run_at_the_pace_of_new_frames_reads_at_least_a_batch_for_four_updates() -> None:
    settings = StudySettings(**{**SETTINGS, "steps": 12})
    follows, stays = (
        run_once(settings, StudyRun("parked", arm, 0), DATA)["frames"] for arm in (FOLLOWING, NOVEL)
    )
    # One arm reads frames until a batch of new frames is full. The other arm updates anyway.
    assert follows >= settings.steps / 4 * settings.batch
    assert stays == settings.steps * settings.batch


def test_listing_and_reporting_start_no_run(tmp_path: Path, capsys) -> None:
    out = ["--out", str(tmp_path)]
    assert main(["study", *out, "--list", "--only", "seed0"]) == 0
    assert f"      {plan()[0].name}" in capsys.readouterr().out
    assert main(["study", *out, "--report"]) == 0
    assert "nothing to report" in capsys.readouterr().out
    assert not (tmp_path / "runs.jsonl").exists()


def test_an_interrupted_study_reports_its_finished_runs(
    cifar, tmp_path, monkeypatch, capsys
) -> None:
    def finished(once, runs, *_, **__):
        yield runs[0], once(runs[0], DATA)
        raise KeyboardInterrupt

    monkeypatch.setattr(work, "finished", finished)
    assert main(command(cifar, tmp_path)) == 130
    assert [line["run"] for line in lines(tmp_path)] == [plan()[0].name]
    printed = capsys.readouterr().out
    assert "stopped" in printed
    assert "DUEL on thumbnails" in printed


def test_the_study_refuses_wrong_arguments_and_missing_classes(
    tmp_path: Path, capsys, caplog
) -> None:
    assert main(["study", "--out", str(tmp_path), "--list", "--only", "x3"]) == 2
    assert "no run's name holds all of ['x3']" in caplog.text
    with pytest.raises(SystemExit) as ended:
        main(["study", "--out", str(tmp_path)])
    assert ended.value.code == 2
    assert "--data is missing" in capsys.readouterr().err
    only = LabelledImages(np.zeros((3, 32, 32, 3), np.uint8), np.arange(3))
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


def test_loaded_images_equal_the_written_images(cifar: Path) -> None:
    words = ["study", "--data", f"cifar:{cifar}"]
    parser = parser_of("study")
    source = sets.add_source(parser, words)
    images = load(parser.parse_args(words), source).train
    raw = np.fromfile(cifar / "data_batch_1.bin", np.uint8).reshape(-1, 3073)
    planes = images.image_NHWC.transpose(0, 3, 1, 2).reshape(len(images), -1)
    ours = np.concatenate([images.label_N[:, None], planes], axis=1)
    assert sorted(ours.tolist()) == sorted(raw.tolist())


@table("name", STREAMS)
def test_a_stream_is_reproducible_and_names_the_image_of_each_frame(name: str) -> None:
    draw = np.random.default_rng(0)
    images = LabelledImages(
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


def test_distinct_counts_different_images_by_their_ids() -> None:
    memory = WorkingMemory(10, 4, Oldest())
    image_B = torch.tensor([0, 3, 3, 3, 1, 0, 16, 0])
    memory.add(torch.arange(8) * STRIDE + image_B, torch.eye(4)[torch.arange(8) % 4])
    assert distinct(memory) == 4


def test_an_oracle_evicts_the_oldest_frame_of_the_most_frequent_image() -> None:
    memory = WorkingMemory(4, 2, ImageBalanced())
    image_B = torch.tensor([7, 8, 8, 9, 7, 6, 7, 7])
    admission = memory.add(torch.arange(8) * STRIDE + image_B, torch.eye(2)[[0] * 8])
    # Frames 1, 0 and 4 leave a newer frame of their image.
    # Frame 2 leaves as the oldest frame, when no image has two.
    assert (admission.evicted // STRIDE).tolist() == [1, 0, 2, 4]
    assert sorted((memory.ids % STRIDE).tolist()) == [6, 7, 7, 9]


def test_an_oracle_evicts_the_oldest_sample_of_the_most_frequent_class() -> None:
    for seed in range(15):
        rng = np.random.default_rng(seed)
        capacity, count = int(rng.integers(5, 20)), int(rng.integers(20, 120))
        labels = rng.choice([-1, 0, 1, 2], size=count, p=[0.2, 0.5, 0.2, 0.1]).tolist()
        z_ND = torch.eye(2)[torch.arange(count) % 2]
        samples = [
            naive.Sample(z_D, c, n) for n, (z_D, c) in enumerate(zip(z_ND, labels, strict=True))
        ]
        memory, gone = WorkingMemory(capacity, 2, ClassBalanced()), []
        for ids in torch.arange(count).split(9):
            gone += memory.add(ids, z_ND[ids], labels=torch.tensor(labels)[ids]).evicted.tolist()
        assert memory.ids.tolist() == naive.follow(naive.class_balanced, capacity, samples, gone)


def test_rows_pair_each_run_with_the_queue_of_its_seed(tmp_path: Path) -> None:
    results = Results(tmp_path / "runs.jsonl", {})
    for seed, base, other in ((0, 0.40, 0.45), (1, 0.50, 0.53), (2, None, 0.60)):
        for arm, value in ((BASE, base), (NOVEL, other)):
            if value is not None:
                numbers = dict.fromkeys(("entropy", "copies", "knn", "linear"), value)
                results.add(StudyRun("parked", arm, seed), numbers, {})
    results.add(StudyRun("shuffled", BASE, 1), {"knn": 0.5, "linear": 0.5}, {})
    found = report.found_in(Results(tmp_path / "runs.jsonl", {}).by_name())
    ceiling, best, base = found.results
    assert (best, base, ceiling[1]) == ((NOVEL.name, "parked"), (BASE.name, "parked"), "shuffled")
    assert found.seeds(best) == 3
    gain = report.pair(found, best, base, "knn")
    assert gain.values == pytest.approx((0.05, 0.03))
    deviation = report.deviations(tmp_path / "runs.jsonl")
    expected = pytest.approx(math.sqrt(2) / 100)
    assert deviation == dict.fromkeys(("knn", "linear"), (expected, 1))
    assert gain.difference(deviation["knn"]) == "+4.0 ± 1.0 (2)"
    gains = ["+4.0 ± 1.0 (2)"] * 2
    assert report.cells(found, best, deviation)[-4:] == [*gains, "106.0", "106.0"]
    assert report.cells(found, base, deviation)[-4:] == ["", "", "100.0", "100.0"]
    assert report.cells(found, ceiling, deviation)[-4:] == ["", "", "", ""]
    assert "| DUEL on thumbnails, near-duplicates dropped | 3 |" in report.text(found, deviation)
    assert Results(tmp_path / "runs.jsonl", {"steps": 1}).by_name() == {}


def test_a_spread_of_one_value_has_no_deviation() -> None:
    assert Spread((0.5,)).text() == "50.0"
    assert Spread(()).text() == ""
    assert Spread((0.4, 0.6)).text() == "50.0 ± 14.1"
