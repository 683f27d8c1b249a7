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
from sharded_cases import BATCHES, CASES, DIM, SLOTS, rows_of

from memory import WorkingMemory
from memory.eviction import MostDuplicated
from memory.eviction.group import Ranks

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
            _, complaint = process.communicate(timeout=240)
            assert process.returncode == 0, complaint
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [2, 4])
def test_all_ranks_decide_as_one_process_does(ranks: int, tmp_path: Path) -> None:
    found = run_ranks(ranks, tmp_path)
    assert found[0][-1]["overruled"] > len(CASES), "no slot outside was looked at"
    for number, case in enumerate(CASES):
        z_ND, start = rows_of(case), 0
        memory = WorkingMemory(SLOTS, DIM, MostDuplicated(case.score, case.compete))
        evicted, refused, slots = [], [], []
        for count in BATCHES:
            admission = memory.add(np.arange(start, start + count), z_ND[start : start + count])
            evicted += admission.evicted.tolist()
            refused += admission.refused.tolist()
            slots += admission.slots.tolist()
            start += count
        outcomes = [rank[number] for rank in found]
        for outcome in outcomes:
            assert outcome["valid"] == [True, ""], case
            assert outcome["evicted"] == evicted, case
            assert outcome["refused"] == refused, case
            assert outcome["slots"] == slots, case
        assert [i for one in outcomes for i in one["ids"]] == memory.ids.tolist(), case
        counts = np.concatenate([one["counts"] for one in outcomes])
        np.testing.assert_allclose(counts, memory.counts().numpy(), atol=1e-9 * SLOTS)


def test_without_a_process_group_the_remedy_is_named() -> None:
    with pytest.raises(ValueError, match="init_process_group"):
        Ranks()
