"""Copies of a run's checkpoints in a bucket, made in the background."""

from __future__ import annotations

import errno
import logging
import math
import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from stream_ssl.buckets.folders import Bucket, is_url
from stream_ssl.durable import MANIFEST
from stream_ssl.learning.checkpoint_layout import step_in, steps_in
from stream_ssl.observe.checkpoint_metrics import CheckpointMetrics

log = logging.getLogger("stream_ssl.learner")

LAST_COPY_SECONDS = 20.0
"""The longest time for which the end of a run waits for the copy of its last checkpoint."""
KEEP = 3
"""The number of the newest copies that stay in the bucket."""
SCRATCH = ".copying"
"""The folder of the run that holds links to the files of the checkpoint that is being copied."""


@dataclass(frozen=True)
class CopySettings:
    """Settings of the copies of checkpoints in a bucket.

    Args:
        to: address of a folder for this run alone, such as s3://bucket/laptop. null: no copies.
        every_seconds: seconds between two copies; 0.1 or more.
    """

    to: str | None = None
    every_seconds: float = 600.0

    def __post_init__(self) -> None:
        if self.to is not None and not is_url(self.to):
            raise ValueError(
                f"copies.to is {self.to!r}: give an address such as s3://bucket/laptop or "
                "file:///mnt/laptop"
            )
        if not 0.1 <= self.every_seconds < math.inf:
            raise ValueError(
                f"copies.every_seconds is {self.every_seconds}: must be a number from 0.1 on"
            )


class CheckpointCopies:
    """A thread that copies the newest checkpoint to a bucket from time to time.

    Training never waits for a copy. A copy that fails is tried again `every_seconds` later. The
    settings must have an address.

    Raises:
        ValueError: the address cannot be used.
    """

    def __init__(
        self,
        settings: CopySettings,
        run: Path,
        checkpoints: Path,
        metrics: CheckpointMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert settings.to is not None
        self._settings, self._bucket = settings, Bucket(settings.to)
        self._scratch, self._checkpoints = run / SCRATCH, checkpoints
        self._metrics, self._clock = metrics, clock
        self._copied = ""  # the name of the newest copied checkpoint
        self._disk: int | None = None  # the device of the disk that has this copy
        self._due_since = math.nan  # the time at which a checkpoint began to wait; NaN: none
        self._failed = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="copies", daemon=True)
        metrics.watch_copies(self.late)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Copy the last checkpoint, and wait at most LAST_COPY_SECONDS for it."""
        self._closing.set()
        self._thread.join(LAST_COPY_SECONDS)
        if self._thread.is_alive():
            text = "the last checkpoint was not copied to %s within %.0f s. It is in %s"
            log.warning(text, self._bucket.url, LAST_COPY_SECONDS, self._checkpoints)

    def late(self) -> float:
        """Return for how many seconds a checkpoint has waited to be copied; 0: none waits."""
        since = self._due_since
        return 0.0 if math.isnan(since) else self._clock() - since

    def copy(self) -> None:
        """Copy the newest checkpoint, unless the bucket holds it. Never raises an exception."""
        name = "(the newest)"
        try:
            found = [path.name for path in steps_in(self._checkpoints)]
            if not found or found[-1] == self._copied:
                return
            name = found[-1]
            if math.isnan(self._due_since):
                self._due_since = self._clock()
            if self._failed:  # a client keeps credentials, which may have been renewed since
                self._bucket = Bucket(self._bucket.url)
            self._check_mounted()
            self._link(self._checkpoints / name)
            self._prune(name)  # before the copy, because a full disk has no room for one more
            # After a restart, the bucket may hold this checkpoint. A second copy could fail, and
            # would then have destroyed the first.
            if not self._bucket.holds(self._scratch, name):
                self._bucket.upload(self._scratch, name)
            self._disk = self._bucket.disk()
        except Exception as error:  # each protocol raises errors of its own
            self._metrics.copy_failed()
            if not self._failed:
                text = "checkpoint %s was not copied to %s, training continues: %s: %s"
                details = name, self._bucket.url, type(error).__name__, error
                log.warning(text, *details)
            self._failed = True
            return
        finally:
            shutil.rmtree(self._scratch, ignore_errors=True)
        if self._failed:
            log.info("checkpoints are copied to %s again", self._bucket.url)
        self._copied, self._due_since, self._failed = name, math.nan, False
        self._metrics.copied(step_in(name) or 0)

    def _run(self) -> None:
        while not self._closing.wait(self._settings.every_seconds):
            self.copy()
        self.copy()

    def _check_mounted(self) -> None:
        """Raise OSError if the disk that has the newest copy is not mounted any more.

        A copy in the empty folder of the mount point would be on a disk of this machine.
        """
        if self._disk in (None, self._bucket.disk()) or self._copied in self._bucket.names():
            return
        raise OSError(
            errno.ENODEV,
            "the disk that has the earlier copies is not mounted here: mount it again",
        )

    def _link(self, checkpoint: Path) -> None:
        """Link the checkpoint's files, because the learner may remove it during the copy."""
        shutil.rmtree(self._scratch, ignore_errors=True)
        self._scratch.mkdir()
        for path in checkpoint.iterdir():
            try:
                os.link(path, self._scratch / path.name)
            except OSError:  # some file systems have no hard links
                shutil.copyfile(path, self._scratch / path.name)

    def _prune(self, newest: str) -> None:
        """Remove incomplete and the oldest copies, but not `newest`, whose step may be lower."""
        steps = {name: step_in(name) for name in self._bucket.names() - {newest}}
        copies = sorted((step, name) for name, step in steps.items() if step is not None)
        whole = [name for _, name in copies if MANIFEST in self._bucket.names(name)]
        for _, name in copies:
            if name not in whole[1 - KEEP :]:
                self._bucket.remove(name)
