"""Writes, keeps and finds checkpoints. Each checkpoint is one folder, either complete or absent.

`saved.py` describes the content of a folder.
"""

from __future__ import annotations

import json
import logging
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from stream_ssl.batch import START, Offset
from stream_ssl.bounded_files import read_json, read_map
from stream_ssl.durable import (
    discard,
    make_folder,
    point,
    publish,
    seal,
    sync,
    write,
    write_json,
)
from stream_ssl.learning.learner import Capture, Learner, made_by
from stream_ssl.learning.ranks import Ranks
from stream_ssl.learning.records import Idle, StepRecord
from stream_ssl.learning.retention import Entry, history, newest_kept, within
from stream_ssl.learning.saved import (
    FORMAT,
    LATEST,
    MOST_STATE,
    OWN,
    PREFIX,
    SHARED,
    STATE,
    Saved,
    checkpoint_damage,
    offset_of,
    place,
    suffix_of,
)
from stream_ssl.memory.process_group import SINGLE_PROCESS

log = logging.getLogger(__name__)

ALONE, TOGETHER = 1, 2  # older formats: of one process, and of ranks with one journal
DAMAGED, MOST_DAMAGED = "damaged-", 3  # the files of this many damaged checkpoints are kept
INCOMPLETE = ".incomplete-"
TOLD = "told-"
PART_SECONDS = 600.0
"""Time limit in seconds for the other ranks to complete a checkpoint in the background."""
IDLE_SECONDS = 60.0
"""Age in seconds of the last checkpoint at which a new one is due while the stream pauses."""
HISTORY_SHARE = 0.25
"""Largest share of the disk's free space that the history may use by default."""


class CheckpointError(RuntimeError):
    """A checkpoint is complete but cannot be used."""


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
            and a history: the last checkpoint of each hour for a day, and of each day for a week.
        every_seconds: a checkpoint is due this many seconds after the last; null: not by time,
            except for one checkpoint after the stream has paused for a minute.
        every_steps: a checkpoint is also due this many steps after the last; null: not by steps.
        history_bytes: largest disk space of the history in bytes; the oldest checkpoints are
            removed first. null: a quarter of the space that would be free without the history. 0:
            no history.
        behind: write in the background, so that training waits only for a copy of the state. The
            copy needs as much main memory as the state. false: training waits for the disk.
        ranks: the ranks of the run, which must all call `newest`, `begin` and `save` together;
            None: one process.

    Attributes:
        damaged: number of damaged checkpoints that were set aside.
        journal: id of the journal to which offsets refer.

    Raises:
        ValueError: an argument is outside its range.
    """

    def __init__(
        self,
        folder: Path | str,
        keep: int = 3,
        every_seconds: float | None = 60.0,
        every_steps: int | None = None,
        behind: bool = True,
        ranks: Ranks | None = None,
        history_bytes: int | None = None,
    ) -> None:
        if keep < 1:
            raise ValueError(
                f"keep is {keep}: at least the newest checkpoint stays; 2 or more "
                "allow falling back"
            )
        if any(every is not None and every <= 0 for every in (every_seconds, every_steps)):
            raise ValueError(
                f"every_seconds={every_seconds}, every_steps={every_steps}: each positive, or None"
            )
        if history_bytes is not None and history_bytes < 0:
            raise ValueError(
                f"history_bytes is {history_bytes}: it is a number of bytes, 0 for no history, or "
                "None for a quarter of the free space"
            )
        self.folder, self.keep, self.history_bytes = Path(folder), keep, history_bytes
        self.every_seconds, self.every_steps = every_seconds, every_steps
        self.damaged = 0
        self._copies = Copies() if behind else None
        self._writing: Writing | None = None
        self._step = self._tried_step = self._durable_step = 0
        self._tried = time.monotonic()
        self._ranks = Ranks(SINGLE_PROCESS, torch.device("cpu")) if ranks is None else ranks
        self._before: Sequence[Sequence[Offset]] = ()  # earlier divisions of the journal
        self.journal: str | None = None
        self._journals: dict[str, Any] | None = None  # divisions by id, if there are several
        if self._ranks.group.rank:
            return
        make_folder(self.folder)
        for leftover in [*self.folder.glob(f"{INCOMPLETE}*"), *self.folder.glob(".discarded-*")]:
            shutil.rmtree(leftover, ignore_errors=True)

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
        if self._ranks.alone:
            size = self._finish(target, lambda: self._write(target, captured, config))
        else:
            size = self._write_together(target, captured, config)
        self._durable_step = int(captured.facts["step"])
        return self._record(captured, target, size, started, stalled=None)

    def begin(self, learner: Learner, config: Mapping[str, Any]) -> None:
        """Start to write a checkpoint in the background.

        No other checkpoint may be in progress. The caller may change the state after this returns.
        `finished` returns the checkpoint when it is durable.

        Raises:
            OSError: as in `save`, if the error is known before the background work starts.
        """
        assert not self.busy, "one at a time"
        if self._copies is None:
            record = self.save(learner, config)
            self._writing = Writing(lambda: record)
            return
        started = time.monotonic()
        found, target = self._captured(learner.capture(live=True))
        captured = Capture(self._copies.take(found.tensors), found.facts)
        work: Callable[[], int]
        if self._ranks.alone:
            work = lambda: self._finish(target, lambda: self._write(target, captured, config))  # noqa: E731
        else:
            scratch = self.folder / f"{INCOMPLETE}{target.name}"
            self._on_all(lambda: self._prepare(target, scratch), only_first=True)
            facts = {**captured.facts, **self._streams(captured.facts["offset"])}
            work = lambda: self._write_behind(target, scratch, captured, facts, config)  # noqa: E731
        stalled = time.monotonic() - started
        self._writing = Writing(lambda: self._record(captured, target, work(), started, stalled))

    def finished(self, wait: bool = False) -> CheckpointRecord | None:
        """Return the checkpoint of `begin` once when it is durable, and None otherwise.

        Args:
            wait: block until the checkpoint is durable, if one is in progress.

        Raises:
            OSError: the disk did not accept the checkpoint.
        """
        if self._writing is None or not (wait or self._writing.done):
            return None
        writing, self._writing = self._writing, None
        # `needed` refers to the current journal, which may differ from the checkpoint's journal.
        record = replace(writing.result(), needed=self.needed() or START)
        self._durable_step = record.step
        return record

    def _captured(self, capture: Capture) -> tuple[Capture, Path]:
        self._tried = time.monotonic()
        captured = replace(capture, facts={**capture.facts, "journal": self.journal})
        self._step = self._tried_step = int(captured.facts["step"])
        return captured, self.folder / f"{PREFIX}{self._step:09d}"

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
        found = self._told_by_first(self._newest)
        if found is not None:
            self._before = found.before(self._ranks.group.size)
            self.journal = found.journal
            self._step = self._tried_step = self._durable_step = found.step
        return found

    def before(self, updated: int) -> Saved | None:
        """Return the newest complete checkpoint of weights made before step `updated`, or None.

        The result is the same on all ranks. `latest` then names this checkpoint.

        Raises:
            CheckpointError, OSError: as in `newest`.
        """

        def find() -> Saved | None:
            found = self._newest(updated)
            if found is not None:
                self._point_back(found.path)
            return found

        return self._told_by_first(find)

    def discard_between(self, updated: int, step: int) -> None:
        """Remove checkpoints up to `step` whose weights were made after step `updated`."""
        if self._ranks.group.rank == 0:
            for entry in self._entries():
                number = int(entry.path.name[len(PREFIX) :])
                if updated < entry.updated and number <= step:
                    log.info("checkpoint %s is removed: its weights had diverged", entry.path)
                    discard(entry.path)

    def _told_by_first(self, find: Callable[[], Saved | None]) -> Saved | None:
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
        told = self._ranks.tell([None if found is None else found.path.name, refused])[0]
        if told[1]:
            raise CheckpointError(told[1])
        if told[0] is not None and found is None:
            path = self.folder / told[0]
            found = Saved(path, read_map(path / STATE, MOST_STATE))
        return found

    def _newest(self, updated: int | None = None) -> Saved | None:
        """Return the newest complete checkpoint.

        With `updated`, only weights made before this step count.
        """
        next(self.folder.iterdir(), None)  # raises if unreadable; `glob` would find nothing
        paths = self._paths()
        if updated is not None:
            paths = [entry.path for entry in self._entries() if entry.updated < updated]
        for path in reversed(paths):
            reason = checkpoint_damage(path)
            if reason is not None:
                self._set_aside(path, reason)
                continue
            facts = read_map(path / STATE, MOST_STATE)
            if facts["version"] > FORMAT:
                raise CheckpointError(
                    f"{path} has format {facts['version']}, this program reads up to {FORMAT}: "
                    "upgrade stream-ssl, or choose another run folder"
                )
            if self.damaged:
                self._point_back(path)
            return Saved(path, facts)
        if self.damaged and updated is None:
            log.error("no checkpoint in %s is whole: the run starts from scratch", self.folder)
        return None

    def read_apart(self, journal: str, saved: Saved | None) -> None:
        """Switch to one journal per rank, with `journal` for this rank. All ranks must call this.

        The positions in the checkpoint's other journals, which no rank reads now, are kept.
        """
        self.journal, self._before = journal, ()
        self._journals = {}
        if saved is not None and saved.journals is not None:
            self._journals |= saved.journals
        elif saved is not None and saved.journal is not None:
            self._journals[saved.journal] = [
                [place(one) for one in offsets] for offsets in saved.divisions()
            ]

    @property
    def journals(self) -> Set[str]:
        """Ids of the journals that the checkpoint knows, if ranks have their own journals."""
        return set(self._journals or ())

    def follow(self, journal: str | None) -> bool:
        """Set the journal of the next steps. Return whether it is a different journal."""
        before, self.journal = self.journal, journal or self.journal
        changed = before not in (None, self.journal)
        if changed:
            self._before = ()
        return changed

    def needed(self, beyond: int = 0) -> Offset | None:
        """Return the smallest offset that the newest `keep` checkpoints replay from, or None.

        The history needs nothing in the journal: a run that goes back to it starts with what the
        journal still holds. The checkpoint of step 0 needs nothing either, because it starts at the
        beginning.

        Args:
            beyond: a journal record; only offsets in later records count.
        """
        offsets = []
        for path in self._paths()[-self.keep :]:
            try:
                facts = read_map(path / STATE, MOST_STATE)
                if not facts["step"]:
                    continue
                if self._journals is None:
                    same = facts.get("journal") in (None, self.journal)
                    offsets.append(offset_of(facts) if same else START)
                else:
                    ended = Saved(path, facts).divisions(self.journal)
                    offsets.append(min(ended[-1]) if ended else START)
            except (OSError, ValueError, KeyError, TypeError):
                continue  # damaged: `newest` will report it and never replay from it
        return min((offset for offset in offsets if offset.record > beyond), default=None)

    def _finish(self, target: Path, write: Callable[[], int]) -> int:
        """Write the folder and make it the newest checkpoint."""
        size = write()
        point(self.folder / LATEST, target.name)
        self._prune()
        return size

    def _write_together(self, target: Path, captured: Capture, config: Mapping[str, Any]) -> int:
        """Do what `_write` does, but with all ranks.

        Each rank writes its part. Then the first rank writes the manifest.
        """
        rank, scratch = self._ranks.group.rank, self.folder / f"{INCOMPLETE}{target.name}"
        if size := self._on_all(lambda: self._written_before(target), only_first=True)[0]:
            return int(size)
        try:
            self._on_all(lambda: self._prepare(target, scratch), only_first=True)
            self._on_all(lambda: self._write_part(captured, scratch))
            facts = {**captured.facts, **self._streams(captured.facts["offset"])}
            write = lambda: _conclude(scratch, target, facts, config)  # noqa: E731
            sizes = self._on_all(lambda: self._finish(target, write), only_first=True)
        except BaseException:
            if rank == 0:
                shutil.rmtree(scratch, ignore_errors=True)
            raise
        return int(sizes[0])

    def _write_behind(
        self,
        target: Path,
        scratch: Path,
        captured: Capture,
        facts: Mapping[str, Any],
        config: Mapping[str, Any],
    ) -> int:
        """Do what `_write_together` does, in a thread.

        The ranks train at the same time, so they communicate through files.
        """
        rank, fault = self._ranks.group.rank, ""
        try:
            self._write_part(captured, scratch)
        except (OSError, SafetensorError) as error:
            fault = f"rank {rank}: {type(error).__name__}: {error}"
        if rank:
            write(scratch / f"{TOLD}{rank}", json.dumps(fault))
            _wait_until(
                lambda: target.exists() or not scratch.exists(), "the first rank's manifest"
            )
            if fault or not target.exists():
                raise OSError(
                    fault or f"{scratch} was not concluded; the first rank's log says why"
                )
            return sum(path.stat().st_size for path in target.iterdir())
        try:
            told = [scratch / f"{TOLD}{other}" for other in range(1, self._ranks.group.size)]
            _wait_until(lambda: all(path.exists() for path in told), "the parts of all ranks")
            if faults := [f for f in (fault, *(read_json(p) for p in told)) if f]:
                raise OSError("; ".join(faults))
            for path in told:
                path.unlink()
            return self._finish(target, lambda: _conclude(scratch, target, facts, config))
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise

    def _on_all(self, work: Callable[[], Any], only_first: bool = False) -> list[Any]:
        """Do the work on all ranks or only on the first. Return the result of each rank.

        Raises:
            OSError: on every rank, if the work failed on one of them.
        """
        done, fault = None, ""
        try:
            if not only_first or self._ranks.group.rank == 0:
                done = work()
        except (OSError, SafetensorError) as error:
            fault = f"{type(error).__name__}: {error}"
        told = self._ranks.tell([done, fault])
        faults = [f"rank {rank}: {fault}" for rank, (_, fault) in enumerate(told) if fault]
        if faults:
            raise OSError("; ".join(faults))
        return [done for done, _ in told]

    def _prepare(self, target: Path, scratch: Path) -> None:
        if target.exists():
            self._set_aside(target, "it is written once more")
        self._make_scratch(scratch)

    def _make_scratch(self, scratch: Path) -> None:
        self.folder.mkdir(exist_ok=True)  # a user may have removed the folder
        self._make_room()
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()

    def _write_part(self, captured: Capture, scratch: Path) -> None:
        """Write this rank's files, which are on the disk when this returns."""
        rank = self._ranks.group.rank
        for name, tensors in captured.tensors.items():
            if name in SHARED and rank:
                continue
            path = scratch / f"{name}{suffix_of(rank) if name in OWN else ''}.safetensors"
            save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path)
            sync(path)

    def _streams(self, offset: Mapping[str, int]) -> dict[str, Any]:
        """Return the facts about the positions of all ranks' streams."""
        if self._journals is not None:
            return self._streams_apart(offset)
        offsets = [Offset(**told) for told in self._ranks.tell(dict(offset))]
        least = min(offsets)
        self._before = [ended for ended in self._before if max(ended) > least]
        divisions = [*self._before, offsets]
        return {
            "ranks": self._ranks.group.size,
            "offset": place(least),
            "divisions": [[place(one) for one in offsets] for offsets in divisions],
        }

    def _streams_apart(self, offset: Mapping[str, int]) -> dict[str, Any]:
        """Return the same facts for ranks with their own journals.

        The positions in journals that no rank reads do not change.
        """
        assert self._journals is not None
        read: dict[str, list[Offset]] = {}
        for journal, told in self._ranks.tell([self.journal, dict(offset)]):
            read.setdefault(journal, []).append(Offset(**told))
        for journal, offsets in read.items():
            before = [[Offset(**one) for one in told] for told in self._journals.get(journal, ())]
            if before and len(before[-1]) == len(offsets):
                before.pop()  # the earlier position of the same ranks
            before = [ended for ended in before if max(ended) > min(offsets)]
            self._journals[journal] = [
                [place(one) for one in ended] for ended in (*before, offsets)
            ]
        return {
            "ranks": self._ranks.group.size,
            "offset": dict(offset),
            "journals": dict(self._journals),
        }

    def _write(self, target: Path, captured: Capture, config: Mapping[str, Any]) -> int:
        if size := self._written_before(target):
            return size
        scratch = self.folder / f"{INCOMPLETE}{target.name}"
        self._make_scratch(scratch)
        try:
            for name, tensors in captured.tensors.items():
                flat = {key: tensor.contiguous() for key, tensor in tensors.items()}
                save_file(flat, scratch / f"{name}.safetensors")
            facts = dict(captured.facts)
            # These facts matter only if other ranks have read the journal, or there are several.
            if self._before or self._journals is not None:
                facts |= self._streams(captured.facts["offset"])
            size = _conclude(scratch, target, facts, config)
        except SafetensorError as error:  # safetensors raises it when the disk is full
            shutil.rmtree(scratch, ignore_errors=True)
            raise OSError(str(error)) from error
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
        return size

    def _written_before(self, target: Path) -> int:
        """Return the size in bytes of a checkpoint that was written before, else 0.

        A step names one state of a run, so a complete checkpoint of the step has this state. A
        damaged checkpoint is set aside.
        """
        if not target.exists():
            return 0
        if (reason := checkpoint_damage(target)) is not None:
            self._set_aside(target, reason)
            return 0
        return sum(path.stat().st_size for path in target.iterdir())

    def _prune(self, history_bytes: int | None = None) -> None:
        """Remove checkpoints that are neither among the newest nor in the history."""
        if not (entries := self._entries()):
            return
        kept = newest_kept(entries, self.keep) | set(self._paths()[-self.keep :])
        past = history(entries, kept)
        budget: float | None = self.history_bytes if history_bytes is None else history_bytes
        if budget is None:
            held = sum(entry.bytes for entry in past)
            budget = HISTORY_SHARE * (shutil.disk_usage(self.folder).free + held)
        kept |= {entry.path for entry in within(budget, past)}
        for path in self._paths():
            if path not in kept:
                discard(path)

    def _make_room(self) -> None:
        """Remove the history if the disk has no room for another checkpoint."""
        entries = self._entries()
        if entries and shutil.disk_usage(self.folder).free < entries[-1].bytes:
            self._prune(history_bytes=0)

    def _entries(self) -> list[Entry]:
        """Return all checkpoints whose facts can be read, the oldest first."""
        found = []
        for path in self._paths():
            try:
                facts = read_map(path / STATE, MOST_STATE)
                size = sum(file.stat().st_size for file in path.iterdir())
                found.append(Entry(path, float(facts["created"]), made_by(facts), size))
            except (OSError, ValueError, KeyError, TypeError):
                continue  # damaged: `newest` will set it aside
        return found

    def _set_aside(self, path: Path, reason: str) -> None:
        """Rename the folder of a damaged checkpoint.

        The folders of all damaged checkpoints stay, but only the newest ones keep their files.
        """
        self.damaged += 1
        log.error("checkpoint %s is damaged (%s): using the one before", path, reason)
        try:
            aside = path.with_name(DAMAGED + path.name)
            while aside.exists():
                aside = aside.with_name(aside.name + "-again")
            path.rename(aside)
            held = sorted(one for one in self.folder.glob(f"{DAMAGED}*") if any(one.iterdir()))
            for older in held[:-MOST_DAMAGED]:
                shutil.rmtree(older, ignore_errors=True)
                older.mkdir(exist_ok=True)  # the empty folder still counts as a damaged checkpoint
                log.warning("%s: its files were removed; %d newer stay", older, MOST_DAMAGED)
        except OSError as error:
            log.warning("cannot set %s aside: %s", path, error)

    def _point_back(self, path: Path) -> None:
        """Make LATEST name this checkpoint. A failure only logs a warning."""
        try:
            point(self.folder / LATEST, path.name)
        except OSError as error:
            log.warning("cannot point %s to %s: %s", self.folder / LATEST, path.name, error)

    def _paths(self) -> list[Path]:
        found = (path for path in self.folder.glob(f"{PREFIX}*") if path.is_dir())
        numbered = (path for path in found if path.name[len(PREFIX) :].isdigit())
        return sorted(numbered, key=lambda path: int(path.name[len(PREFIX) :]))


class Copies:
    """Copies of a run's state in main memory.

    The copies reuse the same memory each time, because the allocation of new pages takes longer
    than the copy.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str], Tensor] = {}

    def take(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
        """Return a copy, which is valid until the next call."""
        live = {(file, name): tensor for file in tensors for name, tensor in tensors[file].items()}
        self._kept = {key: self._copied(key, tensor) for key, tensor in live.items()}
        if any(tensor.is_cuda for tensor in live.values()):
            torch.cuda.synchronize()
        return {file: {name: self._kept[file, name] for name in tensors[file]} for file in tensors}

    def _copied(self, key: tuple[str, str], tensor: Tensor) -> Tensor:
        room = self._kept.get(key)
        if room is None or (room.shape, room.dtype) != (tensor.shape, tensor.dtype):
            room = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        return room.copy_(tensor.detach(), non_blocking=True)


class Writing:
    """A thread that writes a checkpoint.

    If the process ends before the thread, the checkpoint does not exist.
    """

    def __init__(self, work: Callable[[], CheckpointRecord]) -> None:
        self._work = work
        self._found: CheckpointRecord | BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._found = self._work()
        except BaseException as error:
            self._found = error

    @property
    def done(self) -> bool:
        """Whether the thread has ended."""
        return not self._thread.is_alive()

    def result(self) -> CheckpointRecord:
        """Wait for the thread, then return or raise its result."""
        self._thread.join()
        if isinstance(self._found, BaseException):
            raise self._found
        assert self._found is not None
        return self._found


def _wait_until(there: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PART_SECONDS
    while not there():
        if time.monotonic() > deadline:
            raise OSError(f"{what} did not come within {PART_SECONDS:.0f} s")
        time.sleep(0.02)


def _conclude(
    scratch: Path, target: Path, facts: Mapping[str, Any], config: Mapping[str, Any]
) -> int:
    """Write facts and manifest into a folder with all tensors, then rename it to its final name."""
    version = TOGETHER if "divisions" in facts else ALONE
    version = FORMAT if "journals" in facts else version
    state = {**facts, "version": version, "created": time.time(), "config": config}
    write_json(scratch / STATE, state)
    size = seal(scratch)
    publish(scratch, target)
    return size
