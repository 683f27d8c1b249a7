"""The exports of a run: its encoder, its memory, and features of other images."""

from __future__ import annotations

import errno
import io
import json
import math
import re
import shutil
import sys
import tarfile
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from evaluation_run import write_run
from pictures_of_a_run import images
from PIL import Image
from safetensors.torch import load_file, save_file
from table import table

import stream_ssl
from stream_ssl.app import cli
from stream_ssl.app.commands import embed, export
from stream_ssl.config import build
from stream_ssl.durable import seal
from stream_ssl.memory import index
from stream_ssl.originals import Originals
from stream_ssl.process.failures import Failure
from stream_ssl.producers.sources import Synthetic, WebDataset
from stream_ssl.trained import encoder as encoders
from stream_ssl.trained import export as exporting

METHODS = {
    "moco": {"class_path": "stream_ssl.methods.MoCo"},
    "average": {
        "class_path": "stream_ssl.methods.MoCo",
        "init_args": {"key_statistics": "average"},
    },
    "simclr": {"class_path": "stream_ssl.methods.SimCLR"},
}
MADE = ["encoder.json", "encoder.safetensors", "manifest.json"]


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# -- The encoder


@pytest.mark.parametrize(
    ("method", "of"),
    [
        ("moco", "features"),
        ("average", "embeddings"),
        ("simclr", "features"),
        ("moco", "embeddings"),
    ],
)
def test_run_checkpoint_and_export_give_the_output_of_the_method(
    tmp_path: Path, method: str, of: str
) -> None:
    (checkpoint,) = write_run(tmp_path / "run", method=METHODS[method])
    place = tmp_path / "encoder"
    arguments = [str(tmp_path / "run"), "--encoder", str(place), "--no-onnx", "--of", of]
    assert export.main(arguments) == 0
    settings = encoders.stored_settings(
        json.loads((checkpoint / "state.json").read_text())["config"]
    )
    network = build.method(settings)
    network.load_state_dict(load_file(checkpoint / "model.safetensors"))
    encode = network.eval().features if of == "features" else network.encode_keys
    expected_BF = encode(build.views(settings).plain(images()))
    for found in (tmp_path / "run", checkpoint, place):
        encoder = stream_ssl.load_encoder(found, of)  # type: ignore[arg-type]
        assert torch.equal(encoder(images()), expected_BF)
        assert (encoder.of, encoder.dim) == (of, expected_BF.shape[1])
        assert (encoder.size, encoder.channels) == (12, 1)
        assert not encoder.training
        assert not encoder(images()).requires_grad
    torch.manual_seed(0)
    view_BF = stream_ssl.load_encoder(place).view(images())
    torch.manual_seed(0)
    assert torch.equal(view_BF, stream_ssl.load_encoder(checkpoint, of).view(images()))  # type: ignore[arg-type]


def test_the_onnx_model_gives_the_features_of_the_encoder(run: Path, exported: Path) -> None:
    import onnxruntime

    session = onnxruntime.InferenceSession(exported / "encoder.onnx")
    encoder = stream_ssl.load_encoder(run)
    for count in (1, 2, 9, 40):
        (found_BF,) = session.run(None, {"images": images(count).numpy()})
        expected_BF = encoder(images(count)).numpy()
        assert found_BF.dtype == np.float32
        assert np.abs(found_BF - expected_BF).max() <= 1e-4 * np.abs(expected_BF).max()


def test_write_onnx_accepts_an_encoder_of_zeros_and_returns_nan_for_nan_weights(
    run: Path, tmp_path: Path
) -> None:
    encoder = stream_ssl.load_encoder(run)
    with torch.no_grad():
        for weight in encoder.parameters():
            weight.zero_()
    file = tmp_path / "caf\udce9" / "encoder.onnx"  # a folder whose name is not UTF-8
    file.parent.mkdir()
    assert exporting.write_onnx(encoder, file) == 0.0
    with torch.no_grad():
        next(iter(encoder.parameters())).fill_(torch.nan)
    assert math.isnan(exporting.write_onnx(encoder, file))


def test_the_error_about_an_encoder_that_torch_cannot_export_names_the_remedy(
    run: Path, tmp_path: Path
) -> None:
    encoder = stream_ssl.load_encoder(run)
    forward = encoder.forward
    encoder.forward = lambda x: forward(x) if int(x.sum()) > 9 else forward(x) + 1  # type: ignore[method-assign]
    with pytest.raises(Failure, match=r"torch \S+ cannot write this encoder as ONNX \(.*--no-onnx"):
        exporting.write_onnx(encoder, tmp_path / "encoder.onnx")


def test_an_encoder_of_images_rejects_other_inputs(run: Path) -> None:
    encoder = stream_ssl.load_encoder(run)
    for wrong in (images().numpy(), images()[0], images().permute(0, 2, 3, 1), "photo.png"):
        with pytest.raises(ValueError, match=r"a uint8 tensor \[B, 1, H, W\], such as torch.stack"):
            encoder(wrong)
    with pytest.raises(ValueError, match=r"torch.float32: views start from uint8"):
        encoder(images() / 255)


def test_an_encoder_of_vectors_rejects_other_inputs(tmp_path: Path) -> None:
    write_run(tmp_path / "run", vectors={"dim": 8, "widths": [16]})
    encoder = stream_ssl.load_encoder(tmp_path / "run")
    rows_BD = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    bytes_BCHW = torch.stack([encoder.preprocess(row_D.numpy()) for row_D in rows_BD])
    assert torch.equal(encoder(rows_BD), encoder(bytes_BCHW))
    due = r"vectors are a .*: must be a float tensor \[B, 8\], such as .*preprocess\(vector\)"
    for wrong in (rows_BD.numpy(), rows_BD[:, :7], rows_BD[0], rows_BD.long(), "x.npy"):
        with pytest.raises(ValueError, match=due):
            encoder(wrong)


def test_an_export_describes_its_step_its_output_and_its_normalisation(
    run: Path, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sorted(content(exported)) == sorted([*MADE, "encoder.onnx"])
    told = json.loads((exported / "encoder.json").read_text())
    assert (told["step"], told["samples"], told["of"], told["dim"]) == (20, 20, "features", 8)
    assert told["normalisation"] == {"mean": [0.5], "std": [0.25]}
    assert told["decoder"]["size"] == 12
    assert told["version"] == stream_ssl.__version__
    place = tmp_path / "of" / "embeddings"
    assert export.main([str(run), "--encoder", str(place), "--of", "embeddings"]) == 0
    assert "(1e-04 is allowed)" in capsys.readouterr().out
    with pytest.raises(ValueError, match="exported with --of embeddings: export the run with --of"):
        stream_ssl.load_encoder(place, of="features")


def test_export_warns_of_an_encoder_from_before_the_first_update(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A trained encoder causes no warning."""
    (checkpoint,) = write_run(tmp_path / "run")
    stored = json.loads((checkpoint / "state.json").read_text())
    place = ["--encoder", str(tmp_path / "encoder"), "--no-onnx"]
    for updated, warnings in ((0, 1), (10, 0)):
        caplog.clear()
        (checkpoint / "state.json").write_text(json.dumps(stored | {"updated": updated}))
        (checkpoint / "manifest.json").unlink()
        seal(checkpoint)
        assert export.main([str(checkpoint), *place]) == 0
        assert caplog.text.count("of step 10 was written before the first update") == warnings
        assert caplog.text.count("Take a later checkpoint") == warnings


def test_exporting_again_replaces_the_files_of_the_earlier_export(
    run: Path, exported: Path, tmp_path: Path
) -> None:
    arguments = [str(run), "--encoder", str(tmp_path / "e"), "--memory", str(tmp_path / "m")]
    shutil.copytree(exported, tmp_path / "e")
    assert export.main([str(run), "--memory", str(tmp_path / "m")]) == 0
    first = [content(tmp_path / name) for name in "em"]
    assert export.main([*arguments, "--no-onnx"]) == 0
    second = [content(tmp_path / name) for name in "em"]
    assert second[1] == first[1]
    assert sorted(second[0]) == MADE
    assert second[0]["encoder.safetensors"] == first[0]["encoder.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["e", "m"]


def test_the_new_export_is_in_place_while_the_old_one_is_removed(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A memory of many shards takes long to remove. A kill meanwhile must leave an export."""
    place, remove, there = tmp_path / "memory", shutil.rmtree, []
    assert export.main([str(run), "--memory", str(place)]) == 0

    def watched(folder: Path, **options: Any) -> None:
        there.append((place / "memory.json").is_file())
        remove(folder, **options)

    monkeypatch.setattr(shutil, "rmtree", watched)
    assert export.main([str(run), "--memory", str(place)]) == 0
    assert there
    assert all(there)
    assert [path.name for path in tmp_path.iterdir()] == ["memory"]


def test_onnx_that_differs_is_an_error_and_replaces_nothing(
    run: Path,
    exported: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = content(exported)
    monkeypatch.setattr(exporting, "ONNX_TOLERANCE", 0.0)
    assert export.main([str(run), "--encoder", str(exported)]) == 1
    assert "the ONNX model differs from torch by" in caplog.text
    assert "--no-onnx" in caplog.text
    assert content(exported) == before


def test_an_encoder_is_loaded_although_the_weights_of_the_descriptor_are_gone(
    tmp_path: Path,
) -> None:
    """The encoder needs neither the memory nor the weights of the memory's descriptor."""
    weights = tmp_path / "weights.safetensors"
    encoder = {"class_path": "torch.nn.Flatten"}
    save_file({}, weights)
    init = {"encoder": encoder, "weights": str(weights)}
    descriptor = {"class_path": "stream_ssl.memory.descriptors.Frozen", "init_args": init}
    write_run(tmp_path / "run", memory={"capacity": 16, "descriptor": descriptor})
    weights.unlink()
    assert stream_ssl.load_encoder(tmp_path / "run").dim == 8


# -- The memory


def read_shards(folder: Path) -> tuple[list[dict[str, Any]], np.ndarray]:
    rows, pixels = [], []
    for shard in sorted(folder.glob("*.tar")):
        with tarfile.open(shard) as tar:
            for member in tar:
                file = tar.extractfile(member)
                assert file is not None
                if member.name.endswith(".json"):
                    rows.append(json.load(file))
                elif member.name.endswith(".png"):
                    assert member.name == f"{len(pixels):09d}.png"
                    pixels.append(np.asarray(Image.open(io.BytesIO(file.read()))))
    return rows, np.stack(pixels)


def test_the_exported_memory_equals_the_memory_of_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    memory = {"capacity": 16, "descriptor": "Thumbnail", "eviction": "most-duplicated"}
    write_run(run, held=40, memory=memory)
    monkeypatch.setattr(exporting, "SHARD", 7)
    assert export.main([str(run), "--memory", str(tmp_path / "memory")]) == 0
    folder = tmp_path / "memory"
    state = load_file(run / "checkpoints" / "latest" / "memory.safetensors")
    rows, image_KHW = read_shards(folder)
    assert len(list(folder.glob("*.tar"))) == 3
    assert len(rows) == 16 == json.loads((folder / "memory.json").read_text())["count"]
    named = {"id": "ids", "hash": "hashes", "label": "labels"}
    named |= {name: name for name in ("born", "encoded", "multiplicity")} | {"drawn": "draws"}
    for name, column in named.items():
        assert [row[name] for row in rows] == state[f"columns.{column}"].tolist()
    for row in rows:
        n = row["id"] - 2**62
        known = {"producer": "robot", "source": "left", "id": f"frame-{n}", "time": n / 4}
        assert row["origin"] == (known if n % 2 else None)
    assert {row["origin"] is None for row in rows} == {True, False}
    with tarfile.open(folder / "memory-000001.tar") as tar:
        times = {int(info.name[:9]): info.mtime for info in tar}
    assert times == {k: int((rows[k]["origin"] or {}).get("time", 0)) for k in range(7, 14)}
    assert any(times.values())
    assert np.array_equal(image_KHW, state["columns.images"][:, 0].numpy())
    assert np.array_equal(np.load(folder / "embeddings.npy"), state["columns.embeddings"].numpy())
    descriptor_KA = np.load(folder / "descriptors.npy")
    assert np.array_equal(descriptor_KA, state["columns.descriptors"].numpy())
    alike_KK = (1 + descriptor_KA.astype(float) @ descriptor_KA.T) / 2
    expected_K = alike_KK.sum(1) - alike_KK.diagonal()
    assert [row["duplicates"] for row in rows] == pytest.approx(expected_K.tolist(), rel=1e-5)
    source = WebDataset(str(folder / "memory-*.tar"))
    labels = [-1 if sample.label is None else sample.label for sample, _ in source.samples()]
    assert labels == state["columns.labels"].tolist()
    assert {-1, 0, 2} <= set(labels)


def test_the_index_finds_each_row(run: Path, tmp_path: Path) -> None:
    faiss = pytest.importorskip("faiss")
    assert export.main([str(run), "--memory", str(tmp_path / "memory")]) == 0
    embedding_KD = np.load(tmp_path / "memory" / "embeddings.npy")
    cosine, row = faiss.read_index(str(tmp_path / "memory" / "index.faiss")).search(embedding_KD, 1)
    assert row[:, 0].tolist() == list(range(16))
    assert cosine[:, 0] == pytest.approx(np.ones(16), rel=1e-5)


def test_without_faiss_there_is_no_index(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(index, "HAVE_FAISS", False)
    assert export.main([str(run), "--memory", str(tmp_path / "memory")]) == 0
    assert not (tmp_path / "memory" / "index.faiss").exists()
    assert "no index.faiss was written, because faiss is not installed" in capsys.readouterr().out


def test_an_empty_memory_is_written_with_a_warning(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "run")
    assert export.main([str(tmp_path / "run"), "--memory", str(tmp_path / "memory")]) == 0
    assert np.load(tmp_path / "memory" / "embeddings.npy").shape == (0, 6)
    assert "Export again after the run's next checkpoint" in capsys.readouterr().err
    assert export.main([str(run), "--memory", str(tmp_path / "memory")]) == 0
    assert "warning" not in capsys.readouterr().err


# -- Features of other images


def test_embed_writes_the_output_of_the_encoder(
    run: Path, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--data", "synthetic", "--source.count", "70", "--source.size", "9"]
    for place, of in ((run, "features"), (exported, "features"), (run, "embeddings")):
        out = tmp_path / "new" / "features.npz"
        arguments = [str(place), *options, "--out", str(out), "--of", of, "--batch", "16"]
        assert embed.main(arguments) == 0
        assert f"70 images, {8 if of == 'features' else 6} {of} each" in capsys.readouterr().out
        with np.load(out) as found:
            encoder = stream_ssl.load_encoder(run, of)  # type: ignore[arg-type]
            samples = [sample for sample, _ in Synthetic(count=70, size=9).samples()]
            pixels = [np.frombuffer(s.data, np.uint8).reshape(9, 9, 3) for s in samples]
            image_NCHW = torch.stack([encoder.preprocess(image) for image in pixels])
            # As the reader divides them: in 16, the rest in halves.
            parts = torch.split(image_NCHW, [16, 16, 16, 11, 11])
            expected_NF = torch.cat([encoder(part) for part in parts])
            assert found["features"].dtype == np.float32
            assert np.array_equal(found["features"], expected_NF.numpy())
            assert found["ids"].tolist() == [sample.id for sample in samples]
            assert found["labels"].tolist() == [sample.label for sample in samples]


def test_embed_leaves_out_damaged_images(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "class").mkdir()
    for number in range(3):
        Image.new("L", (9, 9), 60 * number).save(tmp_path / "class" / f"{number}.png")
    (tmp_path / "class" / "1.png").write_bytes(b"\x89PNG\r\n\x1a\nnothing")
    out = tmp_path / "features.npz"
    assert embed.main([str(run), "--data", f"images:{tmp_path}", "--out", str(out)]) == 0
    with np.load(out) as found:
        assert found["labels"].tolist() == [0, 0]
        paths = [name.partition("#")[0] for name in found["ids"].tolist()]
        assert paths == ["class/0.png", "class/2.png"]
    assert "1 of 3 samples were left out (damaged)" in capsys.readouterr().out


def test_an_exported_memory_can_be_embedded_with_and_without_labels(
    run: Path, tmp_path: Path
) -> None:
    assert export.main([str(run), "--memory", str(tmp_path / "memory")]) == 0
    out = tmp_path / "features.npz"
    data = f"webdataset:{tmp_path}/memory/memory-*.tar"
    assert embed.main([str(run), "--data", data, "--out", str(out)]) == 0
    state = load_file(run / "checkpoints" / "latest" / "memory.safetensors")
    with np.load(out) as found:
        expected_NF = stream_ssl.load_encoder(run)(state["columns.images"])
        assert np.array_equal(found["features"], expected_NF.numpy())
        assert found["labels"].tolist() == state["columns.labels"].tolist()


# -- What cannot work


@table(
    ("arguments", "status", "message"),
    [
        ([], 2, "nothing to export: give --encoder DIR, --memory DIR, --hub DIR, or several"),
        (["--memory", ""], 2, "--memory is empty: give a folder or an address, or leave it out"),
        (
            ["--encoder", "HERE/x", "--memory", "HERE/y/../x"],
            2,
            "--memory .*x is the same place as --encoder .*x, .*: give two separate folders",
        ),
        (
            ["--encoder", "HERE/x/in", "--memory", "HERE/x"],
            2,
            "--encoder .*in lies in --memory .*x, .*: give two separate folders",
        ),
        (["--encoder", "file://HERE/x/", "--memory", "HERE/x"], 2, "give two separate folders"),
        (["--encoder", "HERE/other/new/.."], 2, "contains mine.txt, which no export has written"),
        (["--encoder", "memory://x"], 2, "memory://x would end with this process"),
        (["--encoder", "HERE/other"], 2, "contains mine.txt, which no export has written"),
        (["--memory", "ENCODER"], 2, "contains encoder.json, which no export has written"),
        (["--encoder", "RUN/checkpoints/latest"], 2, "contains .*, which no export has written"),
        (["--encoder", "HERE/other/mine.txt"], 2, "mine.txt is a file; choose an empty or a new"),
        (["--memory", "/proc"], 2, "--memory /proc is a mount point, .*: give a folder in it"),
    ],
    ids=[
        "nothing",
        "empty",
        "both-one",
        "nested",
        "aliases",
        "through-new",
        "in-memory",
        "others",
        "another-export",
        "checkpoint",
        "a-file",
        "mount-point",
    ],
)
def test_a_folder_that_holds_something_else_is_refused(
    run: Path,
    exported: Path,
    tmp_path: Path,
    arguments: list[str],
    status: int,
    message: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").write_text("mine")
    places = {"HERE": tmp_path, "ENCODER": exported, "RUN": run}
    for name, place in places.items():
        arguments = [argument.replace(name, str(place)) for argument in arguments]
    assert export.main([str(run), *arguments]) == status
    assert re.search(message, caplog.text), caplog.text
    assert (tmp_path / "other" / "mine.txt").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


@table("manifest", ["{}", '{"files": []}', '{"files": {"a": 1}}', "[]", "no JSON"])
def test_a_folder_with_a_manifest_of_another_program_is_refused(
    run: Path, tmp_path: Path, manifest: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "manifest.json").write_text(manifest)
    (tmp_path / "encoder.json").touch()
    assert export.main([str(run), "--encoder", str(tmp_path), "--no-onnx"]) == 2
    assert "contains encoder.json, which no export has written" in caplog.text


def test_export_of_onnx_without_its_extra_is_refused_before_a_file_is_written(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    arguments = [str(run), "--encoder", str(tmp_path / "encoder")]
    assert export.main(arguments) == 2
    assert "onnxruntime is not installed" in caplog.text
    assert "pip install 'stream-ssl[export]'; or use --no-onnx" in caplog.text
    assert not list(tmp_path.iterdir())
    assert export.main([*arguments, "--no-onnx"]) == 0


def test_originals_are_exported_one_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file may have 256 MiB, and a shard a thousand of them."""

    def read(_: Originals, name: str) -> bytes:
        if name == "gone":
            raise FileNotFoundError(name)
        return b"\xff\xd8" + bytes(1 << 20)

    monkeypatch.setattr(Originals, "read", read)
    originals = Originals(tmp_path, create=False)
    names = [None, *["here"] * 8, "gone", *["here"] * 8]
    rows = [{"label": -1, "origin": name and {"original": name}} for name in names]
    tracemalloc.start()
    try:
        assert exporting._add_originals(tmp_path / "some.tar", originals, rows, 7) == 16
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    with tarfile.open(tmp_path / "some.tar") as tar:
        assert tar.getnames()[::2] == [f"{n + 7:09d}.jpg" for n in (*range(1, 9), *range(10, 18))]
    assert exporting._add_originals(tmp_path / "none.tar", originals, rows[:1], 0) == 0
    assert not (tmp_path / "none.tar").exists()


def test_load_encoder_falls_back_from_a_damaged_checkpoint_to_the_one_before(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(run, tmp_path / "run", symlinks=True)
    first, second = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))
    before = stream_ssl.load_encoder(first)(images())
    with (second / "model.safetensors").open("ab") as file:
        file.write(b"more")
    assert torch.equal(stream_ssl.load_encoder(tmp_path / "run")(images()), before)
    assert "step-000000020 is damaged" in caplog.text
    (second / "state.json").unlink()
    assert torch.equal(stream_ssl.load_encoder(tmp_path / "run")(images()), before)
    with (first / "memory.safetensors").open("ab") as file:
        file.write(b"more")
    place = ["--encoder", str(tmp_path / "e"), "--memory", str(tmp_path / "m")]
    assert export.main([str(tmp_path / "run"), *place]) == 2
    told = caplog.messages[-1]
    assert f"{second} is damaged (model.safetensors has " in told
    assert f"no other checkpoint at {tmp_path / 'run'} is whole: restore one" in told
    assert not (tmp_path / "e").exists()


@pytest.mark.parametrize("meanwhile", ["model_of", "checkpoint_damage"])
def test_load_encoder_takes_the_next_checkpoint_if_the_learner_removes_the_newest(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, meanwhile: str
) -> None:
    """With checkpoints.keep at 1 the newest is gone as soon as there is another."""
    shutil.copytree(run, tmp_path / "run", symlinks=True)
    folder, done = tmp_path / "run" / "checkpoints", getattr(encoders, meanwhile)
    first, second = sorted(folder.glob("step-*"))

    def point_at(checkpoint: Path) -> None:
        (folder / "latest").unlink()
        (folder / "latest").symlink_to(checkpoint.name)

    second.rename(folder / "next")
    point_at(first)

    def learner_goes_on(*arguments: Any) -> Any:
        if first.exists():
            (folder / "next").rename(second)
            point_at(second)
            shutil.rmtree(first)
        return done(*arguments)

    monkeypatch.setattr(encoders, meanwhile, learner_goes_on)
    assert torch.equal(
        stream_ssl.load_encoder(tmp_path / "run")(images()), stream_ssl.load_encoder(run)(images())
    )


@table(
    ("arguments", "status", "message"),
    [
        (["--batch", "0"], 2, "--batch 0: must be at least 1"),
        (["--out", "/"], 2, "--out / is a folder: name a file"),
        (["--out", "f.csv"], 2, "--out f.csv: must end in .npz"),
        (["--out", "/dev/null/x/f.npz"], 2, "/dev/null is a file; choose another"),
        (["--device", "cuda:99"], 2, "try --device cpu"),
    ],
)
def test_embed_rejects_wrong_options(
    run: Path, arguments: list[str], status: int, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    options = ["--data", "synthetic", "--source.count", "20"]
    assert embed.main([str(run), *options, *arguments]) == status
    assert message in caplog.text


# -- The page


def test_the_commands_and_snippets_of_the_page_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The commands run first, then the snippets one after the other."""
    page = (Path(__file__).parents[2] / "docs" / "encoder.md").read_text()
    write_run(tmp_path / "runs" / "laptop", held=40)
    for name, shade in (("cats", 60), ("dogs", 180)):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(12):
            noise = np.random.default_rng(number).integers(0, 60, (20, 16, 3), np.uint8)
            Image.fromarray(shade + noise).save(tmp_path / "photos" / name / f"{number}.jpg")
    Image.new("RGB", (30, 20), "red").save(tmp_path / "photo.jpg")
    monkeypatch.chdir(tmp_path)
    commands = re.findall(r"^    stream-ssl (.*)$", page, re.MULTILINE)
    assert {command.split()[0] for command in commands} == {"export", "embed", "search"}
    for command in commands:
        assert cli.main(command.split()) == 0
    codes = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(codes) == 9
    exec("\n".join(codes), {})
    said = capsys.readouterr().out
    assert said.count("is most like") == 24
    assert "accuracy 1.00" in said  # dark cats, bright dogs


# -- Other processes and full disks


def test_a_second_export_of_a_folder_is_refused_while_the_first_one_writes(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / "encoder"
    arguments = [str(run), "--encoder", str(place), "--no-onnx"]
    with exporting.replacing(place) as scratch:
        (scratch / "encoder.json").write_text("{}")
        assert export.main(arguments) == 1
        assert f"{place}: another `export` writes there; wait for its end" in caplog.text
        assert content(scratch) == {"encoder.json": b"{}"}
    assert (place / "manifest.json").exists()
    assert export.main(arguments) == 0
    assert sorted(content(place)) == MADE


def test_the_files_of_a_killed_export_are_replaced(run: Path, tmp_path: Path) -> None:
    left = tmp_path / ".incomplete-encoder"
    left.mkdir()
    (left / "encoder.onnx").write_bytes(b"half")
    assert export.main([str(run), "--encoder", str(tmp_path / "encoder"), "--no-onnx"]) == 0
    assert sorted(content(tmp_path / "encoder")) == MADE
    assert [path.name for path in tmp_path.iterdir()] == ["encoder"]


@pytest.mark.parametrize(
    ("error", "option"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "--encoder"),
        (OSError("8192 requested and 4096 written"), "--memory"),  # by numpy
    ],
)
def test_the_error_about_a_full_disk_names_the_option(
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: OSError,
    option: str,
) -> None:
    def full(*_: object) -> None:
        raise error

    place = tmp_path / "place"
    arguments = [str(run), option, str(place), "--no-onnx"]
    assert export.main(arguments) == 0
    before = content(place)
    monkeypatch.setattr(exporting, "write_json" if option == "--encoder" else "write_flat", full)
    assert export.main(arguments) == 1
    assert caplog.records[-1].message == (
        f"{option} {place} cannot be written, because its disk is full: free space there, then "
        "repeat the command"
    )
    assert content(place) == before
    assert [path.name for path in tmp_path.iterdir()] == ["place"]
