"""Runs in processes of one thread each, so that every core is used and a run's result does not
depend on what runs beside it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any

from stream_ssl.reproduction.arms import Experiment, Run
from stream_ssl.reproduction.data import Data, stored
from stream_ssl.reproduction.presets import Preset

DATA: Data | None = None
"""A worker's own."""


def finished(
    experiment: Experiment,
    runs: Sequence[Run],
    preset: Preset,
    data: Path,
    workers: int,
    minutes: float | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Generator[tuple[Run, dict[str, Any]], None, None]:
    """Runs and their numbers as they end; begun in order, none that would end after `minutes`.

    How long a run will take is told from those that ended, by their samples.

    Args:
        experiment: whose runs.
        runs: what is to be done.
        preset: settings.
        data: folder of `data.store`.
        workers: processes; 1 or more.
        minutes: null: as long as it takes.
        clock: seconds.
    """
    began = clock()
    waiting, on = list(runs), dict[Future[Any], tuple[Run, float]]()
    rate: list[tuple[float, float]] = []  # seconds, cost

    def fits(run: Run) -> bool:
        if minutes is None:
            return True
        seconds = sum(took for took, _ in rate) / max(1e-9, sum(cost for _, cost in rate))
        return clock() - began + (seconds * cost_of(run) if rate else 0.0) < 60 * minutes

    if preset.device == "cpu":
        os.environ["OMP_NUM_THREADS"] = "1"  # read when a worker loads torch
    os.environ["PYTHONSAFEPATH"] = "1"  # a worker imports no file of the working folder
    with ProcessPoolExecutor(workers, get_context("spawn"), _start, (str(data),)) as pool:
        try:
            while waiting or on:
                while waiting and len(on) < workers and fits(waiting[0]):
                    run = waiting.pop(0)
                    on[pool.submit(_work, experiment, run, preset)] = (run, clock())
                if not on:
                    return
                for future in wait(on, return_when=FIRST_COMPLETED).done:
                    run, since = on.pop(future)
                    rate.append((clock() - since, cost_of(run)))
                    yield run, future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for child in active_children() if on else ():
                child.kill()


def cost_of(run: Run) -> float:
    """About how long a run takes, relative to others: samples and the evaluation, and views."""
    views = float(run.arm.method_options.get("views", 2))
    return 0.25 + run.arm.share * views / 2


def _start(data: str) -> None:
    global DATA
    # The user's Ctrl-C is the parent's affair.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import logging

    import torch

    torch.set_num_threads(1)
    logging.getLogger("faiss").setLevel(logging.WARNING)  # it tells of each build not there
    DATA = stored(Path(data))


def _work(experiment: Experiment, run: Run, preset: Preset) -> dict[str, Any]:
    from stream_ssl.reproduction.training import run_once

    assert DATA is not None
    return run_once(experiment, run, preset, DATA)
