"""What several ranks refuse: a line with the values, the rule and the remedy, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_group import together

from memory import Duplicates, WorkingMemory
from memory.eviction import MostDuplicated, Reservoir
from memory.process_group import SingleProcess
from stream_ssl.app.failures import Misconfigured
from stream_ssl.app.ranks import check_alike
from stream_ssl.learning.ranks import Ranks
from stream_ssl.losses import SelfLabeling
from stream_ssl.methods.negatives import MemoryNegatives


def check_refusals(ranks: int) -> None:
    """Nobody waits for another afterwards: all refuse alike."""
    sound: dict[str, Any] = {"capacity": 8 * ranks, "dim": 3}

    def work(group: SingleProcess) -> None:
        memory = WorkingMemory(**sound, group=group)
        z_BD = torch.eye(3)
        refused: list[tuple[Callable[[], Any], str]] = [
            (
                lambda: WorkingMemory(8 * ranks + 1, 3, group=group),
                rf"capacity {8 * ranks + 1} cannot be divided by {ranks} ranks: choose",
            ),
            (
                lambda: WorkingMemory(**sound, eviction=Reservoir(), group=group),
                "eviction reservoir looks at the slots of one process",
            ),
            (
                lambda: WorkingMemory(**sound, eviction=MostDuplicated(index="ivf"), group=group),
                'eviction most-duplicated with index="ivf"',
            ),
            (
                lambda: WorkingMemory(**sound, duplicates=Duplicates(action="merge"), group=group),
                'choose the action "count" or "refuse"',
            ),
            (
                lambda: WorkingMemory(
                    **sound, image_shape=(1, 2, 2), image_file=Path("none"), group=group
                ),
                "a file of images is for one process",
            ),
            (
                lambda: MemoryNegatives(4, "hardest").check(SelfLabeling(), memory, 8),
                f"chooses for each anchor in one process, and {ranks} ranks",
            ),
            (
                lambda: SelfLabeling()(z_BD, z_BD[:, None], z_BD, group=group),
                "SelfLabeling compares with the negatives of one process",
            ),
        ]
        for call, message in refused:
            with pytest.raises(ValueError, match=message):
                call()
        joint = Ranks(group, torch.device("cpu"))
        check_alike(joint, {"memory": {"capacity": 8}})
        other = 8 + (group.rank == ranks - 1)
        with pytest.raises(
            Misconfigured, match=rf"memory.capacity is '8' on rank 0 and '9' on rank {ranks - 1}"
        ):
            check_alike(joint, {"memory": {"capacity": other}})

    together(ranks, work)
