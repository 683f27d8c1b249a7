"""One rank of a sharded memory, run as a script: python sharded_rank.py RANK RANKS FOLDER."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from sharded_cases import BATCHES, CASES, DIM, SLOTS, rows_of

from memory.eviction import scored
from memory.sharded import ShardedMemory


def main(rank: int, ranks: int, folder: Path) -> None:
    torch.set_num_threads(1)
    scored.CANDIDATES, scored.MORE, scored.MOST_CANDIDATES = (
        4,
        2,
        24,
    )  # of a shard, so that slots outside may overrule
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=ranks)
    outcomes = []
    for case in CASES:
        z_ND, start = rows_of(case), 0
        memory = ShardedMemory(
            SLOTS // ranks, DIM, case.score, case.compete, dtype=torch.from_numpy(z_ND).dtype
        )
        evicted, refused, slots = [], [], []
        for count in BATCHES:
            admission = memory.add(np.arange(start, start + count), z_ND[start : start + count])
            evicted += admission.evicted.tolist()
            refused += admission.refused.tolist()
            slots += admission.slots.tolist()
            start += count
        outcomes.append(
            {
                "evicted": evicted,
                "refused": refused,
                "slots": slots,
                "ids": memory.ids.tolist(),
                "counts": memory.counts().tolist(),
                "valid": memory.check_valid(),
            }
        )
    (folder / f"{rank}.json").write_text(json.dumps(outcomes))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
