"""Writes the checkpoints of a run. All ranks write together, at once or in the background."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from stream_ssl.bounded_files import read_json
from stream_ssl.durable import discard, seal, sync, write, write_json
from stream_ssl.learning.capture import Capture
from stream_ssl.learning.checkpoint_folder import CheckpointFolder
from stream_ssl.learning.checkpoint_layout import OWN, SHARED, STATE, file_of, size_of, version_of
from stream_ssl.learning.ranks import Ranks
from stream_ssl.learning.stream_positions import StreamPositions
from stream_ssl.tensor_file import write_tensors

NOTE = "note-"
"""The beginning of the names of files in which ranks report their faults to the first rank."""
PART_SECONDS = 600.0
"""Time limit in seconds for the other ranks to complete a checkpoint in the background."""


class CheckpointWriter:
    """A writer of checkpoints. Each rank writes its part, and the first rank completes the folder.

    Args:
        folder: the folder of the checkpoints.
        positions: the positions of all ranks' streams.
        ranks: the ranks, which must make all calls together.
    """

    def __init__(self, folder: CheckpointFolder, positions: StreamPositions, ranks: Ranks) -> None:
        self._folder, self._positions, self._ranks = folder, positions, ranks

    def write(self, target: Path, captured: Capture, config: Mapping[str, Any]) -> int:
        """Write a checkpoint, and return its size in bytes.

        Raises:
            OSError: on every rank, if the disk of one rank does not accept its part.
        """
        scratch = self._folder.scratch_of(target)
        if size := self._on_all(lambda: self._written_before(target), only_first=True)[0]:
            return int(size)
        try:
            self._on_all(lambda: self._folder.make_scratch(scratch), only_first=True)
            self._on_all(lambda: self._write_part(captured, scratch))
            facts = {**captured.facts, **self._positions.facts(captured.facts["offset"])}
            sizes = self._on_all(
                lambda: self._conclude(scratch, target, facts, config), only_first=True
            )
        except BaseException:
            if self._ranks.group.rank == 0:
                shutil.rmtree(scratch, ignore_errors=True)
            raise
        return int(sizes[0])

    def prepared(
        self, target: Path, captured: Capture, config: Mapping[str, Any]
    ) -> Callable[[], int]:
        """Return the work of `write` for a thread.

        Several ranks exchange here all that needs an exchange, because they train while the thread
        writes.

        Raises:
            OSError: the first rank cannot create the folder.
        """
        if self._ranks.alone:
            return lambda: self.write(target, captured, config)
        scratch = self._folder.scratch_of(target)
        self._on_all(lambda: self._prepare(target, scratch), only_first=True)
        facts = {**captured.facts, **self._positions.facts(captured.facts["offset"])}
        return lambda: self._write_behind(target, captured, facts, config)

    def _write_behind(
        self, target: Path, captured: Capture, facts: Mapping[str, Any], config: Mapping[str, Any]
    ) -> int:
        """Do what `write` does, in a thread.

        The ranks train at the same time, so they communicate through files.
        """
        scratch, rank, fault = self._folder.scratch_of(target), self._ranks.group.rank, ""
        try:
            self._write_part(captured, scratch)
        except OSError as error:
            fault = f"rank {rank}: {type(error).__name__}: {error}"
        if rank:
            return self._follow_first(target, fault)
        try:
            self._await_others(scratch, fault)
            return self._conclude(scratch, target, facts, config)
        except BaseException:
            abandon(scratch)
            raise

    def _follow_first(self, target: Path, fault: str) -> int:
        """Leave a note with this rank's fault, "" without one, and wait for the first rank.

        Returns:
            The size of the checkpoint, in bytes.
        """
        scratch = self._folder.scratch_of(target)
        try:
            write(scratch / f"{NOTE}{self._ranks.group.rank}", json.dumps(fault))
        except OSError:  # the disk is full, and the other ranks must not wait for this one
            abandon(scratch)
            raise
        _wait_until(lambda: target.exists() or not scratch.exists(), "the first rank's manifest")
        if fault or not target.exists():
            raise OSError(fault or f"{scratch} was not concluded; the first rank's log says why")
        return size_of(target)

    def _await_others(self, scratch: Path, fault: str) -> None:
        """Wait for the notes of the other ranks. Raise OSError if a rank has a fault."""
        notes = [scratch / f"{NOTE}{other}" for other in range(1, self._ranks.group.size)]
        _wait_until(
            lambda: all(path.exists() for path in notes) or not scratch.exists(),
            "the parts of all ranks",
        )
        if not scratch.exists():
            raise OSError(f"{scratch} was removed by a rank that could not write to it")
        if faults := [f for f in (fault, *(read_json(p) for p in notes)) if f]:
            raise OSError("; ".join(faults))
        for path in notes:
            path.unlink()

    def _on_all(self, work: Callable[[], Any], only_first: bool = False) -> list[Any]:
        """Do the work on all ranks or only on the first. Return the result of each rank.

        Raises:
            OSError: on every rank, if the work failed on one of them.
        """
        if self._ranks.alone:
            return [work()]
        done, fault = None, ""
        try:
            if not only_first or self._ranks.group.rank == 0:
                done = work()
        except OSError as error:
            fault = f"{type(error).__name__}: {error}"
        by_rank = self._ranks.tell([done, fault])
        faults = [f"rank {rank}: {fault}" for rank, (_, fault) in enumerate(by_rank) if fault]
        if faults:
            raise OSError("; ".join(faults))
        return [done for done, _ in by_rank]

    def _written_before(self, target: Path) -> int:
        if size := self._folder.whole(target):
            self._folder.choose(target)
        return size

    def _prepare(self, target: Path, scratch: Path) -> None:
        if target.exists():
            self._folder.set_aside(target, "it is written once more")
        self._folder.make_scratch(scratch)

    def _write_part(self, captured: Capture, scratch: Path) -> None:
        """Write this rank's files, which are on the disk when this returns."""
        rank = self._ranks.group.rank
        for name, tensors in captured.tensors.items():
            if name in SHARED and rank:
                continue
            path = scratch / file_of(name, rank if name in OWN else 0)
            write_tensors(tensors, path)
            sync(path)

    def _conclude(
        self, scratch: Path, target: Path, facts: Mapping[str, Any], config: Mapping[str, Any]
    ) -> int:
        """Complete a folder that holds all tensors, and make it the newest checkpoint."""
        more = {"version": version_of(facts), "created": time.time(), "config": config}
        write_json(scratch / STATE, {**facts, **more})
        size = seal(scratch)
        self._folder.add(scratch, target)
        return size


def abandon(scratch: Path) -> None:
    """Remove an unfinished checkpoint, so that no rank waits for it.

    Another rank may be writing into the folder, so its files cannot always be deleted. Renaming the
    folder always works, and a later start deletes the rest.
    """
    try:
        discard(scratch)
    except OSError:  # another rank was first, or the disk has no room for a name
        shutil.rmtree(scratch, ignore_errors=True)


def _wait_until(there: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PART_SECONDS
    while not there():
        if time.monotonic() > deadline:
            raise OSError(f"{what} did not come within {PART_SECONDS:.0f} s")
        time.sleep(0.02)
