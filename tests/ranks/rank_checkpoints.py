"""Checkpoints that ranks write together: bit-equal after a restart, also of other ranks.

Shapes: k slots.
"""

from __future__ import annotations

import hashlib
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from learning_world import BATCH, state_of, steps
from rank_group import together
from rank_learning import SETTINGS, SLOTS, Part, build

from memory.process_group import SINGLE_PROCESS, SingleProcess
from stream_ssl.batch import START, Offset
from stream_ssl.ingest.share import JournalShare
from stream_ssl.learning.checkpoint import Checkpointer, checkpoint_damage
from stream_ssl.learning.learner import Learner
from stream_ssl.learning.ranks import Ranks

CPU = torch.device("cpu")


def resumed(group: SingleProcess, folder: Path, name: str) -> tuple[Learner, Checkpointer]:
    """A learner that goes on from the newest checkpoint, or begins."""
    checkpointer = Checkpointer(folder, every_steps=2, ranks=Ranks(group, CPU))
    saved = checkpointer.newest()
    start = START if saved is None else saved.start(group.rank, group.size)
    learner = build(group, Part(group, start), **SETTINGS[name]())
    if saved is not None:
        saved.restore(learner, group.rank, group.size)
    return learner, checkpointer


def lived(learner: Learner, checkpointer: Checkpointer, last: int, behind: bool) -> None:
    """Steps to the last, with a checkpoint after every third."""
    while learner.step < last:
        steps(learner, 1)
        if learner.step % 3 == 0 and behind:
            checkpointer.finished(wait=True)
            checkpointer.begin(learner, {"a": 1})
        elif learner.step % 3 == 0:
            checkpointer.save(learner, {"a": 1})
    checkpointer.finished(wait=True)


def check_restarts(ranks: int) -> None:
    """Ranks that stop between checkpoints, one by SIGKILL in the midst of writing one, and go on
    from the last that is whole, end bit-equal to those that never stopped."""
    for name, behind in (("as shipped", True), ("stream, counts on embeddings", False)):
        with tempfile.TemporaryDirectory() as folder:
            restarted(ranks, name, Path(folder), behind)


def restarted(ranks: int, name: str, folder: Path, behind: bool) -> None:
    def whole(group: SingleProcess) -> str:
        learner = build(group, Part(group), **SETTINGS[name]())
        steps(learner, 11)
        return told(learner)

    def first(group: SingleProcess) -> None:
        lived(*resumed(group, folder, name), last=8, behind=behind)

    def killed(group: SingleProcess) -> None:
        learner, checkpointer = resumed(group, folder, name)
        if group.rank == ranks - 1:
            Checkpointer._write_part = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign,assign,misc]
        lived(learner, checkpointer, last=11, behind=behind)

    def last(group: SingleProcess) -> str:
        learner, checkpointer = resumed(group, folder, name)
        assert learner.step == 6
        lived(learner, checkpointer, last=11, behind=behind)
        return told(learner)

    expected = together(ranks, whole)
    together(ranks, first)
    together(ranks, killed, dies=ranks - 1)
    whole_ones = sorted(path.name for path in folder.glob("step-*"))
    assert whole_ones == ["step-000000003", "step-000000006"]
    assert together(ranks, last) == expected, name


def check_part_refused(ranks: int) -> None:
    """A rank whose disk is full: no rank takes the checkpoint for written, and the next one is."""
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)

        def work(group: SingleProcess) -> list[str]:
            learner, checkpointer = resumed(group, folder, "as shipped")
            steps(learner, 1)
            plain, found = checkpointer._write_part, []

            def refuse(*_: object) -> None:
                raise OSError(28, "No space left on device")

            if group.rank == ranks - 1:
                checkpointer._write_part = refuse  # type: ignore[method-assign]
            for _ in range(2):
                try:
                    checkpointer.begin(learner, {})
                    steps(learner, 1)
                    found.append(str(checkpointer.finished(wait=True).step))
                except OSError as error:
                    found.append(str(error))
                checkpointer._write_part = plain  # type: ignore[method-assign]
            return found

        for refused, written in together(ranks, work):
            assert "No space left" in refused or "was not concluded" in refused
            assert written == "2"
        assert [path.name for path in folder.glob("step-*")] == ["step-000000002"]


def told(learner: Learner) -> str:
    """All of its state, in a word."""
    digest = hashlib.sha256(repr(learner.capture().facts).encode())
    for key, value in sorted(state_of(learner).items()):
        digest.update(key.encode() + value.numpy().tobytes())
    return digest.hexdigest()


def check_other_ranks(ranks: int) -> None:
    """From W ranks to one and back: every slot once, and every sample of the journal once."""
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)

        def several(group: SingleProcess) -> list[Any]:
            learner, checkpointer = resumed(group, folder, "as shipped")
            steps(learner, 5)
            checkpointer.save(learner, {})
            return [learner.memory.ids.tolist(), learner.memory.check_valid(), learner.samples]

        before = together(ranks, several)
        checkpointer = Checkpointer(folder)
        saved = checkpointer.newest()
        assert saved is not None
        assert saved.ranks == ranks
        alone = build(SINGLE_PROCESS, **SETTINGS["as shipped"]())
        saved.restore(alone)
        assert alone.memory.check_valid() == (True, "")
        held = alone.memory.ids
        for rank, (ids, valid, samples) in enumerate(before):
            assert valid == [True, ""]
            assert held[rank::ranks].tolist() == ids
            assert alone.samples == samples == 5 * BATCH * ranks
        steps(alone, 1)
        checkpointer.save(alone, {})
        assert checkpoint_damage(folder / "latest") is None
        after = together(ranks, several)
        assert all(valid == [True, ""] for _, valid, _ in after)
        assert sum(len(ids) for ids, _, _ in after) == SLOTS


def check_journal_shares(ranks: int) -> None:
    """Every sample of a journal is read once, over changes of the number of ranks."""
    rng, sizes = np.random.default_rng(ranks), np.random.default_rng(1).integers(1, 9, 60)
    read: list[tuple[int, int]] = []
    divisions: list[list[Offset]] = []
    for count, until in ((ranks, 15), (3, 30), (1, 40), (ranks, 61)):
        start = min(divisions[-1]) if divisions else START
        ends = []
        for rank in range(count):
            share = JournalShare(rank, count, tuple(divisions))
            end = Offset(int(rng.integers(start.record, until + 1)) if until < 61 else 61, 0)
            if until < 61 and end.record % count == rank:
                end = Offset(end.record, int(sizes[end.record - 1]) // 2)
            for record in range(start.record, 61):
                first = share.first(record)
                if first is not None:
                    read += [
                        (record, sample)
                        for sample in range(first, sizes[record - 1])
                        if Offset(record, sample) < end
                    ]
            ends.append(end)
        divisions.append(ends)
    assert sorted(read) == [(r, s) for r in range(1, 61) for s in range(sizes[r - 1])]
