"""Checks of checkpoints that ranks write together: bit-equal after a restart, with other ranks too.

Shapes: k slots.
"""

from __future__ import annotations

import hashlib
import os
import signal
import tempfile
import threading
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from learning_world import BATCH, SIZE, state_of, steps
from rank_group import together
from rank_learning import SETTINGS, Part, build, until_idle

from stream_ssl.batch import START, Batch, Offset
from stream_ssl.feed.batches import Batches
from stream_ssl.feed.decode import Decoder
from stream_ssl.feed.journal_tasks import JournalShare
from stream_ssl.feed.quarantine import Quarantine
from stream_ssl.journal.journal import Journal
from stream_ssl.journal.reader import JournalReader
from stream_ssl.journal.segment import JournalEntry
from stream_ssl.learning import checkpoint_writer
from stream_ssl.learning.checkpoint import Checkpointer
from stream_ssl.learning.checkpoint_writer import CheckpointWriter
from stream_ssl.learning.learner import Learner
from stream_ssl.learning.optimiser import OptimiserSettings
from stream_ssl.learning.ranks import Ranks
from stream_ssl.learning.records import ReloadDue
from stream_ssl.memory.process_group import RankGroup
from stream_ssl.wire import Data, Sample

CPU = torch.device("cpu")
RECORDS = 26
"""Records of the journal. Three steps each with 2, 4 and 1 ranks leave 8: 4 for each of two
ranks.
"""


def resumed(group: RankGroup, folder: Path, name: str) -> tuple[Learner, Checkpointer]:
    """Return a learner that resumes from the newest checkpoint, or begins, and its checkpointer."""
    checkpointer = Checkpointer(folder, every_steps=2, ranks=Ranks(group, CPU))
    saved = checkpointer.newest()
    start = START if saved is None else saved.start(group.rank, group.size)
    learner = build(group, Part(group, start), **SETTINGS[name]())
    if saved is not None:
        saved.restore(learner, group.rank, group.size)
    return learner, checkpointer


def lived(learner: Learner, checkpointer: Checkpointer, last: int, behind: bool) -> None:
    """Make steps until `last`, with a checkpoint after every third."""
    while learner.step < last:
        steps(learner, 1)
        if learner.step % 3 == 0 and behind:
            checkpointer.finished(wait=True)
            checkpointer.begin(learner, {"a": 1})
        elif learner.step % 3 == 0:
            checkpointer.save(learner, {"a": 1})
    checkpointer.finished(wait=True)


def check_restarts(ranks: int) -> None:
    """Ranks that stop between checkpoints and resume end bit-equal to ranks that never stopped.

    One rank is killed by SIGKILL while it writes a checkpoint. The ranks then resume from the last
    whole checkpoint.
    """
    for name, behind in (("as shipped", True), ("stream, counts on embeddings", False)):
        with tempfile.TemporaryDirectory() as folder:
            restarted(ranks, name, Path(folder), behind)


def restarted(ranks: int, name: str, folder: Path, behind: bool) -> None:
    def whole(group: RankGroup) -> str:
        learner = build(group, Part(group), **SETTINGS[name]())
        steps(learner, 11)
        return told(learner)

    def first(group: RankGroup) -> None:
        lived(*resumed(group, folder, name), last=8, behind=behind)

    def killed(group: RankGroup) -> None:
        learner, checkpointer = resumed(group, folder, name)
        if group.rank == ranks - 1:
            CheckpointWriter._write_part = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign,assign,misc]
        lived(learner, checkpointer, last=11, behind=behind)

    def last(group: RankGroup) -> str:
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


def check_divergence(ranks: int) -> None:
    """After a fault all ranks reload the same checkpoint at the same step, and continue alike."""
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)

        def work(group: RankGroup) -> list[Any]:
            learner, checkpointer = resumed(group, folder, "stream, counts on embeddings")
            lived(learner, checkpointer, last=3, behind=False)
            plain = learner._step.weights._optimisation
            learner._step.weights._optimisation = OptimiserSettings(learning_rate=1e12)
            steps(learner, 1)
            checkpointer.save(learner, {})
            learner.batches = Cycle(learner.batches)
            next(one for one in learner.run(threading.Event()) if isinstance(one, ReloadDue))
            failed = learner.step
            saved = checkpointer.before(learner.divergence.limit)
            assert saved is not None
            learner.reload(saved.capture(group.rank, group.size, learner.offset))
            learner._step.weights._optimisation = plain
            skipped = [record.skipped for record in steps(learner, 5)]
            weights = [float(one.detach().double().sum()) for one in learner.method.parameters()]
            return [saved.path.name, failed, learner.step, skipped, weights]

        first, *others = together(ranks, work)
        assert first[0] == "step-000000003"
        assert set(first[3]) <= {None, "pace"}
        assert all(other == first for other in others)


class Cycle:
    """An endless stream that repeats the last batch of a stream."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._last = stream, None

    def next(self, timeout: float) -> Any:
        self._last = self._stream.next(timeout) or self._last
        return self._last

    def lag(self) -> float:
        return 0.0


def check_part_refused(ranks: int) -> None:
    """If the disk of one rank is full, no rank counts the checkpoint as written. The next one
    is.
    """
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)

        def work(group: RankGroup) -> list[str]:
            learner, checkpointer = resumed(group, folder, "as shipped")
            steps(learner, 1)
            plain, found = checkpointer._writer._write_part, []

            def refuse(*_: object) -> None:
                raise OSError(28, "No space left on device")

            if group.rank == ranks - 1:
                checkpointer._writer._write_part = refuse  # type: ignore[method-assign]
            for _ in range(2):
                try:
                    checkpointer.begin(learner, {})
                    steps(learner, 1)
                    found.append(str(checkpointer.finished(wait=True).step))
                except OSError as error:
                    found.append(str(error))
                checkpointer._writer._write_part = plain  # type: ignore[method-assign]
            return found

        for refused, written in together(ranks, work):
            assert "No space left" in refused or "was not concluded" in refused
            assert written == "2"
        assert [path.name for path in folder.glob("step-*")] == ["step-000000002"]


def check_disk_full(ranks: int) -> None:
    """If a rank cannot even report that its disk is full, the other ranks do not wait for it."""
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)

        def work(group: RankGroup) -> list[Any]:
            learner, checkpointer = resumed(group, folder, "as shipped")
            steps(learner, 1)

            def refuse(*_: object) -> None:
                raise OSError(28, "No space left on device")

            if group.rank == ranks - 1:
                checkpointer._writer._write_part = refuse  # type: ignore[method-assign]
                checkpoint_writer.write = refuse
            checkpointer.begin(learner, {})
            began, found = time.monotonic(), ""
            try:
                checkpointer.finished(wait=True)
            except OSError as error:
                found = str(error)
            return [time.monotonic() - began, found]

        for seconds, refused in together(ranks, work):
            assert seconds < 10, f"{seconds:.0f} s: {refused}"
            assert refused
        assert list(folder.glob("*step-*")) == []


def told(learner: Learner) -> str:
    """Return a digest of the learner's whole state."""
    digest = hashlib.sha256(repr(learner.capture().facts).encode())
    for key, value in sorted(state_of(learner).items()):
        digest.update(key.encode() + value.numpy().tobytes())
    return digest.hexdigest()


def check_other_ranks(_: int) -> None:
    """Change from 2 ranks to 4, 1 and 2 on a real journal.

    Each group takes over the optimiser and every slot unchanged, and every sample of the journal is
    read once.
    """
    with tempfile.TemporaryDirectory() as path:
        folder, read = Path(path), []
        _fill(folder / "journal", RECORDS)
        last: list[Any] = []
        for ranks, count in ((2, 3), (4, 3), (1, 3), (2, None)):
            legs = together(ranks, partial(_leg, folder, count))
            for rank, leg in enumerate(legs):
                read += leg["read"]
                slots, weights = leg["before"]
                if last:
                    assert weights == last[0][1], f"{ranks} ranks: weights or optimiser"
                    assert slots == _of_all(last)[rank::ranks], f"{ranks} ranks: slots"
                assert leg["valid"] == [True, ""]
                assert leg["samples"] == len(read) or rank + 1 < ranks
            last = [leg["after"] for leg in legs]
        assert len(read) == len(set(read)) == RECORDS * BATCH


def _leg(folder: Path, count: int | None, group: RankGroup) -> dict[str, Any]:
    """Continue from the newest checkpoint for `count` steps, or until all samples are read."""
    joint = Ranks(group, CPU)
    checkpointer = Checkpointer(folder / "checkpoints", ranks=joint)
    saved, here = checkpointer.newest(), (group.rank, group.size)
    start = START if saved is None else saved.start(*here)
    before = () if saved is None else saved.before(group.size)
    with ExitStack() as stack:
        reader = JournalReader(folder / "journal")
        stack.callback(reader.close)
        batches = Batches(
            reader,
            Decoder(SIZE, 1),
            Quarantine(folder / f"quarantine-{group.rank}"),
            2 * BATCH // group.size,
            start,
            share=JournalShare(*here, before, joint=group.size > 1),
        )
        stream = Noted(stack.enter_context(batches))
        learner = build(group, stream, **SETTINGS["as shipped"]())
        if saved is not None:
            saved.restore(learner, *here)
        found: dict[str, Any] = {"before": _held(learner)}
        if count is None:
            until_idle(learner)
        else:
            steps(learner, count)
        checkpointer.save(learner, {})
    found |= {"after": _held(learner), "read": stream.read, "samples": learner.samples}
    return found | {"valid": learner.memory.check_valid()}


class Noted:
    """A stream that records the ids of its samples."""

    def __init__(self, batches: Batches) -> None:
        self._batches, self.read = batches, list[int]()
        self.lag = batches.lag

    def next(self, timeout: float) -> Batch | None:
        batch = self._batches.next(timeout)
        self.read += [] if batch is None else batch.ids_B.tolist()
        return batch


def _held(learner: Learner) -> list[Any]:
    """Return the ids of this rank's slots, and a digest of weights and optimiser."""
    digest, tensors = hashlib.sha256(), learner.capture().tensors
    for name in ("model", "optimiser"):
        for key, value in sorted(tensors[name].items()):
            digest.update(key.encode() + value.numpy().tobytes())
    return [learner.memory.ids.tolist(), digest.hexdigest()]


def _of_all(held: list[Any]) -> list[int]:
    """Return the ids of all slots from the ids of each rank."""
    ids = [0] * sum(len(own) for own, _ in held)
    for rank, (own, _) in enumerate(held):
        ids[rank :: len(held)] = own
    return ids


def _fill(folder: Path, records: int) -> None:
    journal, draw = Journal(folder, budget=1 << 24), np.random.default_rng(0)
    for sequence in range(1, records + 1):
        images = draw.integers(0, 256, (BATCH, SIZE, SIZE, 1), dtype=np.uint8)
        data = Data.pack(
            sequence,
            [Sample.from_array(image, f"{sequence}-{n}") for n, image in enumerate(images)],
        )
        journal.append([JournalEntry("robot", sequence, None, 0.0, data.header, data.payload)])
    journal.close()


def check_journal_shares(ranks: int) -> None:
    """Every sample of a journal is read once, while the number of ranks changes."""
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
