"""Tests of `stream-ssl evaluate` on small sets: its files, its output and its errors."""

from __future__ import annotations

import errno
import io
import json
import math
import re
import shutil
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from evaluation_run import write_run
from PIL import Image
from pyarrow import parquet
from safetensors.torch import load_file, save_file
from table import table

from stream_ssl.app import cli
from stream_ssl.app.commands import embed, evaluate
from stream_ssl.durable import MANIFEST, seal
from stream_ssl.evaluation import measures as measuring
from stream_ssl.trained import encoder

SMALL = ["--source.count", "400", "--source.size", "12", "--source.channels", "1", "--k", "5", "20"]
QUICK = [*SMALL, "--probes", "convex"]
DATA = ["--data", "synthetic"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluated") / "run"
    write_run(folder, stages=2)
    return folder


def found(out: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((out / "evaluation.json").read_text())
    return content


def test_evaluate_writes_and_prints_all_measures_and_replaces_only_its_own_files(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "report.md").write_text("my thesis")
    assert cli.main(["evaluate", str(run), *DATA, *SMALL, "--out", str(out)]) == 2
    assert (out / "report.md").read_text() == "my thesis"
    (out / "report.md").unlink()
    for _ in range(2):  # the second one replaces the first
        assert cli.main(["evaluate", str(run), *DATA, *SMALL, "--out", str(out)]) == 0
    told = capsys.readouterr().out
    names = ("kNN, k = 20", "linear probe, duel", "linear probe, debiased", "top-10 retrieval")
    names += ("intra-class cosine", "inter-class cosine", "alignment", "uniformity")
    for name in (*names, "RankMe", "trained", "untrained"):
        assert name in told
    assert "report.md" in told
    content = found(out)
    assert (content["step"], content["samples"]) == (20, 20)
    measures = content["encoders"]["trained"]
    assert set(measures["knn"]) == {"5", "20"}
    assert set(measures["linear"]) == {"duel", "debiased"}
    assert set(measures["retrieval"]) == {"1", "10"}
    assert measures["knn"]["5"]["accuracy"] > 0.15
    counted = np.array(measures["confusion"])
    assert (counted.sum(axis=1) == content["queries"] / 10).all()
    assert counted.trace() / counted.sum() == pytest.approx(measures["knn"]["20"]["accuracy"])
    page = (out / "report.md").read_text()
    for name in ("confusion.png", "map.png", "similarity.png"):
        assert name in page
        with Image.open(out / name) as image:
            assert min(image.size) > 300


def test_a_report_of_many_classes_has_no_confusion_matrix(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [str(run), *DATA, *QUICK, "--untrained", "false", "--out", str(tmp_path / "out")]
    for most, there in ((10, True), (9, False)):  # the second one replaces the first
        monkeypatch.setattr(measuring, "MOST_CONFUSED", most)
        assert cli.main(["evaluate", *arguments]) == 0
        assert (tmp_path / "out/confusion.png").exists() == there
        assert ("confusion.png" in (tmp_path / "out/report.md").read_text()) == there


def test_evaluate_gives_the_same_numbers_twice(run: Path, tmp_path: Path) -> None:
    for out in "ab":
        arguments = [str(run), *DATA, *QUICK, "--untrained", "false", "--out", str(tmp_path / out)]
        assert evaluate.main(arguments) == 0
    assert found(tmp_path / "a") == found(tmp_path / "b")
    assert set(found(tmp_path / "a")["encoders"]) == {"trained"}


def test_evaluate_compares_runs_with_different_limits_of_pixels(run: Path, tmp_path: Path) -> None:
    write_run(tmp_path / "other", decoder={"size": 12, "channels": 1, "max_pixels": 1_000_000})
    more = ["--untrained", "false", "--decorrelated", str(tmp_path / "other")]
    assert evaluate.main([str(run), *DATA, *QUICK, *more, "--out", str(tmp_path / "out")]) == 0
    assert set(found(tmp_path / "out")["encoders"]) == {"trained", "decorrelated"}


def test_one_network_under_two_names_has_the_same_measures(run: Path, tmp_path: Path) -> None:
    newest = sorted((run / "checkpoints").glob("step-*"))[-1]
    more = ["--untrained", "false", "--decorrelated", str(newest), "--batch", "64"]
    assert evaluate.main([str(run), *DATA, *QUICK, *more, "--out", str(tmp_path / "out")]) == 0
    measures = found(tmp_path / "out")["encoders"]
    assert measures["decorrelated"] == measures["trained"]
    assert measures["trained"]["alignment"] > 0


def npy(folder: Path, dim: int) -> list[str]:
    """Write 200 labelled vectors, and return the options that name them."""
    rows = np.random.default_rng(0).normal(size=(200, dim)).astype(np.float32)
    np.save(folder / "x.npy", rows)
    np.save(folder / "y.npy", np.arange(200) % 4)
    return ["--data", f"npy:{folder / 'x.npy'}", "--source.labels", str(folder / "y.npy")]


@table(
    "vectors",
    [{"dim": 8, "widths": [16]}, None, {"dim": 9, "widths": [16]}],
    ids=["images for a run on vectors", "vectors for a run on images", "another length"],
)
def test_evaluate_and_embed_reject_data_of_a_kind_that_the_run_does_not_read(
    vectors: dict[str, Any] | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_run(tmp_path / "run", **({} if vectors is None else {"vectors": vectors}))
    data = [*DATA, *SMALL[:-3]] if vectors and vectors["dim"] == 8 else npy(tmp_path, 8)
    assert evaluate.main([str(tmp_path / "run"), *data, "--out", str(tmp_path / "out")]) == 2
    due = f"vectors of {vectors['dim']} numbers (vectors.dim)" if vectors else "images"
    assert f"The run was configured for others: give {due}" in caplog.text
    caplog.clear()
    assert embed.main([str(tmp_path / "run"), *data, "--out", str(tmp_path / "f.npz")]) == 2
    assert f"The run was configured for others: give {due}" in caplog.text


def test_embed_leaves_out_a_vector_among_images(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "f.npz"
    with tarfile.open(tmp_path / "mixed.tar", "w") as tar:
        for number in range(40):
            image = Image.new("L", (12, 12), number)
            file = io.BytesIO()
            if number == 35:
                np.save(file, np.ones(4, np.float32))
            else:
                image.save(file, "PNG")
            info = tarfile.TarInfo(f"{number:03d}.{'npy' if number == 35 else 'png'}")
            info.size = file.tell()
            file.seek(0)
            tar.addfile(info, file)
    data = f"webdataset:{tmp_path / 'mixed.tar'}"
    assert embed.main([str(run), "--data", data, "--out", str(out)]) == 0
    with np.load(out) as found:
        assert len(found["ids"]) == 39


def test_images_that_cannot_be_decoded_are_counted_in_the_error(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(4):
        path = tmp_path / "in" / str(number % 2) / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"\x89PNG\r\n\x1a\nnothing")
    data = ["--data", f"images:{tmp_path / 'in'}"]
    assert evaluate.main([str(run), *data, "--out", str(tmp_path / "out")]) == 2
    assert "gave no references, and 0 samples of the other kind" in caplog.text
    assert "(4 of 4 samples were left out (damaged))" in caplog.text


def test_evaluate_refuses_to_compare_encoders_of_different_vectors(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A vector of each run has 32 bytes."""
    write_run(tmp_path / "run", vectors={"dim": 8, "widths": [16]})
    write_run(tmp_path / "other", vectors={"dim": 16, "dtype": "float16", "widths": [16]})
    data = npy(tmp_path, 8)
    more = ["--k", "5", "--out", str(tmp_path / "out"), "--decorrelated", str(tmp_path / "other")]
    assert evaluate.main([str(tmp_path / "run"), *data, *more]) == 2
    assert "was trained on vectors of 16 numbers as float16" in caplog.text
    assert "on vectors of 8 numbers as float32: compare checkpoints of the same" in caplog.text


def test_evaluate_reports_continual_measures_and_the_recovered_share(
    run: Path, tmp_path: Path
) -> None:
    first, second = sorted((run / "checkpoints").glob("step-*"))
    out = tmp_path / "out"
    more = ["--tasks", "2", "--stages", str(first), str(second), "--decorrelated", str(first)]
    assert evaluate.main([str(run), *DATA, *QUICK, *more, "--out", str(out)]) == 0
    content = found(out)
    told = content["continual"]
    assert told["tasks"] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    matrix = np.array(told["accuracy_TT"])
    knn = {name: part["knn"]["5"]["accuracy"] for name, part in content["encoders"].items()}
    assert matrix.mean(axis=1) == pytest.approx([knn["decorrelated"], knn["trained"]])
    assert np.mean(told["untrained_T"]) == pytest.approx(knn["untrained"])
    assert told["result"]["average_accuracy"] == pytest.approx(knn["trained"])
    assert told["result"]["forgetting"] == pytest.approx(matrix[0, 0] - matrix[1, 0])
    forward = matrix[0, 1] - told["untrained_T"][1]
    assert told["result"]["forward_transfer"] == pytest.approx(forward)
    recovered = content["recovered"]["kNN, k = 5"]
    assert recovered["share"] == pytest.approx(knn["trained"] / knn["decorrelated"])
    if knn["decorrelated"] > knn["untrained"]:
        gain = (knn["trained"] - knn["untrained"]) / (knn["decorrelated"] - knn["untrained"])
        assert recovered["gain"] == pytest.approx(gain)
    else:
        assert recovered["gain"] is None
    page = (out / "report.md").read_text()
    assert "forgetting" in page
    assert "Recovered share" in page
    assert (out / "continual.png").is_file()


def test_tasks_may_name_their_classes(run: Path, tmp_path: Path) -> None:
    stages = [str(path) for path in sorted((run / "checkpoints").glob("step-*"))]
    more = ["--tasks", "[[9,2],[4]]", "--stages", *stages, "--untrained", "false"]
    out = tmp_path / "out"
    assert evaluate.main([str(run), *DATA, *QUICK, *more, "--out", str(out)]) == 0
    told = found(out)["continual"]
    assert told["tasks"] == [[9, 2], [4]]
    by_class = found(out)["encoders"]["trained"]["knn"]["5"]["per_class"]
    expected = [(by_class["9"] + by_class["2"]) / 2, by_class["4"]]
    assert told["accuracy_TT"][-1] == pytest.approx(expected)
    assert told["result"]["forward_transfer"] is None
    assert evaluate.main([str(run), *DATA, *QUICK, "--out", str(out)]) == 0
    assert not (out / "continual.png").exists(), "it is of the earlier evaluation"


def write_images(folder: Path, classes: int, count: int) -> None:
    rng = np.random.default_rng(0)
    for label in range(classes):
        (folder / f"class-{label}").mkdir(parents=True)
        for number in range(count):
            pixels = np.full((20, 16, 3), 60 * label, np.uint8)
            pixels += rng.integers(0, 40, pixels.shape, np.uint8)
            Image.fromarray(pixels).save(folder / f"class-{label}" / f"{number}.png")


def test_a_folder_of_images_is_divided_and_damaged_files_are_left_out(
    run: Path, tmp_path: Path
) -> None:
    write_images(tmp_path / "images", 3, 20)
    (tmp_path / "images/class-1/3.png").write_bytes(b"\x89PNG\r\n\x1a\nnothing")
    (tmp_path / "images/class-2").rename(tmp_path / "images/$\\frac$|\udcff")
    (tmp_path / "images/class-0").rename(tmp_path / "images/<i>")
    out = tmp_path / "out"
    arguments = [str(run), "--data", f"images:{tmp_path / 'images'}", "--query_share", "0.5"]
    more = ["--k", "5", "--probes", "convex", "--of", "embeddings", "--untrained", "false"]
    assert evaluate.main([*arguments, *more, "--out", str(out)]) == 0
    content = found(out)
    assert 27 <= content["queries"] <= 30
    assert 29 <= content["references"] <= 30
    assert any("1 of 60 samples were left out (damaged)" in n for n in content["notes"])
    page = (out / "report.md").read_text()
    assert "\n| $\\frac$\\|? |" in page
    assert "\n| &lt;i&gt; |" in page


def test_evaluate_warns_of_a_class_that_is_too_small_for_queries(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_images(tmp_path / "one", 3, 10)
    for number in range(2, 10):
        (tmp_path / "one" / "class-1" / f"{number}.png").unlink()
    more = ["--k", "5", "--probes", "convex", "--untrained", "false"]
    data = ["--data", f"images:{tmp_path / 'one'}", "--out", str(tmp_path / "out")]
    assert evaluate.main([str(run), *data, *more]) == 0
    assert "Classes with references and without queries: class-1. No accuracy" in caplog.text
    page = (tmp_path / "out/report.md").read_text()
    assert "18 references of 3 classes, and 4 queries" in page
    for path in sorted((tmp_path / "one").rglob("*.png")):
        if int(path.stem) > 3:
            path.unlink()
    assert evaluate.main([str(run), *data, *more]) == 2
    assert "gave no queries, and 10 samples of the other kind: both are needed" in caplog.text


def test_references_may_be_another_set(run: Path, tmp_path: Path) -> None:
    write_images(tmp_path / "one", 2, 12)
    write_images(tmp_path / "two", 2, 9)
    arguments = [str(run), "--data", f"images:{tmp_path / 'one'}"]
    more = ["--references", f"images:{tmp_path / 'two'}", "--k", "5", "--probes", "convex"]
    assert evaluate.main([*arguments, *more, "--out", str(tmp_path / "out")]) == 0
    content = found(tmp_path / "out")
    assert (content["queries"], content["references"]) == (24, 18)


def test_evaluate_warns_of_queries_with_the_pixels_of_a_reference(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_images(tmp_path / "one", 2, 12)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    for path in sorted((tmp_path / "two").rglob("*.png"))[:20]:
        with Image.open(path) as image:
            image.rotate(180).save(path)
    one, two = (f"images:{tmp_path / name}" for name in ("one", "two"))
    more = ["--references", two, "--k", "5", "--probes", "convex"]
    assert evaluate.main([str(run), "--data", one, *more, "--out", str(tmp_path / "out")]) == 0
    note = "Queries with the same pixels as a reference: 4 of 24. So the accuracies are too high"
    assert note in caplog.text
    assert f"> {note}: give two sets without" in (tmp_path / "out/report.md").read_text()


def test_evaluate_rejects_train_and_test_folders_as_classes(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_images(tmp_path / "set/train", 3, 8)
    write_images(tmp_path / "set/Test", 2, 8)
    data = ["--data", f"images:{tmp_path}/set"]
    assert evaluate.main([str(run), *data, "--out", str(tmp_path / "out")]) == 2
    assert_told(caplog, "contains Test, train, and .* --data images:.*/Test --references .*/train")
    write_images(tmp_path / "other/train", 2, 8)
    write_images(tmp_path / "other/val", 2, 8)
    other = ["--data", f"images:{tmp_path}/other"]
    assert evaluate.main([str(run), *other, "--out", str(tmp_path / "out")]) == 2
    assert_told(caplog, "contains train, val, and .* --data images:.*/val --references .*/train")
    data = ["--data", f"images:{tmp_path}/set/Test", "--references", f"images:{tmp_path}/set/train"]
    assert evaluate.main([str(run), *data, "--out", str(tmp_path / "out")]) == 2
    assert_told(caplog, "class 2 is 'class-2' in the references and none in the queries")
    assert not (tmp_path / "out").exists()


def test_evaluate_rejects_sets_whose_classes_have_different_orders(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name, classes in (("one", ["cat", "dog"]), ("two", ["dog", "cat"])):
        facts = json.dumps({"info": {"features": {"label": {"names": classes}}}})
        rows = pa.table({"image": [b""], "label": [0]})
        path = tmp_path / f"{name}.parquet"
        parquet.write_table(rows.replace_schema_metadata({"huggingface": facts}), path)
    data = ["--data", f"parquet:{tmp_path}/one.parquet"]
    data += ["--references", f"parquet:{tmp_path}/two.parquet"]
    assert evaluate.main([str(run), *data, "--out", str(tmp_path / "out")]) == 2
    assert_told(caplog, "class 0 is 'dog' in the references and 'cat' in the queries")


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--k", "400"], 2, "references are fewer than k = 400.*--k"),
        (["--k", "0"], 2, "--k 0: must be at least 1"),
        (["--source.classes", "1"], 2, "all queries are of class 0.*at least two"),
        (["--probes", "best"], 2, "--probes best: choose from duel, debiased, convex"),
        (["--tasks", "2"], 2, "--stages and --tasks must be given together"),
        (["--tasks", "3", "--stages", "x", "y"], 2, "one checkpoint for each task"),
        (
            ["--tasks", "[[1,2],[2]]", "--stages", "RUN", "RUN"],
            2,
            "each class may be in only one task",
        ),
        (["--tasks", "[[1],[12]]", "--stages", "RUN", "RUN"], 2, "which no query has: choose from"),
        (["--tasks", "11", "--stages", *["RUN"] * 11], 2, "give 1 to 10 tasks"),
        (["--query_share", "2"], 2, "query_share 2.0"),
        (["--query_share", "1"], 2, "gave no references"),
        (["--references_per_class", "0"], 2, "at least 1"),
        (["--queries_per_class", "1"], 2, "at least two of each"),
        (["--device", "cuda:99"], 2, "try --device cpu"),
        (["--batch", "1"], 2, "--batch 1"),
        (["--decorrelated", "nowhere"], 1, "no checkpoint at nowhere"),
        (["--references", "images:nowhere"], 1, "no folder nowhere: create it, or give"),
        (["--out", "/dev/null/report"], 2, "/dev/null is a file; choose another folder"),
    ],
    ids=lambda value: "-".join(value[:2]).strip("-") if isinstance(value, list) else None,
)
def test_evaluate_rejects_wrong_options_and_names_the_remedy(
    run: Path,
    tmp_path: Path,
    arguments: list[str],
    status: int,
    message: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    out = ["--out", str(tmp_path / "out")]
    named = [str(run) if argument == "RUN" else argument for argument in arguments]
    assert evaluate.main([str(run), *DATA, *QUICK, *out, *named]) == status
    assert_told(caplog, message)
    assert not (tmp_path / "out").exists()


def assert_told(caplog: pytest.LogCaptureFixture, message: str) -> None:
    assert re.search(message, caplog.text, re.DOTALL), caplog.text


def test_evaluate_rejects_missing_and_damaged_checkpoints(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert evaluate.main([str(tmp_path / "nowhere"), *DATA, *QUICK]) == 1
    assert_told(caplog, "no checkpoint at .*nowhere: it is not a folder.*its first checkpoint")
    copy = tmp_path / "copy"
    shutil.copytree(next((run / "checkpoints").glob("step-*")), copy)
    with (copy / "model.safetensors").open("ab") as file:
        file.write(b"more")
    assert evaluate.main([str(copy), *DATA, *QUICK]) == 2
    assert_told(caplog, "is damaged .*give an earlier checkpoint")


def test_the_error_about_an_encoder_with_nan_has_no_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (checkpoint,) = write_run(tmp_path / "run")
    weights = load_file(checkpoint / "model.safetensors")
    weights["encoder.conv1.weight"][:] = math.nan
    save_file(weights, checkpoint / "model.safetensors")
    (checkpoint / MANIFEST).unlink()
    seal(checkpoint)
    arguments = [str(tmp_path / "run"), *DATA, *QUICK, "--out", str(tmp_path / "out")]
    assert evaluate.main(arguments) == 2
    assert_told(caplog, "encoder.conv1.weight are not finite, .* give an earlier checkpoint")
    assert "Traceback" not in caplog.text


def test_evaluate_takes_the_next_checkpoint_if_the_learner_removes_the_newest(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(run, tmp_path / "run", symlinks=True)
    first, second = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))
    hidden, load = second.rename(second.with_name("next")), encoder.load_encoder
    (first.parent / "latest").unlink()

    def learner_goes_on(*arguments: Any) -> encoder.Encoder:
        if first.exists():
            hidden.rename(second)
            shutil.rmtree(first)
        return load(*arguments)

    monkeypatch.setattr(encoder, "load_encoder", learner_goes_on)
    out = tmp_path / "out"
    assert evaluate.main([str(tmp_path / "run"), *DATA, *QUICK, "--out", str(out)]) == 0
    assert found(out)["step"] == 20


def test_evaluate_rejects_a_missing_set_before_it_loads_the_network(
    run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loaded: list[Any] = []
    monkeypatch.setattr(encoder, "load_encoder", lambda *arguments: loaded.append(arguments))
    assert evaluate.main([str(run), "--data", "cifar:missing"]) == 1
    assert_told(caplog, "no folder missing: create it, or give another")
    assert loaded == []


def test_evaluate_rejects_unlabelled_and_endless_sets(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    images = tmp_path / "some-images-idx3-ubyte"
    images.write_bytes(bytes([0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 9, 0, 0, 0, 9]) + bytes(2 * 81))
    arguments = [str(run), "--data", "idx", "--source.images", str(images)]
    assert evaluate.main([*arguments, "--k", "5"]) == 2
    assert_told(caplog, "none of its first 2 samples carries a label.*give a labelled source")
    assert evaluate.main([str(tmp_path / "nowhere"), *DATA]) == 2  # told before the run is read
    assert_told(caplog, "--source.count 2000")


def test_evaluate_notes_how_many_images_had_another_size(run: Path, tmp_path: Path) -> None:
    other = ["--source.count", "400", "--source.size", "9", "--k", "5", "--probes", "convex"]
    out = tmp_path / "out"
    assert evaluate.main([str(run), *DATA, *other, "--out", str(out)]) == 0
    assert "400 of 400 raw images had another size" in found(out)["notes"][0]


def test_evaluate_works_when_the_held_out_set_of_the_run_is_gone(tmp_path: Path) -> None:
    write_images(tmp_path / "held", 2, 4)
    init = {"root": str(tmp_path / "held")}
    source = {"class_path": "stream_ssl.producers.sources.ImageFolder", "init_args": init}
    write_run(tmp_path / "run", observe={"held_out": {"source": source}})
    shutil.rmtree(tmp_path / "held")
    arguments = [str(tmp_path / "run"), *DATA, *QUICK, "--untrained", "false"]
    assert evaluate.main([*arguments, "--out", str(tmp_path / "out")]) == 0


@table(
    ("arguments", "message"),
    [
        ([], "data"),
        (["run"], "data"),
        (["run", "--data", "lmdb:x"], "must begin with one of camera, cifar, crawl"),
        (["run", "--data", "watch:x"], "must begin with one of camera, cifar, crawl"),
        (["run", "--data", "synthetic:x"], "use --data synthetic --source.count"),
        (["run", "--data", "cifar"], "root"),
    ],
    ids=["nothing", "no-data", "unknown", "endless", "a-place", "no-place"],
)
def test_evaluate_rejects_wrong_and_missing_arguments(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        evaluate.main(arguments)
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_the_help_lists_the_options_of_the_source(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        evaluate.main(["--data", "cifar:x", "--help"])
    assert not end.value.code
    told = capsys.readouterr().out
    assert "--source.labels" in told
    assert "--source.epochs" not in told
    assert "stream-ssl evaluate runs/laptop" in told


def test_evaluate_prints_the_measures_when_the_disk_is_full(
    run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("stream_ssl.evaluation.plots.map_plot", full)
    out = tmp_path / "out"
    assert evaluate.main([str(run), *DATA, *QUICK, "--untrained", "false", "--out", str(out)]) == 1
    assert "RankMe" in capsys.readouterr().out
    assert f"--out {out} cannot be written, because its disk is full" in caplog.text
