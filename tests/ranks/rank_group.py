"""Ranks of torch.distributed that are forked, so that torch is imported once for all of them."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from stream_ssl.memory.process_group import ProcessGroup, RankGroup

SECONDS = 60
"""Seconds after which a rank stops waiting for another."""


def together(ranks: int, work: Callable[[RankGroup], Any], dies: int | None = None) -> list[Any]:
    """Return the result of `work`, called with its group, on each rank, as JSON.

    Call this function in a process that has not computed on several threads.

    Args:
        ranks: number of ranks.
        work: the work of each rank.
        dies: a rank that is expected to be killed by a signal; the others must then fail too.
    """
    with tempfile.TemporaryDirectory() as folder:
        children = [_fork(rank, ranks, Path(folder), work) for rank in range(ranks)]
        statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        if dies is not None:
            assert statuses[dies] == -signal.SIGKILL, statuses
            assert 0 not in statuses, statuses
            return []
        assert statuses == [0] * ranks, f"ranks ended with {statuses}"
        return [json.loads((Path(folder) / f"{rank}").read_text()) for rank in range(ranks)]


def _fork(rank: int, ranks: int, folder: Path, work: Callable[[RankGroup], Any]) -> int:
    child = os.fork()
    if child:
        return child
    try:
        torch.set_num_threads(1)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            "gloo",
            f"file://{folder}/store",
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=SECONDS),
        )
        (folder / f"{rank}").write_text(json.dumps(work(ProcessGroup())))
        dist.destroy_process_group()
        os._exit(0)
    except BaseException:
        sys.stderr.write(f"rank {rank} of {ranks}: {traceback.format_exc()}")
        sys.stderr.flush()
        os._exit(1)
