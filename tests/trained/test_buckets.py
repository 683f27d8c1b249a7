"""Buckets: exports and copies of checkpoints, on servers that work, fail, hang or are absent."""

from __future__ import annotations

import errno
import ftplib
import json
import logging
import re
import resource
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from evaluation_run import write_run
from fsspec.implementations.local import LocalFileSystem
from harness import BATCH, TINY, processes, stop, until
from other_disk import on_another_disk
from prometheus_client import CollectorRegistry

import stream_ssl
from stream_ssl.app.commands import export
from stream_ssl.buckets import copies as copying
from stream_ssl.buckets import folders
from stream_ssl.buckets.copies import CheckpointCopies, CopySettings
from stream_ssl.buckets.folders import Bucket
from stream_ssl.durable import seal
from stream_ssl.observe.metrics import LearnerMetrics

KEYS = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of a server of S3."""
    from moto.server import ThreadedMotoServer

    found = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    found.start()
    yield "http://{}:{}".format(*found.get_host_and_port())
    found.stop()


@pytest.fixture
def s3(server: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A file system with an empty bucket "box", which the environment describes."""
    for name, value in {**KEYS, "AWS_ENDPOINT_URL": server}.items():
        monkeypatch.setenv(name, value)
    files = fsspec.filesystem("s3", skip_instance_cache=True, use_listings_cache=False)
    if files.exists("box"):
        files.rm("box", recursive=True)
    files.mkdir("box")
    return files


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bucket") / "run"
    write_run(folder, stages=2, held=40, memory={"capacity": 16})
    return folder


def hanging() -> socket.socket:
    """A server that accepts connections and answers nothing."""
    found = socket.create_server(("127.0.0.1", 0), backlog=100)
    found.settimeout(0)
    return found


def address(server: socket.socket) -> str:
    return f"http://127.0.0.1:{server.getsockname()[1]}"


def gcs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Start a server of Google's buckets with the bucket "box", and return the server."""
    from gcp_storage_emulator.server import create_server

    found = create_server("127.0.0.1", 0, in_memory=True, default_bucket="box")
    found.start()
    port = found._api._httpd.socket.getsockname()[1]
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
    return found


def images() -> torch.Tensor:
    return torch.arange(2 * 144, dtype=torch.uint8).reshape(2, 1, 12, 12)


def test_an_export_to_a_bucket_gives_the_features_of_the_run(
    s3: Any, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected_BF = stream_ssl.load_encoder(run)(images())
    google = gcs(monkeypatch)
    try:
        for url in ("s3://box/e/x", f"file://{tmp_path}/e/x", "gs://box/e/x"):
            for again in range(2):
                arguments = ["--encoder", url, "--memory", url.replace("/x", "/m"), "--no-onnx"]
                assert export.main([str(run), *arguments]) == 0, (url, again)
            files, place = fsspec.core.url_to_fs(url, use_listings_cache=False)
            local = tmp_path / url.partition(":")[0]
            local.mkdir()
            for name in sorted(files.ls(place, detail=False)):
                files.get_file(name, str(local / Path(name).name))
            assert torch.equal(stream_ssl.load_encoder(local)(images()), expected_BF)
            assert "memory-000000.tar" in Bucket(url.replace("/x", "/m")).names()
    finally:
        google.stop()


def test_a_file_that_no_export_wrote_is_kept(
    s3: Any, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    s3.pipe_file("box/e/mine.txt", b"mine")
    assert export.main([str(run), "--encoder", "s3://box/e", "--no-onnx"]) == 2
    assert "--encoder s3://box/e contains mine.txt, which no export has written" in caplog.text
    assert s3.find("box/e") == ["box/e/mine.txt"]


def test_a_sealed_folder_of_another_kind_is_kept(
    s3: Any, run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Bucket("s3://box/ck").upload((run / "checkpoints" / "latest").resolve())
    s3.pipe_file("box/data/manifest.json", b'{"files": {"train.tar": {"sha256": "0"}}}')
    s3.pipe_file("box/data/train.tar", b"theirs")
    s3.pipe_file("box/list/manifest.json", b'{"files": ["train.tar"]}')
    s3.pipe_file("box/list/train.tar", b"theirs")
    before = {name: s3.cat_file(name) for name in s3.find("box")}
    for folder in ("ck", "data", "list"):
        assert export.main([str(run), "--encoder", f"s3://box/{folder}", "--no-onnx"]) == 2
        assert f"s3://box/{folder} contains " in caplog.text
    assert {name: s3.cat_file(name) for name in s3.find("box")} == before


@pytest.mark.parametrize("earlier", [False, True], ids=["first", "over-an-earlier"])
def test_an_export_that_failed_is_completed_by_the_same_command(
    s3: Any, run: Path, earlier: bool
) -> None:
    command, bucket = [str(run), "--encoder", "s3://box/e", "--no-onnx"], Bucket("s3://box/e")
    if earlier:
        s3.pipe_file("box/e/old.bin", b"of an earlier version")
        entries = {name: {"sha256": "0"} for name in ("encoder.json", "old.bin")}
        s3.pipe_file("box/e/manifest.json", json.dumps({"files": entries}).encode())
        s3.pipe_file("box/e/encoder.json", b"{}")
    put, sent = type(s3).put_file, []

    def failing(self: Any, source: str, *rest: Any, **more: Any) -> Any:
        sent.append(Path(source).name)
        if len(sent) == 2:
            raise ConnectionError("the line is down")
        return put(self, source, *rest, **more)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(type(s3), "put_file", failing)
        assert export.main(command) == 1
    assert not bucket.listed(), "no reader takes it for whole"
    assert len(bucket.names()) > 1
    assert export.main(command) == 0
    assert bucket.names() == bucket.listed()


def test_export_names_places_that_cannot_be_written(
    s3: Any, run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cases = {
        "s3://absent/e": "--encoder s3://absent/e cannot be written: ",
        "s9://b/e": "Protocol not known: s9; give an address such as s3://bucket/folder",
        "s3://": "s3:// names no bucket",
    }
    for url, reason in cases.items():
        caplog.clear()
        assert export.main([str(run), "--encoder", url, "--no-onnx"]) in (1, 2)
        assert reason in caplog.text

    def not_installed(*_: Any, **__: Any) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", not_installed)
    caplog.clear()
    assert export.main([str(run), "--encoder", "s3://box/e", "--no-onnx"]) == 2
    assert "pip install 'stream-ssl[s3]'" in caplog.text


def test_export_prints_an_address_after_its_files_are_uploaded(
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    upload, said, sent = Bucket.upload, list[str](), list[int]()

    def watched(self: Bucket, folder: Path, target: str = "", tell: Any = None) -> None:
        said.append(capsys.readouterr().out)
        upload(self, folder, target, lambda size: (sent.append(size), tell(size)))
        assert sum(sent) == sum(path.stat().st_size for path in folder.iterdir())
        sent.clear()
        if "memory" in self.url:
            raise ConnectionError("the line is down")

    monkeypatch.setattr(Bucket, "upload", watched)
    urls = [f"file://{tmp_path}/{name}" for name in ("encoder", "memory")]
    command = [str(run), "--encoder", urls[0], "--memory", urls[1], "--no-onnx"]
    assert export.main(command) == 1
    assert "encoder: " not in said[0]
    assert f"encoder: {urls[0]}" in said[1]
    assert "memory: " not in said[1] + capsys.readouterr().out
    assert f"MB to {urls[0]}" in caplog.text


def test_the_error_about_a_full_disk_names_the_address(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Bucket, "upload", full)
    url = f"file://{tmp_path}/e"
    assert export.main([str(run), "--encoder", url, "--no-onnx"]) == 1
    assert f"--encoder {url} cannot be written, because its disk is full" in caplog.text
    assert "credentials" not in caplog.text


def checkpoint(folder: Path, step: int) -> Path:
    """Write a sealed folder with the name of a checkpoint."""
    found = folder / f"step-{step:09d}"
    found.mkdir(parents=True)
    (found / "state.json").write_text(json.dumps({"step": step}))
    (found / "model.safetensors").write_bytes(bytes(range(256)) * step)
    seal(found)
    return found


def copier(run: Path, to: str, now: list[float]) -> tuple[CheckpointCopies, LearnerMetrics]:
    metrics = LearnerMetrics(CollectorRegistry())
    settings = CopySettings(to, every_seconds=0.1)
    of_copies = metrics.of_checkpoints
    made = CheckpointCopies(settings, run, run / "checkpoints", of_copies, lambda: now[0])
    return made, metrics


def value(metrics: LearnerMetrics, name: str) -> float | None:
    return metrics.registry.get_sample_value(f"stream_ssl_checkpoint_{name}")


@pytest.mark.parametrize("protocol", ["s3", "file"])
def test_copies_of_checkpoints_are_whole_and_the_newest_three_stay(
    s3: Any, tmp_path: Path, protocol: str
) -> None:
    place = {"s3": "s3://box/laptop", "file": f"file://{tmp_path}/box/laptop"}[protocol]
    files, root = fsspec.core.url_to_fs(place, use_listings_cache=False)
    copies, metrics = copier(tmp_path, place, [0.0])
    copies.copy()
    assert value(metrics, "copies_total") == 0
    made = []
    for step in (10, 20, 30, 40):
        made.append(checkpoint(tmp_path / "checkpoints", step))
        copies.copy()
        copies.copy()  # nothing new
    assert value(metrics, "copies_total") == 4
    assert value(metrics, "copy_step") == 40
    assert Bucket(place).names() == {one.name for one in made[1:]}
    for path in made[-1].iterdir():
        assert files.cat_file(f"{root}/{made[-1].name}/{path.name}") == path.read_bytes()
    assert not (tmp_path / copying.SCRATCH).exists()
    other, _ = copier(tmp_path / "new", place, [0.0])
    fresh = checkpoint(tmp_path / "new" / "checkpoints", 5)
    other.copy()
    assert Bucket(place).names() == {fresh.name, *(one.name for one in made[2:])}


def test_an_empty_folder_that_cannot_be_removed_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*_: object) -> None:
        raise ftplib.error_perm("550 Permission denied")  # no OSError, as with other protocols

    monkeypatch.setattr(LocalFileSystem, "rmdir", denied)
    copies, metrics = copier(tmp_path, f"file://{tmp_path}/box", [0.0])
    for step in (10, 20, 30, 40):
        checkpoint(tmp_path / "checkpoints", step)
        copies.copy()
    assert value(metrics, "copy_failures_total") == 0
    assert value(metrics, "copy_step") == 40


def test_a_place_with_room_for_three_copies_takes_the_next_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    box, put, rooms = tmp_path / "box", LocalFileSystem.put_file, [copying.KEEP]

    def bounded(self: LocalFileSystem, source: str, target: str) -> None:
        if len({path.parent for path in box.glob("*/*")}) > rooms[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        put(self, source, target)

    monkeypatch.setattr(LocalFileSystem, "put_file", bounded)
    copies, metrics = copier(tmp_path, f"file://{box}", [0.0])
    made = []
    for step in (10, 20, 30, 40, 50):
        made.append(checkpoint(tmp_path / "checkpoints", step))
        copies.copy()
    assert value(metrics, "copy_failures_total") == 0
    assert {path.name for path in box.iterdir()} == {one.name for one in made[2:]}
    rooms[0] = 0  # other files take the room
    for step in (60, 70, 80):
        made.append(checkpoint(tmp_path / "checkpoints", step))
        copies.copy()
    assert value(metrics, "copy_failures_total") == 3
    whole = {path.parent.name for path in box.glob("*/manifest.json")}
    assert whole == {one.name for one in made[3:5]}
    assert len(list(box.iterdir())) == len(whole) + 1  # what failed before was removed
    rooms[0] = copying.KEEP
    copies.copy()
    assert value(metrics, "copy_step") == 80
    assert {path.name for path in box.iterdir()} == {*whole, made[-1].name}


def test_no_copy_goes_to_the_mount_point_of_a_disk_that_is_away(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nas = tmp_path / "nas"
    with on_another_disk(tmp_path) as disk:
        nas.symlink_to(disk)
        copies, metrics = copier(tmp_path, f"file://{nas}/laptop", [0.0])
        checkpoint(tmp_path / "checkpoints", 10)
        copies.copy()
        nas.unlink()
        nas.mkdir()  # the disk is not mounted any more
        checkpoint(tmp_path / "checkpoints", 20)
        copies.copy()
        assert "earlier copies is not mounted here: mount it again" in caplog.text
        assert list(nas.iterdir()) == []
        nas.rmdir()
        nas.symlink_to(disk)
        copies.copy()
        assert value(metrics, "copy_failures_total") == 1
        assert len(list((nas / "laptop").iterdir())) == 2


def test_failed_copies_are_logged_once_and_counted_until_a_copy_succeeds(
    s3: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    now = [100.0]
    copies, metrics = copier(tmp_path, "s3://later/laptop", now)
    checkpoint(tmp_path / "checkpoints", 10)
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            copies.copy()
            now[0] += 700
        assert value(metrics, "copy_failures_total") == 3
        assert value(metrics, "copy_late_seconds") == 2100
        assert caplog.text.count("was not copied to s3://later/laptop, training continues") == 1
        s3.mkdir("later")
        copies.copy()
    assert value(metrics, "copy_late_seconds") == 0
    assert "checkpoints are copied to s3://later/laptop again" in caplog.text


def test_copies_use_credentials_that_were_renewed_in_their_file(
    s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "credentials"
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    copies, metrics = copier(tmp_path, "s3://box/laptop", [0.0])
    checkpoint(tmp_path / "checkpoints", 10)
    copies.copy()
    assert value(metrics, "copy_failures_total") == 1
    file.write_text("[default]\naws_access_key_id = a\naws_secret_access_key = b\n")
    copies.copy()
    assert value(metrics, "copy_step") == 10


def test_a_restart_keeps_the_copy_that_the_bucket_holds(
    s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint(tmp_path / "checkpoints", 10)
    copier(tmp_path, "s3://box/laptop", [0.0])[0].copy()

    def lost(*_: Any, **__: Any) -> None:
        raise OSError("the connection was lost")

    copies, metrics = copier(tmp_path, "s3://box/laptop", [0.0])
    with monkeypatch.context() as patch:
        patch.setattr(copies._bucket._files, "put_file", lost)
        copies.copy()
    assert value(metrics, "copy_step") == 10
    assert Bucket("s3://box/laptop").listed(path.name) == {one.name for one in path.iterdir()}
    (path / "state.json").write_text(json.dumps({"step": 10, "run": "another one"}))
    (path / "manifest.json").unlink()
    seal(path)
    copier(tmp_path, "s3://box/laptop", [0.0])[0].copy()
    assert s3.cat_file(f"box/laptop/{path.name}/state.json") == (path / "state.json").read_bytes()


def test_a_copy_succeeds_after_checkpoints_could_not_be_listed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copies, metrics = copier(tmp_path, f"file://{tmp_path}/copies", [0.0])
    checkpoint(tmp_path / "checkpoints", 10)
    least, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, most))
    try:
        copies.copy()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (least, most))
    assert value(metrics, "copy_failures_total") == 1
    assert "training continues: OSError: [Errno 24] Too many open files" in caplog.text
    copies.copy()
    assert value(metrics, "copy_step") == 10


@pytest.mark.parametrize("call", ["names", "listed"])
def test_a_hanging_server_is_an_error_after_four_tries(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(folders.TIMEOUTS, "read_timeout", 0.1)
    tries = 0
    with hanging() as server:
        for name, told in {**KEYS, "AWS_ENDPOINT_URL": address(server)}.items():
            monkeypatch.setenv(name, told)
        with pytest.raises(OSError, match="timeout"):
            getattr(Bucket("s3://box/laptop"), call)()
        with suppress(BlockingIOError):
            while True:
                server.accept()[0].close()
                tries += 1
    assert tries == 4


def test_a_hanging_server_delays_neither_the_caller_nor_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(copying, "LAST_COPY_SECONDS", 0.5)
    with hanging() as server:
        for name, told in {**KEYS, "AWS_ENDPOINT_URL": address(server)}.items():
            monkeypatch.setenv(name, told)
        now = [0.0]
        copies, metrics = copier(tmp_path, "s3://box/laptop", now)
        checkpoint(tmp_path / "checkpoints", 10)
        copies.start()
        until(lambda: (tmp_path / copying.SCRATCH).exists(), lambda: "no copy began")
        now[0] = 2000.0
        assert value(metrics, "copy_late_seconds") == 2000
        copies.close()
    assert "the last checkpoint was not copied to s3://box/laptop within" in caplog.text


@pytest.mark.timeout(300)
def test_a_run_learns_without_its_bucket_and_status_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hanging() as server:
        absent = address(server)
    for name, told in {**KEYS, "AWS_ENDPOINT_URL": absent}.items():
        monkeypatch.setenv(name, told)
    settings = TINY | {"copies": {"to": "s3://box/laptop", "every_seconds": 0.5}}
    with processes(tmp_path / "run", settings) as run:
        daemon = run.start("run", str(run.config))
        assert run.produce(10 * BATCH).wait(60) == 0, run.log("robot")
        until(lambda: run.metric("trained_samples_total") == 10 * BATCH, lambda: run.log("run"))
        until(lambda: run.metric("checkpoint_copy_failures_total"), lambda: run.log("run"))
        shown = run.start("status", str(tmp_path / "run"))
        shown.wait(60)
        told = " ".join(run.log("status").replace("│", " ").split())
        assert re.search(r"in the bucket: none yet, a checkpoint waits for \d+ s, \d+ failed", told)
        assert stop(daemon) == 0, run.log("run")
        assert run.log("run").count("was not copied to s3://box/laptop, training continues") == 1


def test_copy_settings_reject_wrong_values() -> None:
    cases = {
        "copies.to is 'laptop': give an address": {"to": "laptop"},
        "copies.every_seconds is 0": {"to": "s3://box", "every_seconds": 0},
    }
    for reason, settings in cases.items():
        with pytest.raises(ValueError, match=reason):
            CopySettings(**settings)  # type: ignore[arg-type]
