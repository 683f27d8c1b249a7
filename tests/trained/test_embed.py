"""The files that a stopped `stream-ssl embed` leaves, and how the same command continues."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evaluation_run import write_run
from forked import Forked
from PIL import Image

from stream_ssl.app.commands import embed
from stream_ssl.process import progress
from stream_ssl.process.only_writer import only_writer
from stream_ssl.trained import feature_file
from stream_ssl.trained.feature_file import FeatureFile, Read

IMAGES, BAD = 60, (20, 21, 59)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("embedded") / "run"
    write_run(folder, stages=2)
    return folder


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    for number in range(IMAGES):
        pixels_HW = np.random.default_rng(number).integers(0, 256, (9, 9), np.uint8)
        path = folder / "c" / f"{'é' * (number % 7)}{number}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(pixels_HW).save(path)
        if number in BAD:
            path.write_bytes(b"\x89PNG\r\n\x1a\nnothing")
    return folder


@pytest.fixture(autouse=True)
def handlers_stay(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Commands install handlers, which must not outlive a test."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def command(run: Path, photos: Path, out: Path, *more: str) -> list[str]:
    return [str(run), "--data", f"images:{photos}", "--out", str(out), "--batch", "8", *more]


def stopped_by(act: Any, after: int) -> Any:
    """Return an `append` that calls `act` once it has added `after` batches."""
    append, calls = FeatureFile.append, [0]

    def appended(self: FeatureFile, *rows: Any) -> None:
        append(self, *rows)
        calls[0] += 1
        if calls[0] == after:
            act()

    return appended


def dying(after: int, arguments: list[str]) -> int:
    """Embed, save after each batch, and end the process after this many batches."""
    embed.SAVE_SECONDS = 0.0
    FeatureFile.append = stopped_by(lambda: os._exit(9), after)  # type: ignore[method-assign]
    return embed.main(arguments)


@pytest.mark.parametrize("of", ["features", "embeddings"])
def test_a_killed_command_continues_to_the_file_of_an_unbroken_command(
    run: Path, photos: Path, tmp_path: Path, of: str
) -> None:
    """Embeddings depend on the statistics of a batch, so equal batches must be encoded again."""
    whole = tmp_path / "whole.npz"
    assert embed.main(command(run, photos, whole, "--of", of)) == 0
    for number, kills in enumerate(([1], [3], [2, 1, 2], [8])):
        out = tmp_path / f"{number}.npz"
        arguments = command(run, photos, out, "--of", of)
        for after in kills:
            assert Forked(dying, after, arguments, output=tmp_path / "log").wait(120) == 9
            assert not out.exists()
        assert embed.main(arguments) == 0
        assert out.read_bytes() == whole.read_bytes()
        assert not feature_file.state_folder(out).exists()


def test_a_signal_saves_the_rows_and_the_result_counts_bad_images_once(
    run: Path, photos: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out, began = tmp_path / "features.npz", list[int]()
    with pytest.MonkeyPatch.context() as patched:
        stops: list[Any] = []
        begin = embed.stop_source_on_signals

        def begun(source: Any) -> Any:
            stops.append(begin(source))
            return stops[0]

        def interrupted() -> None:
            signal.raise_signal(signal.SIGINT)
            assert stops[0].wait(60)

        patched.setattr(embed, "stop_source_on_signals", begun)
        patched.setattr(FeatureFile, "append", stopped_by(interrupted, 3))
        assert embed.main(command(run, photos, out)) == 130
    assert not out.exists()
    with pytest.MonkeyPatch.context() as patched:
        rows = FeatureFile.__init__

        def opened(self: FeatureFile, *given: Any) -> None:
            rows(self, *given)
            began.append(self.rows)

        patched.setattr(FeatureFile, "__init__", opened)
        assert embed.main(command(run, photos, out)) == 0
    assert began == [24]
    assert "3 of 60 samples were left out (damaged)" in capfd.readouterr().out
    with np.load(out) as found:
        assert found["features"].shape == (IMAGES - len(BAD), 8)
        assert len({*found["ids"].tolist()}) == IMAGES - len(BAD)


@pytest.mark.parametrize("where", ["append", "save", "publish"])
def test_the_same_command_continues_after_a_full_disk(
    run: Path,
    photos: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    where: str,
) -> None:
    out, whole = tmp_path / "features.npz", tmp_path / "whole.npz"
    assert embed.main(command(run, photos, whole)) == 0
    monkeypatch.setattr(embed, "SAVE_SECONDS", 0.0)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        if where == "append":
            patched.setattr(FeatureFile, where, stopped_by(full, 3))
        elif where == "save":
            patched.setattr(feature_file.durable, "write", full)
        else:
            patched.setattr(feature_file.shutil, "copyfileobj", full)
        assert embed.main(command(run, photos, out)) == 1
    assert caplog.records[-1].message == (
        f"--out {out} cannot be written, because its disk is full: free space there, and then the "
        "same command continues"
    )
    assert not out.exists()
    assert embed.main(command(run, photos, out)) == 0
    assert out.read_bytes() == whole.read_bytes()


def test_unfinished_features_of_other_settings_are_refused(
    run: Path, photos: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "features.npz"
    checkpoints = sorted(run.glob("checkpoints/step-*"))
    arguments = command(run, photos, out)
    assert Forked(dying, 3, arguments, output=tmp_path / "log").wait(120) == 9
    others = {
        "the encoder": command(checkpoints[0], photos, out),
        "the encoder ": command(run, photos, out, "--of", "embeddings"),
        "--data": command(run, photos / "c", out),
        "--batch": command(run, photos, out, "--batch", "9"),
    }
    for name, other in others.items():
        assert embed.main(other) == 2
        said = caplog.records[-1].message
        assert f"{out}.state holds unfinished features with {name.strip()} " in said
        assert "Repeat the earlier command to continue, choose another --out, or delete" in said
    with only_writer(feature_file.state_folder(out), "taken"):
        assert embed.main(command(run, photos, out)) == 1
    assert f"--out {out}: another `embed` writes it; choose another file" in caplog.text
    assert embed.main(command(checkpoints[1], photos, out)) == 0  # the run's newest
    assert embed.main(command(run, photos / "c", out)) == 0  # a finished file is replaced


@pytest.mark.parametrize("name", ["state.json", "ids", "labels"])
def test_the_error_about_damaged_unfinished_features_names_the_remedy(
    run: Path, photos: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    out = tmp_path / "features.npz"
    folder, arguments = feature_file.state_folder(out), command(run, photos, out)
    assert Forked(dying, 3, arguments, output=tmp_path / "log").wait(120) == 9
    whole = (folder / name).read_bytes()
    for damaged in {"state.json": (b"", b"{}"), "ids": (b"\0" + whole[1:],)}.get(name, (b"",)):
        (folder / name).write_bytes(damaged)
        assert embed.main(arguments) == 2
        said = caplog.records[-1].message
        assert said == f"{folder / name} is damaged: delete {folder} to start anew"
        assert not out.exists()
    shutil.rmtree(folder)
    assert embed.main(arguments) == 0


def test_embed_reads_a_source_class_of_the_user(
    run: Path,
    photos: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "mine_to_embed.py").write_text(
        "from stream_ssl.producers.sources import ImageFolder\n"
        "class Mine(ImageFolder):\n"
        "    def __init__(self, folder: str) -> None:\n"
        "        super().__init__(folder, shuffle=False)\n"
        "class Bare(Mine):\n"
        "    def __init__(self) -> None:\n"
        "        raise KeyError(7)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    built, own = tmp_path / "built.npz", tmp_path / "own.npz"
    assert embed.main(command(run, photos, built)) == 0
    data = ["--data", f"mine_to_embed.Mine:{photos}", "--batch", "8"]
    assert embed.main([str(run), *data, "--out", str(own)]) == 0
    with np.load(built) as expected, np.load(own) as found:
        assert sorted(found["ids"]) == sorted(expected["ids"])
    with pytest.raises(SystemExit):
        embed.main([str(run), "--data", "mine_to_embed.Bare:x", "--out", str(own)])
    assert "this source has no place: use --data mine_to_embed.Bare" in capsys.readouterr().err
    embed.main([str(run), "--data", "mine_to_embed.Bare", "--out", str(tmp_path / "bare.npz")])
    assert "mine_to_embed.Bare: its constructor failed" in caplog.text


def test_a_picture_that_is_too_large_for_a_run_is_embedded(
    run: Path, photos: Path, tmp_path: Path
) -> None:
    shutil.copytree(photos, tmp_path / "in" / "some")
    noise_HW = np.random.default_rng(0).integers(0, 256, (100, 5200), np.uint8)
    large = Image.fromarray(np.tile(noise_HW, (50, 1)))  # 26 megapixels
    large.save(tmp_path / "in" / "large.jpg")
    assert embed.main(command(run, tmp_path / "in", tmp_path / "f.npz")) == 0
    ids = np.load(tmp_path / "f.npz")["ids"]
    assert any("large" in name for name in ids)


def test_a_source_without_images_leaves_no_file(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.png").write_bytes(b"\x89PNG\r\n\x1a\nnothing")
    assert embed.main(command(run, tmp_path / "in", tmp_path / "f.npz")) == 2
    assert (
        "contains no sample that can be decoded: 1 of 1 sample were left out (damaged)"
        in caplog.text
    )
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_embed_refuses_a_file_at_the_place_of_the_unfinished_rows(
    run: Path, photos: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = feature_file.state_folder(tmp_path / "f.npz")
    folder.write_text("mine")
    assert embed.main(command(run, photos, tmp_path / "f.npz")) == 2
    assert f"{folder} is a file; choose another --out" in caplog.text
    assert folder.read_text() == "mine"


def test_progress_is_logged_without_a_terminal(
    run: Path, photos: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(progress, "LOG_SECONDS", 0.0)
    caplog.set_level("INFO")
    assert embed.main(command(run, photos, tmp_path / "f.npz")) == 0
    assert "encoding images, 1 bad: 33 of 60" in caplog.messages


def test_rows_that_a_full_disk_left_without_a_state_are_deleted(tmp_path: Path) -> None:
    """The rows would keep the disk full, and no command could continue from them."""
    out = tmp_path / "f.npz"
    folder = feature_file.state_folder(out)
    folder.mkdir()
    file = FeatureFile(out, 8, {})

    def full() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    file._stack.callback(full)  # as a file whose last rows find no room
    with pytest.raises(OSError, match="No space left"):
        file.close()
    assert not folder.exists()


def test_memory_does_not_grow_with_the_rows(tmp_path: Path) -> None:
    out, dim, count = tmp_path / "f.npz", 512, 1000
    feature_BF = np.random.default_rng(0).random((count, dim), np.float32)  # 2 MB
    label_B = np.arange(count)
    feature_file.state_folder(out).mkdir()
    file = FeatureFile(out, dim, {})
    tracemalloc.start()
    try:
        for batch in range(30):
            ids = [f"{batch}-{number}" for number in range(count)]
            file.append(feature_BF, label_B, ids, Read([batch], count * (batch + 1), {}))
        file.save()
        file.publish()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 12 << 20  # the rows are 61 MB
    with np.load(out) as found:
        assert np.array_equal(found["features"], np.tile(feature_BF, (30, 1)))
        assert found["ids"][-1] == "29-999"
        assert found["labels"].dtype == np.int64
        assert np.array_equal(found["labels"], np.tile(label_B, 30))
