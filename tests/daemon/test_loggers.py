"""A run with a logger in its configuration."""

from __future__ import annotations

import json
import os
from pathlib import Path

import psutil
import pytest
from harness import BATCH, TINY, processes, stop, until
from jsonargparse import Namespace

from stream_ssl.app.commands import check
from stream_ssl.config import build
from stream_ssl.observe.logger_child import LAST
from stream_ssl.observe.logger_process import Deadline


@pytest.mark.timeout(300)
def test_a_run_writes_its_metrics_and_configuration_for_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with processes(tmp_path / "run", TINY | {"loggers": ["tensorboard"]}) as run:
        daemon = run.start("run", str(run.config))
        assert run.produce(10 * BATCH).wait(60) == 0, run.log("robot")
        until(lambda: run.metric("trained_samples_total") == 10 * BATCH, lambda: run.log("run"))
        assert stop(daemon) == 0, run.log("run")
    found = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    last = found.Scalars("trained_samples_total")[-1]
    assert (last.step, last.value) == (10, 10 * BATCH)
    assert "configuration/text_summary" in found.Tags()["tensors"]


@pytest.mark.timeout(300)
def test_a_killed_learner_leaves_no_process_of_its_logger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    with processes(tmp_path / "run", TINY | {"loggers": ["wandb"]}) as run:
        daemon = run.start("learner", str(run.config))
        file = tmp_path / "run" / "wandb"
        until(lambda: any(file.glob("offline-run-*/*.wandb")), lambda: run.log("learner"))
        service = psutil.Process(daemon.pid).children(recursive=True)
        assert any("wandb-core" in " ".join(one.cmdline()) for one in service)
        daemon.kill()
        left = psutil.wait_procs(service, timeout=LAST + 30)[1]
    assert left == []


def test_mlflow_without_a_server_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    file = tmp_path / "config.yaml"
    file.write_text(json.dumps(TINY | {"run": str(tmp_path / "run"), "loggers": ["mlflow"]}))
    assert check.main([str(file)]) == 2
    assert "set it to the address of the server" in caplog.text


def test_an_unknown_logger_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.yaml"
    file.write_text('{"run": "runs/a", "loggers": ["printer"]}')
    with pytest.raises(SystemExit) as end:
        check.main([str(file)])
    assert end.value.code == 2
    assert "printer" in capsys.readouterr().err


def test_loggers_refuse_a_path_that_is_not_utf8_and_name_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The libraries of the loggers cannot write below such a path."""
    config = {"observe": {"held_out": os.fsdecode(b"set\xff")}, "pair": (1, "a")}
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("tensorboard", "wandb"):
        run = tmp_path / os.fsdecode(b"run\xff")
        settings = Namespace(run=run, loggers=[name])
        with pytest.raises(OSError, match=rf"is not UTF-8, and {name} needs .* rename it"):
            build.loggers(settings, config, Deadline())[name](0)
    settings = Namespace(run=tmp_path, loggers=["tensorboard"])
    build.loggers(settings, config, Deadline())["tensorboard"](0).close()
    assert build.in_utf8(config) == {"observe": {"held_out": "set?"}, "pair": [1, "a"]}
