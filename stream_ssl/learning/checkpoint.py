"""Decides when to save, and writes and finds checkpoints through the parts beside this file.

 - `checkpoint_layout.py`: names of files, keys and versions.
 - `saved.py`: the content of one checkpoint, and how a run resumes from it.
 - `checkpoint_folder.py`, `retention.py`: which checkpoints exist, and which stay.
 - `checkpoint_writer.py`: how the ranks write one checkpoint together.
 - `stream_positions.py`: the positions in the journals that a checkpoint stores.

Each checkpoint is one folder, either complete or absent.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from stream_ssl.batch import START, Offset
from stream_ssl.learning.capture import Capture, Copies
from stream_ssl.learning.checkpoint_folder import CheckpointError, CheckpointFolder
from stream_ssl.learning.checkpoint_layout import facts_in, folder_of, offset_of
from stream_ssl.learning.checkpoint_writer import CheckpointWriter
from stream_ssl.learning.learner import Learner
from stream_ssl.learning.ranks import Ranks
from stream_ssl.learning.records import Idle, StepRecord
from stream_ssl.learning.saved import Saved
from stream_ssl.learning.stream_positions import StreamPositions
from stream_ssl.memory.process_group import SINGLE_PROCESS

IDLE_SECONDS = 60.0
"""Age in seconds of the last checkpoint at which a new one is due while the stream pauses."""


@dataclass(frozen=True, slots=True)
class CheckpointRecord:
    """A checkpoint that is now durable.

    Attributes:
        step: the step of the checkpoint.
        created: seconds since the Unix epoch.
        seconds: duration of the save.
        stalled: the part of `seconds` in which training stood still.
        bytes: size of the checkpoint.
        path: folder of the checkpoint.
        offset: position in the journal.
        needed: the smallest offset that any of the newest checkpoints would replay from. The
            journal must keep it, so that an earlier checkpoint remains usable.
    """

    step: int
    created: float
    seconds: float
    stalled: float
    bytes: int
    path: Path
    offset: Offset
    needed: Offset


class Checkpointer:
    """A writer and reader of the checkpoints in `folder`.

    One process owns the folder, or the ranks of one run. Each of several ranks writes its own part
    of memory, random state and waiting samples. The first rank writes the rest, and writes the
    manifest when all parts are on the disk.

    Args:
        folder: the folder of the checkpoints.
        keep: number of newest checkpoints to keep, at least 1; 2 or more allow falling back on an
            earlier one. A run also keeps the newest checkpoint whose weights are known to be good,
            and a history: the last checkpoint of each hour for a day, and of each day for a week,
            in at most a quarter of the space that would be free without it.
        every_seconds: a checkpoint is due this many seconds after the last; null: not by time,
            except for one checkpoint after the stream has paused for a minute.
        every_steps: a checkpoint is also due this many steps after the last; null: not by steps.
        ranks: the ranks of the run, which must all call `newest`, `begin` and `save` together;
            None: one process.

    Attributes:
        folder: the folder of the checkpoints.
        positions: the positions in the journals that checkpoints store.

    Raises:
        ValueError: an argument is outside its range.
    """

    def __init__(
        self,
        folder: Path | str,
        keep: int = 3,
        every_seconds: float | None = 60.0,
        every_steps: int | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        if keep < 1:
            raise ValueError(
                f"keep is {keep}: at least the newest checkpoint stays; 2 or more "
                "allow falling back"
            )
        for name, every in (("every_seconds", every_seconds), ("every_steps", every_steps)):
            if every is not None and every <= 0:
                raise ValueError(f"{name} is {every}: must be above 0, or null for none of these")
        self.folder = Path(folder)
        self.every_seconds, self.every_steps = every_seconds, every_steps
        # The parts.
        self._ranks = Ranks(SINGLE_PROCESS, torch.device("cpu")) if ranks is None else ranks
        self._held = CheckpointFolder(self.folder, keep)
        self.positions = StreamPositions(self._ranks)
        self._writer = CheckpointWriter(self._held, self.positions, self._ranks)
        # The checkpoint in the making.
        self._copies = Copies()
        self._writing: Future[CheckpointRecord] | None = None
        # The steps: the learner's, those of the last attempt, and those of the last checkpoint.
        self._step = self._tried_step = self._durable_step = 0
        self._tried = time.monotonic()
        if not self._ranks.group.rank:
            self._held.open()

    def due(self, record: StepRecord | Idle) -> bool:
        """Return whether it is time to save.

        After a failed attempt, the time counts from this attempt. The save is then tried again even
        if no step followed.
        """
        if isinstance(record, StepRecord):
            self._step = record.step
        if self._step == self._durable_step or self.busy:
            return False
        steps = self._step - self._tried_step
        if self.every_steps is not None and steps >= self.every_steps:
            return True
        every = self.every_seconds
        if every is None and isinstance(record, Idle):
            every = IDLE_SECONDS
        return every is not None and time.monotonic() - self._tried >= every

    @property
    def dirty(self) -> bool:
        """Whether there are steps that no attempt to save has covered."""
        return self._step != self._tried_step

    @property
    def durable_step(self) -> int:
        """The step of the newest durable checkpoint; 0 without one."""
        return self._durable_step

    @property
    def damaged(self) -> int:
        """The number of damaged checkpoints that were set aside."""
        return self._held.damaged

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written that `finished` has not returned yet."""
        return self._writing is not None

    def save(self, source: Learner | Capture, config: Mapping[str, Any]) -> CheckpointRecord:
        """Write a checkpoint, which survives a power cut once this returns.

        No other checkpoint may be in progress.

        Args:
            source: the learner, or a capture that it returned earlier.
            config: the run's configuration.

        Raises:
            OSError: the disk does not accept the checkpoint. Earlier checkpoints stay unchanged.
        """
        started = time.monotonic()
        capture = source if isinstance(source, Capture) else source.capture()
        captured, target = self._captured(capture)
        size = self._writer.write(target, captured, config)
        self._durable_step = int(captured.facts["step"])
        return self._record(captured, target, size, started, stalled=None)

    def begin(self, learner: Learner, config: Mapping[str, Any]) -> None:
        """Start to write a checkpoint in the background, while training goes on.

        Training waits only for a copy of the state, which needs as much main memory as the state.
        No other checkpoint may be in progress. `finished` returns the checkpoint when it is
        durable.

        Raises:
            OSError: as in `save`, if the error is known before the background work starts.
        """
        assert not self.busy, "one at a time"
        started = time.monotonic()
        found, target = self._captured(learner.capture(live=True))
        captured = self._copies.take(found)
        work = self._writer.prepared(target, captured, config)
        stalled = time.monotonic() - started
        self._writing = in_thread(lambda: self._record(captured, target, work(), started, stalled))

    def finished(self, wait: bool = False) -> CheckpointRecord | None:
        """Return the checkpoint of `begin` once when it is durable, and None otherwise.

        Args:
            wait: block until the checkpoint is durable, if one is in progress.

        Raises:
            OSError: the disk did not accept the checkpoint.
        """
        if self._writing is None or not (wait or self._writing.done()):
            return None
        writing, self._writing = self._writing, None
        # `needed` refers to the current journal, which may differ from the checkpoint's journal.
        record = replace(writing.result(), needed=self.needed() or START)
        self._durable_step = record.step
        return record

    def _captured(self, capture: Capture) -> tuple[Capture, Path]:
        self._tried = time.monotonic()
        captured = replace(capture, facts={**capture.facts, "journal": self.positions.journal})
        self._step = self._tried_step = int(captured.facts["step"])
        return captured, folder_of(self.folder, self._step)

    def _record(
        self, captured: Capture, target: Path, size: int, started: float, stalled: float | None
    ) -> CheckpointRecord:
        seconds, offset = time.monotonic() - started, offset_of(captured.facts)
        return CheckpointRecord(
            step=int(captured.facts["step"]),
            created=time.time(),
            seconds=seconds,
            stalled=seconds if stalled is None else stalled,
            bytes=size,
            path=target,
            offset=offset,
            needed=self.needed() or offset,
        )

    def newest(self) -> Saved | None:
        """Return the newest complete checkpoint, the same on all ranks; None if there is none.

        Raises:
            CheckpointError: the checkpoint was written by a newer version of this program, or this
                user may not read it.
            OSError: files cannot be opened for now.
        """
        found = self._found_by_first(self._held.newest)
        if found is not None:
            self.positions.resume(found)
            self._step = self._tried_step = self._durable_step = found.step
        return found

    def before(self, updated: int) -> Saved | None:
        """Return the newest complete checkpoint of weights made before step `updated`, or None.

        The result is the same on all ranks. `latest` then names this checkpoint.

        Raises:
            CheckpointError, OSError: as in `newest`.
        """

        def find() -> Saved | None:
            found = self._held.newest(updated)
            if found is not None:
                self._held.point_back(found.path)
            return found

        return self._found_by_first(find)

    def discard_between(self, updated: int, step: int) -> None:
        """Remove checkpoints up to `step` whose weights were made after step `updated`."""
        if self._ranks.group.rank == 0:
            self._held.discard_between(updated, step)

    def _found_by_first(self, find: Callable[[], Saved | None]) -> Saved | None:
        """Return on all ranks the checkpoint that the first rank finds."""
        found, refused = None, ""
        if self._ranks.group.rank == 0:
            try:
                found = find()
            except CheckpointError as error:
                refused = str(error)
            except PermissionError as error:
                refused = (
                    f"{error.filename} may not be read by this user, so that the run cannot go on: "
                    "give all of its folder to the account that runs the daemon (chown -R)"
                )
        reply = self._ranks.tell([None if found is None else found.path.name, refused])[0]
        if reply[1]:
            raise CheckpointError(reply[1])
        if reply[0] is not None and found is None:
            path = self.folder / reply[0]
            found = Saved(path, facts_in(path))
        return found

    def needed(self, beyond: int = 0) -> Offset | None:
        """Return the smallest offset that the newest `keep` checkpoints replay from, or None.

        The history needs nothing in the journal: a run that goes back to it starts with what the
        journal still holds. The result is also None if files cannot be opened for now.

        Args:
            beyond: a journal record; only offsets in later records count.
        """
        offsets = []
        try:
            kept = list(self._held.last_kept())
        except OSError:
            return None
        for saved in kept:
            try:
                offset = self.positions.replayed_from(saved)
            except (ValueError, KeyError, TypeError):
                continue  # damaged: `newest` will report it and never replay from it
            if offset is not None and offset.record > beyond:
                offsets.append(offset)
        return min(offsets, default=None)


def in_thread(work: Callable[[], CheckpointRecord]) -> Future[CheckpointRecord]:
    """Return the result of `work`, which a thread finds. The process may end before the thread."""
    found: Future[CheckpointRecord] = Future()

    def run() -> None:
        try:
            found.set_result(work())
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=run, name="checkpoint", daemon=True).start()
    return found
