"""Checks of what several ranks reject: every rank reports the values, the rule and the remedy."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from jsonargparse import Namespace
from rank_group import together

from stream_ssl.daemon import ranks as ranks_module
from stream_ssl.daemon.ranks import check_alike, check_shared, part_of
from stream_ssl.journal.segment import ID_FILE
from stream_ssl.learning.ranks import Ranks
from stream_ssl.learning.saved import Saved
from stream_ssl.losses import SelfLabeling
from stream_ssl.memory import Duplicates, WorkingMemory
from stream_ssl.memory.eviction import MostDuplicated, Reservoir
from stream_ssl.memory.process_group import RankGroup
from stream_ssl.memory.scores import Quadratic
from stream_ssl.methods.negatives import MemoryNegatives
from stream_ssl.process.failures import Failure, Misconfigured


def check_refusals(ranks: int) -> None:
    """All ranks reject alike, so that no rank waits for another afterwards."""
    sound: dict[str, Any] = {"capacity": 8 * ranks, "dim": 3}

    def work(group: RankGroup) -> None:
        memory = WorkingMemory(**sound, group=group)
        z_BD = torch.eye(3)
        refused: list[tuple[Callable[[], Any], str]] = [
            (
                lambda: WorkingMemory(8 * ranks + 1, 3, group=group),
                rf"capacity {8 * ranks + 1} cannot be divided by {ranks} ranks: choose",
            ),
            (
                lambda: WorkingMemory(**sound, eviction=Reservoir(), group=group),
                "eviction reservoir looks at the slots of one process.*Redundant, or Oldest",
            ),
            (
                lambda: WorkingMemory(
                    **sound, eviction=MostDuplicated(Quadratic(), index="ivf"), group=group
                ),
                "eviction most-duplicated with compete=False, index='ivf' looks at",
            ),
            (
                lambda: WorkingMemory(**sound, duplicates=Duplicates(action="merge"), group=group),
                'choose the action "count" or "refuse"',
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
        check_folders(joint, Path(folder))

    with tempfile.TemporaryDirectory() as folder:
        together(ranks, work)


def check_folders(joint: Ranks, folder: Path) -> None:
    """Check a path that is a different folder on each host, and a journal that is."""
    rank, last = joint.group.rank, joint.group.size - 1
    check_shared(joint, folder / "shared")
    joint.tell("the first has removed its file")
    assert list((folder / "shared/checkpoints").iterdir()) == []
    with pytest.raises(Misconfigured, match=f"is another folder on rank {last} than on rank 0"):
        check_shared(joint, folder / ("elsewhere" if rank == last else "shared"))
    own = folder / str(rank)
    (own / "journal").mkdir(parents=True)
    settings = Namespace(run=own, ranks=Namespace(receivers=[]))
    if rank == 0:
        (own / "journal" / ID_FILE).write_text("a\na\n")
    one = Saved(folder, {"journal": "a", "offset": {"record": 1, "sample": 0}})
    several = Saved(folder, one.facts | {"journals": {}})
    told = joint.tell(part_of(settings, joint, None).journal)
    assert told == ["a"] + [None] * last, "the others have none yet"
    with (
        mock.patch.object(ranks_module, "WAITS", 2),
        mock.patch.object(ranks_module, "PAUSE", 0.01),
    ):
        with pytest.raises(Failure, match="has no journal: start its receiver first"):
            part_of(settings, joint, one)
        missing = rank or 1
        with pytest.raises(
            Failure, match=f"rank {missing} finds no journal .* start that receiver"
        ):
            part_of(settings, joint, several)
    late = threading.Timer(1.0, (own / "journal" / ID_FILE).write_text, [f"{rank}\n{rank}\n"])
    late.start()
    assert part_of(settings, joint, several).readers == [rank]
    late.join()
    with pytest.raises(Misconfigured, match="journal is 0 on rank 0 and 1 on rank 1"):
        part_of(settings, joint, one)
    assert part_of(settings, joint, several).readers == [rank]
    settings.ranks.receivers = [own, own]
    with pytest.raises(Misconfigured, match="names 2 folders, and 1 ranks of this host"):
        part_of(settings, joint, several)
