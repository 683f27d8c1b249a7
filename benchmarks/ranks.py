"""Speed of one and of two ranks, and the time that training waits for a checkpoint.

`python -m benchmarks ranks`. The ranks are processes on this machine that communicate with gloo, on
one thread each. torchrun starts them as in a real run, with this file as their program.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.full_learner import fill
from benchmarks.learner import BATCH, SLOTS, in_ram, learner, steps_of
from stream_ssl.learning.checkpoint import Checkpointer
from stream_ssl.learning.learner import Learner
from stream_ssl.memory.descriptors import Thumbnail
from stream_ssl.memory.process_group import SINGLE_PROCESS, ProcessGroup, RankGroup

WARM_UP, STEPS, ROUNDS = 20, 30, 2
LARGE = 640_000
"""Number of slots with 28 x 28 images whose state takes 1 GB."""
SAVES = 2
MOST_SHARE = 0.1
"""Allowed wait for a background save, as a share of a synchronous save."""


def run() -> list[dict[str, Any]]:
    """Return rows of samples/s and traffic of one and two ranks, and of checkpoint seconds."""
    return [*rank_rows(), *checkpoint_rows()]


def rank_rows() -> Iterator[dict[str, Any]]:
    """Yield the speed of each number of ranks, with the same batch per rank.

    Therefore two ranks read twice as much of the stream.
    """
    found = [{ranks: _torchrun(ranks) for ranks in (1, 2)} for _ in range(ROUNDS)]
    for ranks in (1, 2):
        row = found[0][ranks]
        yield {
            "what": f"samples/s of {ranks} rank{'s' * (ranks > 1)}, batch {BATCH} each",
            "value": statistics.median(run[ranks]["rate"] for run in found),
            "KB a step": row["bytes"] / 1e3,
            "collectives a step": row["collectives"],
            "of it gradient KB": row["gradient"] / 1e3,
        }
    ratio = statistics.median(run[2]["rate"] / run[1]["rate"] for run in found)
    yield {"what": "samples/s of 2 ranks / of 1, neighbouring runs", "value": ratio}


def _torchrun(ranks: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "told"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={ranks}", "-m", "benchmarks.ranks", str(result)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        subprocess.run(command, env=environment, check=True, capture_output=True, timeout=600)
        found: dict[str, float] = json.loads(result.read_text())
        return found


def as_rank(result: Path) -> None:
    """Run the steps of one rank, which torchrun starts; rank 0 writes the measurements."""
    torch.set_num_threads(1)
    group: RankGroup = SINGLE_PROCESS
    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo", timeout=timedelta(seconds=120))
        group = ProcessGroup()
    subject = rank_learner(SLOTS, group)
    records = steps_of(subject)
    for _ in islice(records, WARM_UP):
        pass
    bytes_before, met_before, started = group.bytes, group.collectives, time.perf_counter()
    for _ in islice(records, STEPS):
        pass
    seconds = time.perf_counter() - started
    gradient = sum(4 * p.numel() for p in subject.method.trained)
    if group.rank == 0:
        row = {
            "rate": group.size * BATCH * STEPS / seconds,
            "bytes": (group.bytes - bytes_before) / STEPS,
            "collectives": (group.collectives - met_before) / STEPS,
            "gradient": gradient if group.size > 1 else 0,
        }
        result.write_text(json.dumps(row))
    if group.size > 1:
        dist.destroy_process_group()


def checkpoint_rows() -> Iterator[dict[str, Any]]:
    """Yield the seconds that training waits for synchronous and for background checkpoints."""
    subject = rank_learner(LARGE, SINGLE_PROCESS)
    fill(subject.memory)
    waited: dict[bool, list[float]] = {False: [], True: []}
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        at_once, behind = (
            Checkpointer(Path(folder) / name, keep=1) for name in ("first", "second")
        )
        for _ in range(SAVES + 1):
            subject.step += 1  # an existing checkpoint of a step is not written again
            waited[False].append(at_once.save(subject, {}).stalled)
            behind.begin(subject, {})
            record = behind.finished(wait=True)
            assert record is not None
            waited[True].append(record.stalled)
    size = record.bytes / 1e9
    first, *later = waited[True]
    plain, stall = statistics.median(waited[False][1:]), statistics.median(later)
    yield {
        "what": f"s of a checkpoint of {size:.2f} GB, training waits for all of it",
        "value": plain,
    }
    yield {"what": "s that training waits for one behind, the first", "value": first}
    yield {"what": "s that training waits for one behind, later ones", "value": stall}
    yield {
        "what": "behind / at once",
        "value": stall / plain,
        "target": f"<= {MOST_SHARE}",
        "met": stall <= MOST_SHARE * plain,
    }


def rank_learner(slots: int, group: RankGroup) -> Learner:
    """Return a learner like the daemon's in all that affects ranks.

    Its descriptors do not change, and its counts are exact.
    """
    return learner(in_ram(), slots, descriptor=Thumbnail(side=8), group=group)


if __name__ == "__main__":
    as_rank(Path(sys.argv[1]))
