"""Keeps the bytes of the memory's samples as they were sent, in files."""

from __future__ import annotations

import errno
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stream_ssl.batch import Origin
from stream_ssl.originals import Originals, name_of
from stream_ssl.pictures import png
from stream_ssl.rate_limited_logger import RateLimitedLogger

log = logging.getLogger(__name__)

SWEEP = 256
"""Samples that have left the learner before the files of those that nobody holds are deleted."""

REASONS = ("budget", "disk")


class KeptOriginals:
    """The bytes of samples as they were sent, for samples that the memory holds or may soon hold.

    A decoding thread stores the bytes of each sample before the learner sees the sample. The
    learner reports which samples have left it, and which it holds. The files of the others are
    deleted, also at the start. A file that the newest checkpoint holds is kept until the next
    checkpoint, because a run may go back to it.

    A sample whose bytes cannot be stored is counted and learned from as usual. Raw pixels are
    stored as PNG. Vectors, and pixels of exactly the memory's shape, are not stored, because the
    memory itself has them. `keep`, `arrived` and `read` may be called from any thread, the other
    methods from the learner's thread.

    Args:
        folder: the folder of the files.
        shape: (H, W, C) of the memory's pixels.
        budget: most bytes of all files; at least 1. A sample that finds no room is not stored.
        held: names of the files that the newest checkpoint holds.

    Attributes:
        bytes: bytes of all files.
        unkept: number of samples that were not stored, by reason: "budget" or "disk".
    """

    def __init__(
        self,
        folder: Path,
        shape: tuple[int, int, int],
        budget: int | None = None,
        held: Iterable[str] = (),
    ) -> None:
        if budget is not None and budget < 1:
            raise ValueError(f"budget {budget}: must be at least 1 byte, or null to keep nothing")
        self._shape, self._budget = shape, budget or 0
        self._lock = threading.Lock()  # guards the following attributes
        self._sizes: dict[str, int] = {}
        self._on_way: Counter[str] = Counter()  # samples that the learner has not received yet
        self.bytes = 0
        self.unkept: Counter[str] = Counter()
        self._left: set[str] = set()  # may have to be deleted
        self._deferred: set[str] = set()  # to be deleted after the next checkpoint
        self._saved, self._saving = set(held), set[str]()
        self._log = RateLimitedLogger(log, seconds=60.0)
        self._files: Originals | None = None
        self._folder = folder
        try:
            self._files = Originals(folder)
            self._files.keep_only(self._saved)
            self._sizes = {name: self._files.size(name) for name in self._files.names()}
            self.bytes = sum(self._sizes.values())
        except OSError as error:
            self._tell(error)

    def keep(self, row: Mapping[str, Any], data: bytes | memoryview) -> str | None:
        """Store the bytes of a decoded sample; return their name, or None if they are not kept."""
        codec, shape = row["codec"], row.get("shape")
        if codec == "vector" or (codec == "raw" and tuple(shape or ()) == self._shape):
            return None
        if codec == "raw":
            data = png(np.frombuffer(data, np.uint8).reshape(shape or ()), level=1)
        name = name_of(data)
        with self._lock:
            is_new = name not in self._sizes
            fits = not is_new or self.bytes + len(data) <= self._budget
            if fits:
                self._on_way[name] += 1
                self.bytes += len(data) if is_new else 0
                self._sizes[name] = len(data)
            else:
                self.unkept["budget"] += 1
        if not fits:
            self._log.warning(
                "budget",
                f"the originals of new samples are not kept, because those in {self._folder} take "
                f"{self.bytes} bytes: raise originals.budget",
            )
            return None
        try:
            if self._files is None:
                self._files = Originals(self._folder)
            if is_new:
                self._files.put(data)
        except OSError as error:
            self._tell(error)
            with self._lock:
                self._on_way[name] -= 1
                self.bytes -= self._sizes.pop(name, 0)
            return None
        return name

    def arrived(self, origins_B: Sequence[Origin | None]) -> None:
        """Record that the learner has received a batch."""
        with self._lock:
            self._on_way -= Counter(_names(origins_B))

    def left(self, *groups: Sequence[Origin | None] | None, held: Callable[[], set[str]]) -> None:
        """Record that samples were dropped, refused, trained on or evicted.

        Args:
            groups: their origins. Samples that are still held may be among them.
            held: returns the names that the learner holds.
        """
        for origins in groups:
            self._left.update(_names(origins or ()))
        if len(self._left) >= SWEEP:
            self.sweep(held())

    def reloaded(self, before: set[str], held: set[str]) -> None:
        """Record that the learner loaded an older memory. Until now it held the names `before`."""
        self._left |= before
        self.sweep(held)

    def sweep(self, held: set[str]) -> None:
        """Delete the files of samples that have left and that are neither held nor saved."""
        with self._lock:
            gone = {name for name in self._left - held if not self._on_way[name]}
            self._left.clear()  # a name that is held or on its way will leave again
            saved = gone & (self._saved | self._saving)
            self._deferred |= saved
            for name in gone - saved:
                self.bytes -= self._sizes.pop(name, 0)
                self._remove(name)

    def saving(self, held: set[str]) -> None:
        """Record that a checkpoint begins that holds these names."""
        self._saving = held
        self._review()

    def saved(self, held: set[str]) -> None:
        """Record that the checkpoint is durable, and delete what only the one before it held."""
        self._saved = self._saving
        self._review()
        self.sweep(held)

    def _review(self) -> None:
        self._left |= self._deferred
        self._deferred = set()

    def read(self, name: str) -> bytes:
        """Return the bytes of a sample.

        Raises:
            OSError: the file is gone, unreadable or damaged.
        """
        return Originals(self._folder, create=False).read(name)

    def _remove(self, name: str) -> None:
        try:
            if self._files is not None:
                self._files.remove(name)
        except OSError as error:
            text = f"an original cannot be deleted; the next start tries again: {error}"
            self._log.warning("delete", text)

    def _tell(self, error: OSError) -> None:
        with self._lock:
            self.unkept["disk"] += 1
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        why = "the disk is full" if full else str(error)
        text = f"originals are not kept in {self._folder}, training continues: {why}"
        self._log.warning("disk", text)


def _names(origins: Sequence[Origin | None]) -> list[str]:
    return [one.original for one in origins if one is not None and one.original is not None]
