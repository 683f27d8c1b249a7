"""Shards in several processes decide what one process decides that holds them all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sharded_rank import CASES, DIM, SLOTS, Case, batches_of, fed

from memory import WorkingMemory
from memory.duel.process_group import SINGLE_PROCESS
from memory.eviction import MostDuplicated
from memory.sharded import ShardedMemory
from tests.naive import IncrementalDuel

HERE = Path(__file__).parent


def run_ranks(ranks: int, folder: Path) -> list[list[dict[str, Any]]]:
    """What each rank found, by case."""
    paths = os.pathsep.join([str(HERE.parents[1]), str(HERE)])
    environment = os.environ | {"PYTHONPATH": paths, "GLOO_SOCKET_IFNAME": "lo"}
    script = str(HERE / "sharded_rank.py")
    processes = [
        subprocess.Popen(
            [sys.executable, script, str(rank), str(ranks), str(folder)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        for process in processes:
            _, complaint = process.communicate(timeout=150)
            assert process.returncode == 0, complaint
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


def judge(case: Case, found: dict[str, Any]) -> None:
    """Every eviction was of the largest count, to rounding; AssertionError where one was not."""
    z_ND = torch.cat(batches_of(case))
    twin, held = IncrementalDuel(case.score, z_ND[:SLOTS], case.compete), list(range(SLOTS))
    gone, ages, refused = iter(found["evicted"]), iter(found["ages"]), set(found["refused"])
    for newcomer, x_D in enumerate(z_ND[SLOTS:], SLOTS):
        slot = -1
        if newcomer not in refused:
            slot = held.index(left := next(gone))
            assert next(ages) == newcomer - left
            held[slot] = newcomer
        assert twin.regret(slot, x_D) <= 1e-9
        twin.step(x_D, slot)
    assert next(gone, None) is None
    assert found["ids"] == held
    np.testing.assert_allclose(found["counts"], twin.counts_anew(), atol=1e-9 * SLOTS)


@pytest.mark.parametrize("ranks", [3])
def test_all_ranks_decide_as_one_process_does(ranks: int, tmp_path: Path) -> None:
    by_rank = run_ranks(ranks, tmp_path)
    assert by_rank[0][-1]["overruled"] > len(CASES), "no slot outside was looked at"
    for number, case in enumerate(CASES):
        outcomes = [rank[number] for rank in by_rank]
        for name in ("evicted", "ages", "refused", "slots"):
            assert all(one[name] == outcomes[0][name] for one in outcomes), case
        assert all(one["valid"] == [True, ""] for one in outcomes), case
        together = {
            **outcomes[0],
            **{name: [i for one in outcomes for i in one[name]] for name in ("ids", "counts")},
        }
        judge(case, together)
        if case.stream != "duplicates":  # nothing ties
            alone = fed(WorkingMemory(SLOTS, DIM, MostDuplicated(case.score, case.compete)), case)
            for name in ("evicted", "ages", "refused", "slots", "ids"):
                assert together[name] == alone[name], (case, name)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_single_process_may_hold_a_shard(case: Case) -> None:
    memory = ShardedMemory(
        SLOTS, DIM, case.score, case.compete, dtype=torch.float64, group=SINGLE_PROCESS
    )
    found = fed(memory, case)
    judge(case, found)
    assert memory.embeddings.tolist() == torch.cat(batches_of(case))[found["ids"]].tolist()
