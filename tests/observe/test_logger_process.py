"""Weights & Biases and MLflow in processes of their own: their stored data, and failing servers."""

from __future__ import annotations

import json
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from PIL import Image

from stream_ssl.observe import logger_process
from stream_ssl.observe.logger_child import Wandb, allowed, parameters
from stream_ssl.observe.logger_process import Deadline, LoggerProcess
from stream_ssl.observe.loggers import ShownSlots

CONFIG = {"run": "runs/a", "memory": {"capacity": 32, "policy": {}}}
IMAGE_CHW = torch.arange(3 * 4 * 5, dtype=torch.uint8).reshape(3, 4, 5)
BLOCK = 32768


def wandb_records(file: Path) -> Iterator[Any]:
    """Yield the records of a .wandb file: blocks of 32 KiB, as in a log of LevelDB."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, place, parts = file.read_bytes(), 7, b""
    while place + 7 <= len(content):
        if BLOCK - place % BLOCK < 7:
            place += BLOCK - place % BLOCK
            continue
        _, size, kind = struct.unpack("<IHB", content[place : place + 7])
        parts += content[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # the only or the last part of a record
            yield Record.FromString(parts)
            parts = b""


def rows(file: Path) -> list[dict[str, Any]]:
    """Return the logged rows of a .wandb file as JSON texts by name."""
    return [
        {item.key or "/".join(item.nested_key): item.value_json for item in one.history.item}
        for one in wandb_records(file)
        if one.HasField("history")
    ]


def test_a_new_wandb_run_replaces_a_deleted_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W&B accepts the id of a deleted run for no other run."""
    ids: list[str] = []

    def init(**options: Any) -> Any:
        ids.append(options["id"])
        if len(ids) == 1:
            raise RuntimeError(f"HTTP 409: run e/p/{ids[0]} was previously created and deleted")
        return SimpleNamespace(define_metric=lambda *_, **__: None)

    wandb = SimpleNamespace(init=init, Settings=lambda **_: None)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for name in ("WANDB_ERROR_REPORTING", "WANDB_DATA_DIR", "WANDB_CACHE_DIR"):
        monkeypatch.setenv(name, "")
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)
    with pytest.raises(RuntimeError, match="previously created and deleted"):
        Wandb(tmp_path, CONFIG)
    for _ in range(2):
        Wandb(tmp_path, CONFIG)
    assert ids[0] != ids[1] == ids[2]


def children() -> list[psutil.Process]:
    """Return the processes of loggers that this process started, and their children."""
    mine = psutil.Process().children(recursive=True)
    return [one for one in mine if "logger_child" in " ".join(one.cmdline())]


@contextmanager
def hanging_server() -> Iterator[str]:
    """Yield the address of a server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def log_twice(name: str, run: Path) -> None:
    """Log a row and a picture from a first process, and an earlier step from a second one."""
    for steps in ((3, 4), (2,)):
        logger = LoggerProcess(name, run, CONFIG, Deadline())
        for step in steps:
            logger.scalars({"step": float(step), "loss/a": step / 2, "loss/a/b": 0.0}, step)
        logger.memory(ShownSlots(torch.ones(1, 2), IMAGE_CHW[None], [(0, -1, "p")]), steps[-1])
        logger.close()


@pytest.mark.timeout(240)
def test_wandb_keeps_rows_pictures_and_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    log_twice("wandb", tmp_path)
    files = sorted(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))  # by time
    found = [row for file in files for row in rows(file) if "loss/a" in row]
    assert [(row["step"], row["loss/a"]) for row in found] == [("3", "1.5"), ("4", "2"), ("2", "1")]
    assert len({file.name for file in files}) == 1  # one run, continued
    configs = [one.run.config.update for one in wandb_records(files[0]) if one.HasField("run")]
    held = {item.key: json.loads(item.value_json) for item in configs[0]}
    assert held["memory"]["capacity"] == 32
    pictures = sorted(tmp_path.glob("wandb/offline-run-*/files/media/images/memory_*.png"))
    assert len(pictures) == 2
    shown = np.asarray(Image.open(pictures[0]))
    assert np.array_equal(shown, IMAGE_CHW.permute(1, 2, 0).numpy())
    assert children() == []


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a run that two processes logged to MLflow. Its runs are in "store"."""
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", f"file://{folder}/store")
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        log_twice("mlflow", folder)
        yield folder


def delete(meta: Path) -> None:
    """Delete a run or an experiment without MLflow, whose import takes two seconds."""
    text = meta.read_text()
    assert "lifecycle_stage: active" in text
    meta.write_text(text.replace("lifecycle_stage: active", "lifecycle_stage: deleted"))


@pytest.mark.timeout(240)
def test_mlflow_keeps_rows_pictures_and_the_configuration(logged: Path) -> None:
    (metric,) = logged.glob("store/*/*/metrics/loss/a")  # one run, continued
    run = metric.parents[2]
    rows = [line.split() for line in metric.read_text().splitlines()]
    assert [(float(value), int(step)) for _, value, step, *_ in rows] == [(1.5, 3), (2, 4), (1, 2)]
    assert (run / "metrics/loss/a b").exists()  # a file beside that of "loss/a"
    assert (run / "params/memory.capacity").read_text() == "32"
    assert "capacity: 32" in (run / "artifacts/configuration.yaml").read_text()
    assert "status: 3" in (run / "meta.yaml").read_text()  # finished
    pictures = [one for one in (run / "artifacts/images").iterdir() if one.suffix == ".png"]
    assert len(pictures) == 2
    shown = np.asarray(Image.open(pictures[0]))
    assert np.array_equal(shown, IMAGE_CHW.permute(1, 2, 0).numpy())
    assert children() == []


@pytest.mark.timeout(240)
def test_a_new_mlflow_run_replaces_a_deleted_run(logged: Path) -> None:
    kept = logged / "mlflow" / "run-id"
    before = kept.read_text().strip()
    (meta,) = logged.glob(f"store/*/{before}/meta.yaml")
    delete(meta)
    logger = LoggerProcess("mlflow", logged, CONFIG, Deadline())
    logger.scalars({"loss": 0.5}, 7)
    logger.close()
    now = kept.read_text().strip()
    assert now != before
    (metric,) = logged.glob(f"store/*/{now}/metrics/loss")
    assert [line.split()[2] for line in metric.read_text().splitlines()] == ["7"]


@pytest.mark.timeout(240)
def test_the_error_names_a_deleted_experiment_of_mlflow_and_the_remedy(
    logged: Path, tmp_path: Path
) -> None:
    (folder,) = (
        one.parent for one in logged.glob("store/*/meta.yaml") if "stream-ssl" in one.read_text()
    )
    delete(folder / "meta.yaml")
    folder.rename(logged / "store" / ".trash" / folder.name)
    remedy = f"'stream-ssl' is deleted on the server: .* experiments restore -x {folder.name}"
    with pytest.raises(OSError, match=remedy):
        LoggerProcess("mlflow", tmp_path, CONFIG, Deadline())
    assert children() == []


def test_a_logger_that_does_not_open_in_time_times_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logger_process, "OPEN", 0.3)  # less than its library needs
    with pytest.raises(TimeoutError, match="no answer in 0 s to 'open'"):
        LoggerProcess("mlflow", tmp_path, CONFIG, Deadline())
    assert children() == []


@pytest.mark.timeout(240)
def test_the_end_of_a_run_does_not_wait_for_a_hanging_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deadline = Deadline()
    with hanging_server() as address:
        monkeypatch.setenv("WANDB_BASE_URL", address)
        monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
        monkeypatch.setattr(logger_process, "LAST", 0.5)
        threading.Timer(1.0, deadline.start).start()
        begun = time.monotonic()
        with pytest.raises(TimeoutError, match="no answer"):
            LoggerProcess("wandb", tmp_path, CONFIG, deadline)
    assert time.monotonic() - begun < 10
    assert children() == []


def test_names_that_mlflow_would_refuse_are_changed() -> None:
    assert allowed("memory_slots/working") == "memory_slots/working"
    assert allowed("held/cam:1/../") == "held/cam_1 _ _"
    shares = {"shares": {"robot": 1, "robot/left": 2}}  # no file needs a folder's name
    assert parameters(shares) == {"shares.robot": "1", "shares.robot left": "2"}
    assert parameters({"a": {"b": {"c": 1}}, "d": {}, "e": "x" * 600}) == {
        "a.b.c": "1",
        "d": "{}",
        "e": "x" * 500,
    }
