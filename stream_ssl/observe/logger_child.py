"""The process that owns Weights & Biases or MLflow for a learner: `python -m` this, NAME.

It reads requests as msgpack from its standard input, and answers each with an error or none. If the
input ends without a request to close, the learner has died. Without torch, so that it stays small.
"""

from __future__ import annotations

import importlib
import io
import os
import queue
import re
import signal
import sys
import threading
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

LAST = 20.0
"""Seconds after the learner's end in which the library may send the rest."""
MOST_BYTES = 1 << 26
"""The largest request, in bytes. A mosaic has about 1 MB."""
BATCH = 1000
"""The most metrics of a request that MLflow's servers accept."""
DELETED = "previously created and deleted"
"""The text of the error of Weights & Biases about the id of a deleted run, which stays taken."""
LONGEST = 500
"""The most characters of an error, and of a parameter in every version of MLflow."""


class Wandb:
    """A run of Weights & Biases, which continues after a restart. Its files are in RUN/wandb."""

    def __init__(self, run: Path, config: Mapping[str, Any]) -> None:
        folder = run / "wandb"
        folder.mkdir(exist_ok=True)
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        for purpose in ("DATA", "CACHE"):  # a service may be unable to write to its home folder
            os.environ.setdefault(f"WANDB_{purpose}_DIR", str(folder / purpose.lower()))
        self._wandb: Any = importlib.import_module("wandb")
        known = kept_id(folder) or uuid.uuid4().hex[:12]
        keep_id(folder, known)
        try:
            self._run = self._init(run, known, config)
        except Exception as error:
            if DELETED in str(error):  # the next try begins another run
                (folder / "run-id").unlink(missing_ok=True)
            raise
        # The library's own step may only grow, and ours goes back to the last checkpoint.
        self._run.define_metric("*", step_metric="step")

    def _init(self, run: Path, known: str, config: Mapping[str, Any]) -> Any:
        return self._wandb.init(
            project=os.environ.get("WANDB_PROJECT", "stream-ssl"),
            name=os.environ.get("WANDB_NAME", run.name),
            id=os.environ.get("WANDB_RUN_ID", known),
            resume="allow",
            dir=str(run),
            config=dict(config),
            allow_val_change=True,
            settings=self._wandb.Settings(
                console="off",
                silent=True,
                disable_git=True,
                disable_code=True,
                x_disable_stats=True,
                x_disable_meta=True,
                init_timeout=30,
            ),
        )

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Log values by name."""
        self._run.log({**values, "step": step})

    def picture(self, name: str, pixels_HWC: np.ndarray[Any, Any], step: int) -> None:
        """Log a picture."""
        shown = pixels_HWC[..., 0] if pixels_HWC.shape[2] == 1 else pixels_HWC
        self._run.log({name: self._wandb.Image(shown), "step": step})

    def close(self, whole: bool) -> None:
        """Send the rest. `whole`: the learner was stopped and has not died."""
        self._run.finish(exit_code=0 if whole else 1)


class Mlflow:
    """A run on the server MLFLOW_TRACKING_URI, which continues after a restart."""

    def __init__(self, run: Path, config: Mapping[str, Any]) -> None:
        folder = run / "mlflow"
        folder.mkdir(exist_ok=True)
        # A request shall fail before the learner gives up on this process.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        mlflow: Any = importlib.import_module("mlflow")
        self._metric: Any = mlflow.entities.Metric
        self._client = mlflow.MlflowClient()
        self._id = self._continued(kept_id(folder), mlflow.exceptions.MlflowException)
        if not self._id:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "stream-ssl")
            found = self._client.get_experiment_by_name(name)
            if found and found.lifecycle_stage == "deleted":  # its name stays taken
                raise ValueError(
                    f"the experiment {name!r} is deleted on the server: set MLFLOW_EXPERIMENT_NAME "
                    f"to another, or: mlflow experiments restore -x {found.experiment_id}"
                )
            experiment = found.experiment_id if found else self._client.create_experiment(name)
            self._id = self._client.create_run(experiment, run_name=run.name).info.run_id
            keep_id(folder, self._id)
            params = [mlflow.entities.Param(*pair) for pair in parameters(config).items()]
            for first in range(0, len(params), 100):
                self._client.log_batch(self._id, params=params[first : first + 100])
        self._client.log_dict(self._id, dict(config), "configuration.yaml")

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Log values by name."""
        now = int(time.time() * 1000)
        rows = [self._metric(allowed(name), value, now, step) for name, value in values.items()]
        for first in range(0, len(rows), BATCH):
            self._client.log_batch(self._id, metrics=rows[first : first + BATCH])

    def picture(self, name: str, pixels_HWC: np.ndarray[Any, Any], step: int) -> None:
        """Log a picture."""
        self._client.log_image(self._id, pixels_HWC, key=name, step=step, synchronous=True)

    def close(self, whole: bool) -> None:
        """End the run. `whole`: the learner was stopped and has not died."""
        self._client.set_terminated(self._id, "FINISHED" if whole else "KILLED")

    def _continued(self, known: str, missing: type[Exception]) -> str:
        """Return the id of the run if the server has it, and "" if it does not or was deleted."""
        if not known:
            return ""
        try:
            if self._client.get_run(known).info.lifecycle_stage == "deleted":
                return ""
            self._client.update_run(known, status="RUNNING")
        except missing as error:
            if getattr(error, "error_code", "") != "RESOURCE_DOES_NOT_EXIST":
                raise
            return ""
        return known


def allowed(name: str) -> str:
    """Return a name of a metric with characters and parts that MLflow accepts.

    Only the first slash stays. MLflow may store a metric as a file, which cannot have the name of a
    folder, and the names of two producers may be "robot" and "robot/left".
    """
    parts = re.sub(r"[^\w./ -]", "_", name).split("/")
    metric, *labels = ("_" if part in ("", ".", "..") else part for part in parts)
    return f"{metric}/{' '.join(labels)}" if labels else metric


def parameters(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return the options of nested sections as "section.option", shortened."""
    found: dict[str, str] = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            found |= parameters(value, f"{prefix}{name}.")
        else:
            key = allowed(f"{prefix}{name}").replace("/", " ")  # no folders of options
            found[key] = str(value)[:LONGEST]
    return found


def kept_id(folder: Path) -> str:
    """Return the id that an earlier process kept in the folder, or ""."""
    try:
        with (folder / "run-id").open() as file:
            return file.read(100).strip()
    except FileNotFoundError:
        return ""


def keep_id(folder: Path, known: str) -> None:
    """Keep an id for the next process."""
    (folder / "run-id").write_text(known + "\n")


def serve(name: str, requests: io.FileIO, answers: io.FileIO) -> None:
    """Answer requests until the learner closes the logger or dies."""
    read: queue.Queue[dict[str, Any] | None] = queue.Queue()
    threading.Thread(target=_read, args=(requests, read), daemon=True).start()
    logger: Wandb | Mlflow | None = None
    while (request := read.get()) is not None:
        kind, failure = request["kind"], ""
        try:
            if kind == "open":
                logger = LOGGERS[name](Path(request["run"]), request["config"])
            elif logger is not None:
                _pass_on(logger, kind, request)
        except Exception as error:  # libraries raise errors of any type
            text = " ".join(str(error).split())[:LONGEST]
            failure = f"{type(error).__name__}: {text}"
        answers.write(msgpack.packb(failure))
        if kind == "close":
            return
    if logger is not None:
        logger.close(whole=False)


def _pass_on(logger: Wandb | Mlflow, kind: str, request: dict[str, Any]) -> None:
    if kind == "scalars":
        logger.scalars(request["values"], request["step"])
    elif kind == "picture":
        pixels_HWC = np.frombuffer(request["pixels"], np.uint8).reshape(request["shape"])
        logger.picture(request["name"], pixels_HWC, request["step"])
    else:
        logger.close(whole=True)


def _read(requests: io.FileIO, read: queue.Queue[dict[str, Any] | None]) -> None:
    """Queue the requests. After their end, end this process and its own ones within LAST."""
    for request in msgpack.Unpacker(requests, max_buffer_size=MOST_BYTES):
        read.put(request)
    read.put(None)
    time.sleep(LAST)
    os.killpg(0, signal.SIGKILL)


LOGGERS: dict[str, type[Wandb] | type[Mlflow]] = {"wandb": Wandb, "mlflow": Mlflow}


def main() -> None:
    """Serve a learner that started this process as the first of a session."""
    for number in (signal.SIGINT, signal.SIGTERM):  # meant for the learner, which closes us
        signal.signal(number, signal.SIG_IGN)
    with io.FileIO(os.dup(1), "wb") as answers, io.FileIO(0) as requests:
        os.dup2(2, 1)  # libraries print
        try:
            serve(sys.argv[1], requests, answers)
        except BrokenPipeError:  # the learner has died
            pass
        finally:  # do not wait for the threads of a library
            os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
