"""Tests of a curated set's files, and of the command."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import shutil
import signal
import time
from pathlib import Path

import faiss
import numpy as np
import pytest
from curation_pictures import Crawl, jpeg, picture
from forked import Forked
from PIL import Image
from pyarrow import parquet
from safetensors import SafetensorError
from table import table

from stream_ssl.app import cli
from stream_ssl.app.commands import curate
from stream_ssl.curation import Curator, write_results
from stream_ssl.curation.report import write_report
from stream_ssl.process.only_writer import only_writer
from stream_ssl.process.signals import Stop
from stream_ssl.producers.sources import ImageFolder, ParquetFiles, WebDataset
from stream_ssl.wire.sample import Sample


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 90 photos, each beside a copy of lower quality, in two classes."""
    root = tmp_path_factory.mktemp("photos")
    for number in range(90):
        place = root / ("cats" if number % 3 else "dogs")
        place.mkdir(exist_ok=True)
        (place / f"{number:03d}.jpg").write_bytes(jpeg(picture(number), 95))
        (place / f"{number:03d}-copy.jpg").write_bytes(jpeg(picture(number), 50))
    (root / "cats" / "broken.jpg").write_bytes(jpeg(picture(5), 90)[:200])
    return root


def test_the_parquet_file_the_tar_shards_and_the_index_hold_the_same_pictures(
    tmp_path: Path,
) -> None:
    curator = Curator(tmp_path / "state", keep=1200)
    list(curator.run(Crawl()))
    out = tmp_path / "out"
    out.mkdir()
    told: list[int] = []
    write_results(curator, out, told.append)
    kept = curator.kept
    assert told == sorted(told)
    assert told[-1] == len(kept)
    table = parquet.read_table(out / "curated.parquet")
    assert table.column_names == ["id", "image", "label", "source", "position", "meta"]
    features = json.loads(table.schema.metadata[b"huggingface"])["info"]["features"]
    assert features["image"] == {"_type": "Image"}
    assert list(features) == table.column_names
    rows = table.to_pylist()
    assert [row["id"] for row in rows] == [one.id for one in kept]
    assert [row["label"] for row in rows] == [one.label for one in kept]
    bytes_N = [curator.originals.read(one.original) for one in kept]
    assert [row["image"]["bytes"] for row in rows] == bytes_N
    shards = WebDataset(str(out / "curated-*.tar"))
    assert [bytes(sample.data) for sample, _ in shards.samples()] == bytes_N
    dropped = parquet.read_table(out / "dropped.parquet").to_pylist()
    assert [row["id"] for row in dropped] == [one.id for one in curator.dropped()]
    held = {one.id for one in kept}
    assert [row["of_kept"] for row in dropped] == [row["of_id"] in held for row in dropped]
    index = faiss.read_index(str(out / "index.faiss"))
    row_ND = curator.memory.embeddings.numpy()
    assert index.search(row_ND[:20], 1)[1][:, 0].tolist() == list(range(20))
    page = (out / "report.html").read_text()
    assert f"{len(kept):,} of 900 pictures kept" in page
    assert "no longer kept, the report shows its thumbnail" in page
    assert page.count("data:image/jpeg;base64,") == 2


@table(
    ("classes", "named"),
    [(["cats", "d\udcffogs"], True), ([], False), (["cats"], False), (["cats", "cats"], False)],
)
def test_the_parquet_file_keeps_class_names_that_fit_the_labels(
    folder: Path, tmp_path: Path, classes: list[str], named: bool
) -> None:
    curator = Curator(tmp_path / "state", keep=20)
    list(curator.run(ImageFolder(folder)))
    write_results(curator, tmp_path, classes=classes)
    found = ParquetFiles(str(tmp_path / "curated.parquet"))
    assert found.classes == (["cats", "d\\xffogs"] if named else None)
    assert [sample.label for sample, _ in found.samples()] == [one.label for one in curator.kept]


def test_the_metadata_of_samples_survives_a_restart(tmp_path: Path) -> None:
    facts = [{"caption": "a \u00e9", "share": float("nan")}, None, {"id": "no id"}]

    class Captions:
        name = "captions"

        def samples(self, position: int | None = None) -> object:
            for number in range(position or 0, 3):
                data = jpeg(picture(number), 90)
                yield Sample(str(number), data, "jpeg", meta=facts[number]), number + 1

    list(Curator(tmp_path / "state", keep=3).run(Captions()))  # type: ignore[arg-type]
    write_results(Curator(tmp_path / "state", keep=3), tmp_path)
    rows = parquet.read_table(tmp_path / "curated.parquet").to_pylist()
    assert json.loads(rows[0]["meta"]) == {"caption": "a \u00e9", "share": None}
    assert [row["meta"] for row in rows[1:]] == [None, '{"id": "no id"}']
    found = [dict(sample.meta or {}) for sample, _ in WebDataset(str(tmp_path / "*.tar")).samples()]
    assert found[0]["caption"] == "a \u00e9"
    assert [one["id"] for one in found] == ["0", "1", "2"]
    assert [one.get("source_id") for one in found] == [None, None, "no id"]


def test_a_row_group_of_large_pictures_ends_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    curator = Curator(tmp_path / "state", keep=20)
    list(curator.run(Crawl()))
    out = tmp_path / "out"
    out.mkdir()
    sizes = [curator.originals.size(one.original) for one in curator.kept]
    monkeypatch.setattr("stream_ssl.curation.curator.BATCH_BYTES", max(sizes) + 1)
    write_results(curator, out)
    table = parquet.ParquetFile(out / "curated.parquet")
    groups = [table.read_row_group(number) for number in range(table.num_row_groups)]
    assert {len(group) for group in groups} <= {1, 2}
    ids = [name for group in groups for name in group["id"].to_pylist()]
    assert ids == [one.id for one in curator.kept]


def test_a_report_of_pictures_that_are_compared_at_a_large_size_stays_small(tmp_path: Path) -> None:
    curator = Curator(tmp_path / "state", keep=30, size=512)
    list(curator.run(Crawl(ends_at=40)))
    write_report(curator, tmp_path / "report.html")
    sheets = re.findall(r"base64,([^\"]+)", (tmp_path / "report.html").read_text())
    widths = [Image.open(io.BytesIO(base64.b64decode(sheet))).width for sheet in sheets]
    assert widths[0] == 24 * (128 + 2)


def test_raw_pixels_become_png(tmp_path: Path) -> None:
    class Raw:
        name = "raw"

        def samples(self, position: object = None) -> object:
            for number in range(3):
                pixels = picture(number) if number else picture(0)[:, :, :1].copy()
                yield Sample(str(number), pixels.tobytes(), shape=pixels.shape), number + 1

    curator = Curator(tmp_path / "state", keep=3)
    list(curator.run(Raw()))  # type: ignore[arg-type]
    out = tmp_path / "out"
    out.mkdir()
    write_results(curator, out)
    for row in parquet.read_table(out / "curated.parquet").to_pylist():
        pixels = np.asarray(Image.open(io.BytesIO(row["image"]["bytes"])))
        number = int(row["id"])
        expected = picture(number) if number else picture(0)[:, :, 0]
        assert np.array_equal(pixels, expected)
        assert row["image"]["path"].endswith(".png")


def test_the_command_keeps_each_photo_once(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ["images", "--source.root", str(folder), "--keep", "200", "--out", str(out)]
    assert curate.main(options) == 0
    rows = parquet.read_table(out / "curated.parquet").to_pylist()
    assert len(rows) == 90
    assert {row["label"] for row in rows} == {0, 1}
    assert not (out / ".state").exists()
    names = {path.name for path in out.iterdir()}
    assert names == {
        *("curated-000000.tar", "curated.parquet", "dropped.parquet", "bad.parquet", "index.faiss"),
        "report.html",
    }
    assert len(list(ImageFolder(folder).samples())) == 181
    report = (out / "report.html").read_text()
    assert "<td>cats</td><td>60</td><td>60</td>" in report
    assert "<td>dogs</td><td>30</td><td>30</td>" in report
    assert "the source left" not in report


def test_a_source_that_tells_only_the_number_of_its_classes_is_curated(tmp_path: Path) -> None:
    options = ["--source.count", "60", "--keep", "10", "--out", str(tmp_path / "out")]
    assert curate.main(["synthetic", *options]) == 0
    labels = parquet.read_table(tmp_path / "out/curated.parquet").column("label").to_pylist()
    assert len(labels) == 10
    assert all(
        f"<td>{label}</td>" in (tmp_path / "out/report.html").read_text() for label in labels
    )


def test_the_report_counts_each_file_that_the_source_left_out_once(tmp_path: Path) -> None:
    root, out = tmp_path / "in", tmp_path / "out"
    root.mkdir()
    for number in range(300):
        (root / f"{number:03d}.jpg").write_bytes(jpeg(picture(number), 90))
    for number in (10, 20, 290):
        (root / f"{number:03d}.jpg").write_bytes(b"")
    (root / "gone.jpg").symlink_to(tmp_path / "nowhere")  # noted when the files are listed
    part = Curator(out / ".state", keep=20)
    list(part.run(ImageFolder(root), lambda: True))
    assert part.progress.left_out["no image"] == 2
    options = ["images", "--source.root", str(root), "--keep", "20", "--out", str(out)]
    assert curate.main(options) == 0
    report = (out / "report.html").read_text()
    assert "<td>no image</td><td>3</td>" in report
    assert "<td>unreadable</td><td>1</td>" in report


def test_curate_reads_a_source_class_of_the_user_unless_it_is_a_broker(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "mine_to_curate.py").write_text(
        "from stream_ssl.producers.sources import ImageFolder\n"
        "class Mine(ImageFolder):\n"
        "    def __init__(self, folder: str) -> None:\n"
        "        super().__init__(folder)\n"
        "class Bare(Mine):\n"
        "    def __init__(self) -> None:\n"
        f"        super().__init__({str(folder)!r})\n"
        "class Broker(Bare):\n"
        "    def acknowledged(self, position: object) -> None: ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    options = ["--source.folder", str(folder), "--keep", "200", "--out", str(tmp_path / "out")]
    assert curate.main(["mine_to_curate.Mine", *options]) == 0
    assert parquet.read_table(tmp_path / "out" / "curated.parquet").num_rows == 90
    bare = ["--keep", "2", "--out", str(tmp_path / "bare")]
    assert curate.main(["mine_to_curate.Bare", *bare]) == 0
    for name, said in (("Other", "has no class 'Other'"), ("Broker", "Broker' is a broker, ")):
        with pytest.raises(SystemExit):
            curate.main([f"mine_to_curate.{name}", *options])
        assert said in capsys.readouterr().err


def test_curate_fails_without_pictures_and_rejects_unsuitable_and_unknown_sources(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.png").write_bytes(b"\x89PNG\r\n\x1a\nnothing")
    options = ["--keep", "20", "--out", str(out)]
    assert curate.main(["images", "--source.root", str(tmp_path / "in"), *options]) == 1
    assert f"{out}: no sample could be decoded; bad.parquet names the reasons" in caplog.text
    assert parquet.read_table(out / "bad.parquet").num_rows == 1
    for name in ("curated", "dropped", "bad"):  # `datasets` reads no table with an empty row group
        about = parquet.ParquetFile(out / f"{name}.parquet").metadata
        assert all(about.row_group(n).num_rows for n in range(about.num_row_groups))
    with pytest.raises(SystemExit):
        curate.main(["npy", "--source.file", "x.npy", *options])
    said = capsys.readouterr().err
    with pytest.raises(SystemExit):
        curate.main(["imagez", *options])
    of_unknown = capsys.readouterr().err
    assert "source 'npy' reads vectors, not pictures, and cannot be curated: must be" in said
    assert "source 'imagez': must be one of camera, " in of_unknown
    assert said.partition(": must be one of")[2] == of_unknown.partition(": must be one of")[2]
    assert "kafka" not in of_unknown


def test_curate_rejects_an_output_folder_with_files_and_a_missing_source_folder(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    options = ["images", "--source.root", str(folder), "--keep", "20", "--out", str(out)]
    for name, text in (
        ("curated.parquet", "holds a finished set (curated.parquet); choose a new folder"),
        ("letter.txt", "holds letter.txt; choose a new or an empty folder"),
    ):
        (out / name).write_text("")
        assert curate.main(options) == 2
        assert text in caplog.text
        (out / name).unlink()
    assert curate.main([*options[:2], str(tmp_path / "none"), *options[3:]]) == 1
    assert f"no folder {tmp_path / 'none'}" in caplog.text


def test_a_path_through_a_missing_folder_leaves_no_empty_folder(
    folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    options = ["images", "--source.root", str(folder), "--keep", "5"]
    assert curate.main([*options, "--out", str(out / "new" / "..")]) == 0
    assert (out / "curated.parquet").is_file()
    assert not (out / "new").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_same_command_continues_after_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    """The first command waits for more files after its first batch."""
    photos = tmp_path / "photos"
    photos.mkdir()
    for one in range(300):
        (photos / f"{one:03d}.jpg").write_bytes(jpeg(picture(one % 200), 95 - one // 200))
        os.utime(photos / f"{one:03d}.jpg", (one + 1.0, one + 1.0))
    out = tmp_path / "out"
    command = ["curate", "watch", "--keep", "250"]
    command += ["--source.root", str(photos), "--out", str(out)]
    dropped = out / ".state" / "dropped.jsonl"
    log = tmp_path / "log"
    process = Forked(cli.main, command, output=log)
    try:
        deadline = time.monotonic() + 240
        while not (dropped.exists() and dropped.stat().st_size):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(number)
        status = process.wait(240)
    finally:
        process.kill()
    if number == signal.SIGTERM:
        assert status == 130, log.read_text()
        assert "the same command continues after" in log.read_text()
        shutil.copytree(out, copy := tmp_path / "copy")
        ends = Forked(cli.main, [*command[:-1], str(copy), "--finish"], output=log)
        assert ends.wait(240) == 0, log.read_text()
        assert 0 < parquet.read_table(copy / "curated.parquet").num_rows <= 200
        assert not (copy / ".state").exists()
    done = Forked(cli.main, [*command, "--source.idle_seconds", "0.1"], output=log)
    assert done.wait(240) == 0, log.read_text()
    rows = parquet.read_table(out / "curated.parquet").to_pylist()
    assert len(rows) == 200
    assert parquet.read_table(out / "dropped.parquet").num_rows == 100


def test_a_pass_that_never_began_cannot_be_finished(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "out"
    assert curate.main([*options_of(folder, out), "--finish"]) == 1
    assert f"--finish: no pass has read a sample for {out}; run the command without" in caplog.text
    assert curate.main(options_of(folder, out)) == 0


def options_of(folder: Path, out: Path) -> list[str]:
    return ["images", "--source.root", str(folder), "--keep", "200", "--out", str(out)]


def test_the_result_is_on_the_disk_before_the_state_is_deleted(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    flushed: list[str] = []
    fsync = os.fsync

    def noted(handle: int) -> None:
        flushed.append(str(Path(f"/proc/self/fd/{handle}").readlink()))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", noted)
    assert curate.main(options_of(folder, out)) == 0
    scratch = out / ".state" / "result"
    assert {str(scratch / path.name) for path in out.iterdir()} <= set(flushed)
    assert flushed[-1] == str(out)


def test_the_same_command_continues_when_only_a_part_of_the_result_was_moved(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    replace = Path.replace

    def cut(path: Path, target: Path) -> Path:
        if target == out / "curated.parquet":
            raise OSError("the power fails")
        return replace(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", cut)
        assert curate.main(options_of(folder, out)) == 1
    assert (out / "curated-000000.tar").exists()
    assert curate.main(options_of(folder, out)) == 0
    assert parquet.read_table(out / "curated.parquet").num_rows == 90


def test_a_signal_stops_the_writing_of_the_result(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    stop = Stop()

    def signalled(*_: object) -> None:
        stop.set()

    with monkeypatch.context() as patched:
        patched.setattr(curate, "stop_source_on_signals", lambda _: stop)
        patched.setattr("stream_ssl.curation.results._add_file", signalled)
        assert curate.main(options_of(folder, out)) == 130
    assert curate.main(options_of(folder, out)) == 0
    assert parquet.read_table(out / "curated.parquet").num_rows == 90


def test_a_second_command_is_refused_while_the_first_one_writes(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    with only_writer(out, "taken"):
        assert curate.main(options_of(folder, out)) == 1
    assert f"--out {out}: another `curate` writes there; choose another folder" in caplog.text
    assert not [*out.iterdir()]
    assert curate.main(options_of(folder, out)) == 0


def test_the_same_command_continues_after_a_full_disk(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"

    def full(*_: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    with monkeypatch.context() as patched:
        patched.setattr("safetensors.numpy.save_file", full)
        assert curate.main(options_of(folder, out)) == 1
    assert caplog.records[-1].message == (
        f"--out {out} cannot be written, because its disk is full: free space there, and then the "
        "same command continues"
    )
    assert curate.main(options_of(folder, out)) == 0


def test_the_error_about_a_set_larger_than_the_memory_names_the_option_keep(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "out"
    for keep in (10**10, 10**20):
        assert curate.main([*options_of(folder, out), "--keep", str(keep)]) == 2
        said = caplog.records[-1].message
        assert said.startswith(f"lower --keep, because {keep:,} pictures do not fit: this machine")
        assert "alloc_cpu" not in said


def test_a_pass_does_not_continue_with_another_source(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = tmp_path / "out" / ".state"
    list(Curator(state, keep=200).run(ImageFolder(folder / "cats")))
    assert curate.main(options_of(folder, state.parent)) == 1
    assert "source was 'cats' and is" in caplog.records[-1].message
    assert "with another --out of curate" in caplog.records[-1].message
    assert "unexpected error" not in caplog.text
