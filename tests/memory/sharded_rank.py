"""One rank of a sharded memory, run as a script: python sharded_rank.py RANK RANKS FOLDER."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from sharded_cases import BATCHES, CASES, DIM, SLOTS, rows_of

from memory.eviction import block, candidates, scored
from memory.eviction.race import Proposal
from memory.sharded import ShardedMemory


class Watched(candidates.Candidates):
    """Counts the proposals that a slot outside has overruled."""

    overruled = 0

    def carry_out(self, proposal: Proposal, sure: bool) -> int:
        held = super().carry_out(proposal, sure)
        Watched.overruled += held < len(proposal)
        return held


def main(rank: int, ranks: int, folder: Path) -> None:
    torch.set_num_threads(1)
    # Few of all, so that slots outside may overrule.
    scored.CANDIDATES, scored.MORE, scored.FORESEEN, scored.JUDGED = 8, 2, 4, 5
    candidates.MOST_CANDIDATES, block.NEWCOMERS, block.FEWEST = 24, 13, 13
    scored.Candidates = Watched  # type: ignore[misc]
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
                "overruled": Watched.overruled,
            }
        )
    (folder / f"{rank}.json").write_text(json.dumps(outcomes))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
