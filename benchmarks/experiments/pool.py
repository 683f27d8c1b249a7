"""Runs in processes of one thread each.

They use all cores, and the result of a run does not depend on the runs that are active beside it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path
from threading import Thread
from typing import Any

from benchmarks.experiments.data import LabelledData, stored
from benchmarks.experiments.results import AnyRun

Once = Callable[[Any, LabelledData], dict[str, Any]]
"""Makes a run and returns its numbers. It is pickled by its import name."""

DATA: LabelledData | None = None
"""The data of this worker process."""


def finished(
    once: Once,
    runs: Sequence[AnyRun],
    data: Path,
    workers: int,
    minutes: float | None = None,
    on_cpu: bool = True,
    clock: Callable[[], float] = time.monotonic,
) -> Generator[tuple[AnyRun, dict[str, Any]], None, None]:
    """Yield runs and their numbers as they end.

    Runs begin in order, and no run begins that would end after `minutes`. The duration of a run is
    estimated from the finished runs, in proportion to the cost.

    Args:
        data: a folder that `data.store` wrote.
        minutes: time limit; None: no limit.
        on_cpu: whether each worker computes on one thread.
    """
    began = clock()
    waiting, on = list(runs), dict[Future[Any], tuple[AnyRun, float]]()
    rate: list[tuple[float, float]] = []  # (seconds, cost) of finished runs

    def fits(run: AnyRun) -> bool:
        if minutes is None:
            return True
        seconds = sum(took for took, _ in rate) / max(1e-9, sum(cost for _, cost in rate))
        return clock() - began + (seconds * run.cost if rate else 0.0) < 60 * minutes

    if on_cpu:
        os.environ["OMP_NUM_THREADS"] = "1"  # a worker reads it when it imports torch
    with ProcessPoolExecutor(workers, get_context("spawn"), _start, (str(data),)) as pool:
        stopped = True
        try:
            while waiting or on:
                while waiting and len(on) < workers and fits(waiting[0]):
                    run = waiting.pop(0)
                    on[pool.submit(_work, once, run)] = (run, clock())
                if not on:
                    break
                for future in wait(on, return_when=FIRST_COMPLETED).done:
                    run, since = on.pop(future)
                    rate.append((clock() - since, run.cost))
                    yield run, future.result()
            stopped = False
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            # Ctrl-C may come when a worker has started and its run is not in `on` yet.
            for child in active_children() if stopped else ():
                child.kill()


def _start(data: str) -> None:
    global DATA
    # The parent process handles Ctrl-C. A worker ends with its parent.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=_end_with_the_parent, daemon=True).start()
    import logging

    import torch

    torch.set_num_threads(1)
    logging.getLogger("faiss").setLevel(logging.WARNING)  # it logs each missing build
    DATA = stored(Path(data))


def _end_with_the_parent() -> None:
    """End this worker when its parent was killed. Its queues alone would keep it for ever."""
    parent = parent_process()
    assert parent is not None, "only workers run this"
    parent.join()
    os._exit(1)


def _work(once: Once, run: AnyRun) -> dict[str, Any]:
    assert DATA is not None
    return once(run, DATA)
