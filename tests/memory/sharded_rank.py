"""One rank of a sharded memory, run as a script: python sharded_rank.py RANK RANKS FOLDER.

Shapes: D embedding, N samples.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from memory.duel import exact
from memory.scores import Gaussian, Linear, Score, Threshold, VonMisesFisher
from memory.sharded import ShardedMemory
from tests.naive import unit_rows

SLOTS, DIM = 48, 6
BATCHES = (20, 0, 40, 1, 60, 7)


class Case(NamedTuple):
    score: Score
    compete: bool
    stream: str


CASES = (
    Case(Linear(), False, "clustered"),
    Case(Linear(), True, "duplicates"),
    Case(VonMisesFisher(0.1), False, "duplicates"),
    Case(VonMisesFisher(0.1), True, "clustered"),
    Case(Threshold(), True, "duplicates"),
    Case(Gaussian(), False, "clustered"),
)


def batches_of(case: Case) -> list[Tensor]:
    """Seeded unit rows, float64 [N, DIM] in all."""
    rng = np.random.default_rng(CASES.index(case))
    return list(unit_rows(rng, case.stream, sum(BATCHES), DIM).split(BATCHES))


def fed(memory: Any, case: Case) -> dict[str, Any]:
    """What became of the stream, in any kind of memory."""
    told: dict[str, list[int]] = {"evicted": [], "ages": [], "refused": [], "slots": []}
    start = 0
    for z_BD in batches_of(case):
        admission = memory.add(torch.arange(start, start + len(z_BD)), z_BD)
        start += len(z_BD)
        for name in told:
            told[name] += getattr(admission, name).tolist()
    rest = {"counts": memory.counts().tolist(), "valid": memory.check_valid()}
    return {**told, **rest, "ids": memory.ids.tolist()}


def main(rank: int, ranks: int, folder: Path) -> None:
    torch.set_num_threads(1)
    exact.CANDIDATES = 8  # of all, so that slots outside may overrule
    overruled, place = [0], exact.ExactCounts._place

    def watched(self: Any, x_BA: Tensor, column: Tensor, *rest: Any) -> Tensor:
        overruled[0] += len(column) < len(rest[1])
        return place(self, x_BA, column, *rest)

    exact.ExactCounts._place = watched  # type: ignore[method-assign]
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=ranks)
    outcomes = [
        fed(ShardedMemory(SLOTS // ranks, DIM, score, compete, dtype=torch.float64), case)
        for case in CASES
        for score, compete, _ in [case]
    ]
    outcomes[-1]["overruled"] = overruled[0]
    (folder / f"{rank}.json").write_text(json.dumps(outcomes))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
