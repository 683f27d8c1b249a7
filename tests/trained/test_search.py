"""A search of a run's memory by a picture, and its errors."""

from __future__ import annotations

import errno
import io
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from evaluation_run import write_run
from PIL import Image
from safetensors.torch import load_file, save_file
from table import table

import stream_ssl
from stream_ssl.app import cli
from stream_ssl.app.commands import search
from stream_ssl.durable import seal
from stream_ssl.journal.consumer_offsets import ConsumerOffsets
from stream_ssl.process.failures import FAILED, unreadable_folder
from stream_ssl.trained import encoder
from stream_ssl.trained.encoder import Encoder
from stream_ssl.trained.search import AGAIN

AVERAGE = {
    "class_path": "stream_ssl.methods.MoCo",
    "init_args": {"key_statistics": "average"},
}


THUMBNAILS = {"capacity": 16, "descriptor": "Thumbnail"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("searched") / "run"
    write_run(folder, held=40, method=AVERAGE)
    return folder


def picture_of(run: Path, slot: int, folder: Path) -> Path:
    """Write the image in a slot to a file."""
    state = load_file(run / "checkpoints" / "latest" / "memory.safetensors")
    file = folder / "query.png"
    Image.fromarray(state["columns.images"][slot, 0].numpy()).save(file)
    return file


def printed(text: str) -> list[list[str]]:
    """The cells of the printed table, without its headings."""
    lines = [line for line in text.splitlines() if not line.startswith(("checkpoint:", "pictures"))]
    assert lines[0].split()[:4] == ["similarity", "slot", "producer", "source"]
    return [re.split(r" {2,}", line) for line in lines[1:]]


def test_the_table_lists_the_nearest_slots_by_falling_cosine(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = load_file(run / "checkpoints" / "latest" / "memory.safetensors")
    image = picture_of(run, 5, tmp_path)
    assert cli.main(["search", str(run), str(image), "--k", "4"]) == 0
    rows = printed(capsys.readouterr().out)
    z_kD = stream_ssl.load_encoder(run, "embeddings")(state["columns.images"]).double()
    cosine_k = (z_kD @ z_kD[5]).tolist()
    assert (state["columns.embeddings"] - z_kD).abs().max() > 1e-3, "the memory's are older"
    expected = sorted(range(16), key=lambda slot: -cosine_k[slot])[:4]
    assert [int(row[1]) for row in rows] == expected
    for row, slot in zip(rows, expected, strict=True):
        n = int(state["columns.ids"][slot]) - 2**62
        assert float(row[0]) == pytest.approx(cosine_k[slot], abs=1e-4)
        time = f"1970-01-01 00:00:{int(n / 4):02d}"
        origin = ["robot", "left", f"frame-{n}"] if n % 2 else ["-", "-", "-"]
        label = str(n % 4) if n % 2 == 0 else "-"
        assert row[2:] == [*origin, label, time if n % 2 else "-"]


@table(
    ("statistics", "descriptor"),
    [("average", "Thumbnail"), ("batch", "Thumbnail"), ("average", "Features")],
)
def test_a_held_picture_is_found_by_its_descriptor(
    statistics: str, descriptor: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, method = tmp_path / "run", {"method": AVERAGE} if statistics == "average" else {}
    write_run(run, held=40, memory={**THUMBNAILS, "descriptor": descriptor}, **method)
    image = picture_of(run, 7, tmp_path)
    assert search.main([str(run), str(image), "--by", "descriptors", "--k", "99"]) == 0
    rows = printed(capsys.readouterr().out)
    assert rows[0][:2] == ["1.0000", "7"]
    assert sorted(int(row[1]) for row in rows) == list(range(16))


def test_a_search_by_the_default_descriptor_compares_embeddings_and_features(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = picture_of(run, 7, tmp_path)
    assert search.main([str(run), str(image), "--by", "descriptors", "--k", "16"]) == 0
    state = load_file(run / "checkpoints" / "latest" / "memory.safetensors")
    encoder = stream_ssl.load_encoder(run, "embeddings")
    image_1CHW = state["columns.images"][7:8]
    feature_F = encoder.backbone(encoder.views.plain(image_1CHW))[0].double()
    feature_F = feature_F - state["descriptor.1.mean"].double()
    halves = encoder(image_1CHW)[0].double(), feature_F / feature_F.norm()
    for row in printed(capsys.readouterr().out):
        held = torch.split(state["columns.descriptors"][int(row[1])].double(), [6, 8])
        expected = sum(0.5**0.5 * float(a @ b) for a, b in zip(held, halves, strict=True))
        assert float(row[0]) == pytest.approx(expected, abs=1e-4)


def test_many_results_are_encoded_in_batches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "run", held=300, method=AVERAGE, memory={"capacity": 300})
    image, sizes = picture_of(tmp_path / "run", 7, tmp_path), []
    encode = Encoder.forward

    def counted(self: Encoder, image_BCHW: torch.Tensor) -> torch.Tensor:
        sizes.append(len(image_BCHW))
        return encode(self, image_BCHW)

    monkeypatch.setattr(Encoder, "forward", counted)
    assert search.main([str(tmp_path / "run"), str(image), "--k", "300"]) == 0
    assert max(sizes) == 1 + AGAIN
    rows = printed(capsys.readouterr().out)
    state = load_file(tmp_path / "run" / "checkpoints" / "latest" / "memory.safetensors")
    z_kD = stream_ssl.load_encoder(tmp_path / "run", "embeddings")(state["columns.images"])
    assert [float(row[0]) for row in rows] == pytest.approx(
        (z_kD @ z_kD[7]).sort(descending=True).values.tolist(), abs=1e-4
    )
    assert sorted(int(row[1]) for row in rows) == list(range(300))


def test_a_held_picture_is_found_though_its_embedding_is_old(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The embeddings of `write_run` are random, so those of old weights tell nothing."""
    run = tmp_path / "run"
    write_run(run, held=400, method=AVERAGE, memory={"capacity": 400})
    for slot in range(0, 400, 40):
        image = picture_of(run, slot, tmp_path)
        assert search.main([str(run), str(image), "--k", "1"]) == 0
        assert printed(capsys.readouterr().out)[0][:2] == ["1.0000", str(slot)]


def test_a_query_by_batch_statistics_is_encoded_with_images_of_the_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "run", held=40)
    image = picture_of(tmp_path / "run", 7, tmp_path)
    assert search.main([str(tmp_path / "run"), str(image), "--k", "16"]) == 0
    state = load_file(tmp_path / "run" / "checkpoints" / "latest" / "memory.safetensors")
    stored_kD, encoder = (
        state["columns.embeddings"],
        stream_ssl.load_encoder(tmp_path / "run", "embeddings"),
    )
    z_D = encoder(state["columns.images"][[7, *range(16)]])[0]
    order_k = (stored_kD @ z_D).argsort(descending=True).tolist()
    z_BD = encoder(state["columns.images"][[7, *order_k, *range(16)]])
    cosine = dict(zip(order_k, (z_BD[1:17] @ z_BD[0]).tolist(), strict=True))
    rows = printed(capsys.readouterr().out)
    assert rows[0][:2] == ["1.0000", "7"], "the picture itself comes first"
    for row in rows:
        assert float(row[0]) == pytest.approx(cosine[int(row[1])], abs=1e-4)


def test_pictures_are_written_as_png_and_as_html(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_run(run, held=40, memory=THUMBNAILS)
    image = picture_of(run, 3, tmp_path)
    arguments = [str(run), str(image), "--by", "descriptors", "--k", "9", "--out"]
    for name in ("new/similar.png", "similar.html"):
        assert search.main([*arguments, str(tmp_path / name)]) == 0
    with Image.open(tmp_path / "new" / "similar.png") as found:
        sheet = np.asarray(found)
    query, first = (sheet[2:98, left : left + 96] for left in (2, 102))
    assert np.array_equal(query, first)  # the first hit is the query itself
    with Image.open(image) as sent:
        assert np.array_equal(query[::8, ::8, 0], np.asarray(sent))
    page = (tmp_path / "similar.html").read_text()
    assert page.count("<img") == 10
    assert page.count("data:image/png;base64,") == 10
    assert "slot 3" in page
    assert "left/frame-" in page
    assert "cosine similarity" in page, "each number has a meaning"


def test_names_from_producers_control_neither_terminal_nor_page() -> None:
    from stream_ssl.batch import Origin
    from stream_ssl.trained.search import Hit, SearchResult
    from stream_ssl.trained.search_sheet import page

    image = np.zeros((3, 4, 4), np.uint8)
    hit = Hit(0, 0.5, None, Origin("\x1b[2J", "<script>", "a", 1e300), image)
    assert "\x1b" not in "".join(search.table([hit]))
    assert hit.time == ""
    shown = page(SearchResult(Path("caf\udce9"), image, [hit])).decode()
    assert "caf?" in shown  # a folder whose name is not UTF-8
    assert "<script>" not in shown
    assert "&lt;script&gt;" in shown


def no_run(run: Path, image: Path) -> list[str]:
    return [str(run / "none"), str(image)]


def no_checkpoint(run: Path, image: Path) -> list[str]:
    shutil.rmtree(run / "checkpoints")
    return [str(run), str(image)]


def empty_memory(run: Path, image: Path) -> list[str]:
    write_run(run.parent / "new")
    return [str(run.parent / "new"), str(image)]


def vectors(run: Path, image: Path) -> list[str]:
    new = run.parent / "new"
    write_run(new, vectors={"dim": 8}, memory={"capacity": 16, "descriptor": "Embedding"})
    return [str(new), str(image)]


def no_image(run: Path, image: Path) -> list[str]:
    image.write_text("not a picture")
    return [str(run), str(image)]


def young_run(run: Path, image: Path) -> list[str]:
    (run.parent / "young/journal").mkdir(parents=True)
    return [str(run.parent / "young"), str(image)]


def checkpoints_away(run: Path, image: Path) -> list[str]:
    (run.parent / "away/journal").mkdir(parents=True)
    ConsumerOffsets(run.parent / "away").publish(2, 2, step=7)
    return [str(run.parent / "away"), str(image)]


def no_bytes(run: Path, image: Path) -> list[str]:
    image.write_bytes(b"")
    return [str(run), str(image)]


def cut_image(run: Path, image: Path) -> list[str]:
    image.write_bytes(image.read_bytes()[:60])
    return [str(run), str(image)]


def other_format(run: Path, image: Path) -> list[str]:
    file = io.BytesIO()
    Image.new("CMYK", (9, 9)).save(file, "TIFF")
    image.write_bytes(file.getvalue())
    return [str(run), str(image)]


def huge_image(run: Path, image: Path) -> list[str]:
    Image.new("L", (8001, 8000)).save(image)
    return [str(run), str(image)]


def missing_image(run: Path, image: Path) -> list[str]:
    return [str(run), str(image.with_name("none.png"))]


def a_folder(run: Path, image: Path) -> list[str]:
    return [str(run), str(run)]


REFUSED: dict[str, tuple[Callable[[Path, Path], list[str]], int, str]] = {
    "no run": (no_run, 1, "no checkpoint at .*none: it is not a folder"),
    "no checkpoint": (no_checkpoint, 1, "contains neither state.json nor latest"),
    "no checkpoint yet": (
        young_run,
        1,
        "a run that has written none yet, which its first",
    ),
    "checkpoints on a disk that is away": (
        checkpoints_away,
        1,
        "a run that had one at step 7: mount the disk of .*away/checkpoints",
    ),
    "an empty memory": (
        empty_memory,
        2,
        "is empty, .*search again after the run's next checkpoint",
    ),
    "a run on vectors": (vectors, 2, "learns from vectors, and this command searches for pictures"),
    "no picture": (no_image, 2, r"query.png: the bytes b'not a pictur'.* are no JPEG, PNG or WebP"),
    "an empty file": (no_bytes, 2, "query.png: the picture is empty: it has 0 bytes"),
    "half a picture": (cut_image, 2, "query.png: "),
    "another format": (other_format, 2, "query.png: .* are no JPEG, PNG or WebP"),
    "a huge picture": (huge_image, 2, "query.png: 8001 x 8000 pixels; at most 64000000"),
    "no such file": (missing_image, 1, "none.png cannot be read: No such file"),
    "a folder": (a_folder, 1, "cannot be read: a folder, and one image is needed: give a"),
    "run and picture swapped": (
        lambda r, i: [str(i), str(r)],
        2,
        "the run comes first: stream-ssl search .*run .*png",
    ),
    "k of 0": (lambda r, i: [str(r), str(i), "--k", "0"], 2, "--k 0: must be at least 1"),
    "another suffix": (
        lambda r, i: [str(r), str(i), "--out", "a.pdf"],
        2,
        "--out a.pdf: name a file that ends in .png or .html",
    ),
}


@table("case", REFUSED)
def test_search_refuses_wrong_runs_pictures_and_options(
    case: str, run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    work = tmp_path / case
    shutil.copytree(run, work / "run", symlinks=True)
    image = picture_of(run, 0, work)
    make, status, message = REFUSED[case]
    assert search.main(make(work / "run", image)) == status
    assert re.search(message, caplog.text), caplog.text


@table("denied", [".", "checkpoints"])
def test_a_run_of_another_user_is_refused_by_each_command(
    denied: str,
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    image, access = picture_of(run, 0, tmp_path), os.access
    folder, data = (run / denied), ["--data", f"images:{tmp_path}"]
    message = f"{folder} may not be read by this user: run the command as the daemon's account"
    # Root may read all files, so this test denies the access itself.
    monkeypatch.setattr(os, "access", lambda path, mode: path != folder and access(path, mode))
    with pytest.raises(PermissionError, match=re.escape(message)):
        stream_ssl.load_encoder(run)
    for command in (
        ["search", str(run), str(image)],
        ["export", str(run), "--encoder", str(tmp_path / "out"), "--no-onnx"],
        ["embed", str(run), *data, "--out", str(tmp_path / "out.npz")],
        ["evaluate", str(run), *data],
    ):
        caplog.clear()
        assert cli.main(command) == FAILED, command
        assert message in caplog.text


def test_the_error_about_a_private_file_of_a_checkpoint_names_the_file(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(path: Path, *_: object) -> None:  # root may read all files
        raise PermissionError(errno.EACCES, "Permission denied", str(path / "memory.safetensors"))

    monkeypatch.setattr(encoder, "checkpoint_damage", denied)
    with pytest.raises(
        PermissionError, match=r"memory\.safetensors may not be read by this user: "
    ):
        stream_ssl.load_encoder(run)


def test_unreadable_folder_names_a_run_in_a_folder_that_may_not_be_entered(tmp_path: Path) -> None:
    above = tmp_path / "home"
    (above / "run").mkdir(parents=True)
    assert unreadable_folder(above / "run") is None
    assert unreadable_folder(above / "none") is None
    above.chmod(0)
    if root := os.geteuid() == 0:
        os.seteuid(65534)  # nobody
    try:
        assert "run may not be read by this user" in str(unreadable_folder(above / "run"))
    finally:
        if root:
            os.seteuid(0)
        above.chmod(0o700)


def test_a_picture_that_is_too_large_for_a_run_is_searched_for(tmp_path: Path) -> None:
    write_run(tmp_path / "run", held=20, decoder={"size": 8, "channels": 1})
    noise_HW = np.random.default_rng(0).integers(0, 256, (100, 5200), np.uint8)
    large = Image.fromarray(np.tile(noise_HW, (50, 1)))  # 26 megapixels
    large.save(tmp_path / "large.jpg", "JPEG")
    assert search.main([str(tmp_path / "run"), str(tmp_path / "large.jpg")]) == 0


def test_columns_that_do_not_fit_together_are_refused_by_each_command(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(run / "checkpoints" / "latest", checkpoint)
    file = checkpoint / "memory.safetensors"
    image = str(picture_of(run, 5, tmp_path))
    # Safetensors may map the file into memory, which is then written again.
    state = {name: tensor.clone() for name, tensor in load_file(file).items()}
    for changed in (
        {"columns.ids": state["columns.ids"][:3]},
        {"columns.images": state["columns.images"][:3]},
        {"columns.labels": state["columns.labels"].double()},
        {"columns.born": torch.tensor(1)},
    ):
        save_file(state | changed, file)
        (checkpoint / "manifest.json").unlink()
        seal(checkpoint)
        for command in (["search", str(checkpoint), image], ["export", str(checkpoint)]):
            caplog.clear()
            more = ["--memory", str(tmp_path / "m")] if command[0] == "export" else []
            assert cli.main([*command, *more]) == 2
            assert "the state is damaged: its column " in caplog.text
            assert "Traceback" not in caplog.text


@table("mode", ["L", "RGB", "RGBA", "P", "LA", "CMYK"])
def test_search_accepts_pictures_of_any_number_of_channels(
    mode: str, run: Path, tmp_path: Path
) -> None:
    file = tmp_path / f"{mode}.{'jpg' if mode == 'CMYK' else 'png'}"
    Image.new(mode, (30, 20), 1).save(file)
    assert search.main([str(run), str(file)]) == 0


def test_descriptors_whose_weights_differ_are_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A network from a package that this machine lacks has this effect."""
    encoder = {"class_path": "torch.nn.Flatten"}
    frozen = {
        "class_path": "stream_ssl.memory.descriptors.Frozen",
        "init_args": {"encoder": encoder},
    }
    write_run(tmp_path / "run", held=20, memory={"capacity": 16, "descriptor": frozen})
    image = picture_of(tmp_path / "run", 0, tmp_path)
    arguments = [str(tmp_path / "run"), str(image), "--by", "descriptors"]
    assert search.main(arguments) == 0
    other = torch.nn.Flatten
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stream_ssl.memory.descriptors.fingerprint_of", lambda _: f"{other}")
        assert search.main(arguments) == 2
    assert "its weights are not at hand: use --by embeddings" in caplog.text
