"""The folder of a run's checkpoints: which of them exist, which is whole, and which stay."""

from __future__ import annotations

import errno
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

from stream_ssl.durable import damage_of, discard, entries, make_folder, move, point, publish
from stream_ssl.learning.checkpoint_layout import (
    DAMAGED,
    INCOMPLETE,
    LATEST,
    facts_in,
    folder_of,
    made_by,
    size_of,
    step_in,
    steps_in,
    unreadable_format,
)
from stream_ssl.learning.retention import StoredCheckpoint, history, newest_kept, within
from stream_ssl.learning.saved import Saved, checkpoint_damage

log = logging.getLogger("stream_ssl.learning.checkpoint")

MOST_DAMAGED = 3  # the files of this many damaged checkpoints are kept
NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)
"""The errors of file systems without symbolic links, such as exFAT and some network shares.

A run works without LATEST, because it continues from the newest step. People and other programs
use it.
"""
HISTORY_SHARE = 0.25
"""Largest share of the disk's free space that the history may use."""


class CheckpointError(RuntimeError):
    """A checkpoint is complete but cannot be used."""


class CheckpointFolder:
    """The checkpoints on the disk. With several ranks, only the first one changes the folder.

    Args:
        path: the folder.
        keep: number of newest checkpoints to keep.

    Attributes:
        damaged: number of damaged checkpoints that were set aside.
    """

    def __init__(self, path: Path, keep: int) -> None:
        self.path, self._keep = path, keep
        self.damaged = 0
        self._links_failed = False
        self._disk: int | None = None  # device of the disk that has the newest checkpoint

    def open(self) -> None:
        """Create the folder, and remove what a killed process has left."""
        make_folder(self.path)
        for leftover in [
            *entries(self.path, f"{INCOMPLETE}*"),
            *entries(self.path, ".discarded-*"),
        ]:
            shutil.rmtree(leftover, ignore_errors=True)
        for copy in entries(self.path, LATEST):
            if copy.is_dir() and not copy.is_symlink():
                self._name(copy)

    def _name(self, copy: Path) -> None:
        """Give a copy of a checkpoint its own name, and let LATEST be a link again.

        Some tools copy the checkpoint in place of the link when they back up or restore a run.

        Raises:
            OSError: the copy cannot be read or renamed.
        """
        if (reason := checkpoint_damage(copy)) is not None:
            self.set_aside(copy, reason)
            return
        target = folder_of(self.path, Saved(copy, facts_in(copy)).step)
        log.warning("%s is a folder and not a link: it becomes %s", copy, target)
        if self.whole(target):
            discard(copy)
        else:
            move(copy, target)
        self.point_back(target)

    def newest(self, updated: int | None = None) -> Saved | None:
        """Return the newest complete checkpoint. Damaged ones are set aside.

        Args:
            updated: only weights made before this step count.

        Raises:
            CheckpointError: a newer version of this program wrote the checkpoint.
            OSError: files cannot be opened for now.
        """
        next(self.path.iterdir(), None)  # raises if unreadable; `glob` would find nothing
        paths = steps_in(self.path)
        if updated is not None:
            paths = [entry.path for entry in self._entries() if entry.updated < updated]
        for path in reversed(paths):
            reason = checkpoint_damage(path)
            if reason is not None:
                self.set_aside(path, reason)
                continue
            facts = facts_in(path)
            if why := unreadable_format(path, facts):
                raise CheckpointError(why)
            if self.damaged:
                self.point_back(path)
                self._empty_damaged()
            self._disk = path.stat().st_dev
            return Saved(path, facts)
        if self.damaged and updated is None:
            log.error("no checkpoint in %s is whole: the run starts from scratch", self.path)
        return None

    def last_kept(self) -> Iterator[Saved]:
        """Yield the newest `keep` checkpoints, without those whose facts are damaged.

        Raises:
            OSError: files cannot be opened for now.
        """
        for path in steps_in(self.path)[-self._keep :]:
            try:
                yield Saved(path, facts_in(path))
            except (OSError, ValueError) as error:
                damage_of(error)  # `newest` will report it, and no run replays from it

    def discard_between(self, updated: int, step: int) -> None:
        """Remove checkpoints up to `step` whose weights were made after step `updated`."""
        for entry in self._entries():
            number = step_in(entry.path.name)
            if updated < entry.updated and number is not None and number <= step:
                log.info("checkpoint %s is removed: its weights had diverged", entry.path)
                discard(entry.path)

    def scratch_of(self, target: Path) -> Path:
        """Return the folder in which a checkpoint is written before it gets its name."""
        return self.path / f"{INCOMPLETE}{target.name}"

    def make_scratch(self, scratch: Path) -> None:
        """Make an empty folder for a checkpoint, and room on the disk.

        Raises:
            OSError: the folder cannot be made, or the disk of the checkpoints is not mounted.
        """
        self._check_mounted()
        self.path.mkdir(exist_ok=True)  # a user may have removed the folder
        self._make_room()
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()

    def _check_mounted(self) -> None:
        """Raise OSError if the disk that has the newest checkpoint is not mounted any more.

        The empty folder of the mount point belongs to another disk. A checkpoint there would let
        the receiver trim samples that the checkpoints on the first disk still need.
        """
        place = self.path if self.path.exists() else self.path.parent
        if self._disk not in (None, place.stat().st_dev) and not steps_in(self.path):
            raise OSError(
                errno.ENODEV,
                "the disk that has the earlier checkpoints is not mounted here: mount it again",
                str(self.path),
            )

    def add(self, scratch: Path, target: Path) -> None:
        """Give a sealed folder the name of its checkpoint, and make it the newest one."""
        publish(scratch, target)
        self._disk = target.stat().st_dev
        self.choose(target)

    def choose(self, target: Path) -> None:
        """Let LATEST name this checkpoint, and remove those that need not stay."""
        try:
            point(self.path / LATEST, target.name)
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            if not self._links_failed:
                text = "%s is not written, because its file system has no symbolic links (%s)"
                log.warning(text, self.path / LATEST, error.strerror)
            self._links_failed = True
        self._prune()

    def whole(self, target: Path) -> int:
        """Return the size in bytes of a checkpoint that was written before, else 0.

        A step names one state of a run, so a complete checkpoint of the step has this state. A
        damaged checkpoint is set aside.
        """
        if not target.exists():
            return 0
        if (reason := checkpoint_damage(target)) is not None:
            self.set_aside(target, reason)
            return 0
        return size_of(target)

    def point_back(self, path: Path) -> None:
        """Make LATEST name this checkpoint. A failure only logs a warning."""
        try:
            point(self.path / LATEST, path.name)
        except OSError as error:
            log.warning("cannot point %s to %s: %s", self.path / LATEST, path.name, error)

    def set_aside(self, path: Path, reason: str) -> None:
        """Rename the folder of a damaged checkpoint."""
        self.damaged += 1
        log.error("checkpoint %s is damaged: %s", path, reason)
        try:
            aside = path.with_name(DAMAGED + path.name)
            while aside.exists():
                aside = aside.with_name(aside.name + "-again")
            move(path, aside)
        except OSError as error:
            log.warning("cannot set %s aside: %s", path, error)

    def _empty_damaged(self) -> None:
        """Remove the files of all but the newest damaged checkpoints.

        While no checkpoint is whole, all keep their files, because perhaps one can be repaired.
        """
        try:
            held = sorted(one for one in entries(self.path, f"{DAMAGED}*") if any(one.iterdir()))
            for older in held[:-MOST_DAMAGED]:
                shutil.rmtree(older, ignore_errors=True)
                older.mkdir(exist_ok=True)  # it still counts as a damaged checkpoint
                log.warning("%s: its files were removed; %d newer stay", older, MOST_DAMAGED)
        except OSError as error:
            log.warning("cannot remove damaged checkpoints: %s", error)

    def _prune(self, keep_history: bool = True) -> None:
        """Remove checkpoints that are neither among the newest nor in the history."""
        if not (entries := self._entries()):
            return
        paths = steps_in(self.path)
        kept = newest_kept(entries, self._keep) | set(paths[-self._keep :])
        past = history(entries, kept)
        if keep_history:
            held = sum(entry.bytes for entry in past)
            budget = HISTORY_SHARE * (shutil.disk_usage(self.path).free + held)
            kept |= {entry.path for entry in within(budget, past)}
        read = {entry.path for entry in entries}
        for path in paths:
            if path not in kept and (path in read or self._is_damaged(path)):
                self._discard(path)

    def _discard(self, path: Path) -> None:
        """Remove a checkpoint. A failure is logged, because the newest checkpoint is durable."""
        try:
            discard(path)
        except OSError as error:
            log.warning("checkpoint %s cannot be removed, and stays: %s", path, error.strerror)

    def _is_damaged(self, path: Path) -> bool:
        try:
            return checkpoint_damage(path) is not None
        except OSError as error:  # such as too many open files
            log.warning("checkpoint %s stays, because it cannot be read: %s", path, error)
            return False

    def _make_room(self) -> None:
        """Remove the history if the disk has no room for another checkpoint."""
        entries = self._entries()
        if entries and shutil.disk_usage(self.path).free < entries[-1].bytes:
            self._prune(keep_history=False)

    def _entries(self) -> list[StoredCheckpoint]:
        """Return all checkpoints whose facts can be read, the oldest first."""
        found = []
        for path in steps_in(self.path):
            try:
                facts = facts_in(path)
                found.append(
                    StoredCheckpoint(path, float(facts["created"]), made_by(facts), size_of(path))
                )
            except (OSError, ValueError, KeyError, TypeError):
                continue  # damaged: `newest` will set it aside
        return found
