"""Base class of sources that read the same files in passes."""

from __future__ import annotations

import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Generic, TypeVar

from stream_ssl.producers.sources.base import Skipped, SourceError
from stream_ssl.wire.sample import Position, Sample

Start = TypeVar("Start")


class Passes(ABC, Generic[Start]):
    """A source that sends its samples in passes, and ends if a whole pass gives no sample.

    Args:
        skipped: the counter of samples that are left out, made with the source's name.
        epochs: number of passes, 1 or more; null: endless.

    Raises:
        ValueError: `epochs` is below 1.
    """

    def __init__(self, skipped: Skipped, epochs: int | None) -> None:
        if epochs is not None and epochs < 1:
            raise ValueError(f"epochs {epochs}: must be 1 or more, or null for an endless stream")
        self.name, self.skipped, self.epochs = skipped.source, skipped, epochs
        self._stopped = threading.Event()

    def stop(self) -> None:
        """End `samples`, even while it reads data that is not sent. Thread-safe."""
        self._stopped.set()

    def _passes(self, epoch: int, start: Start | None) -> Iterator[tuple[Sample, Position]]:
        """Yield the samples of pass `epoch` after the place `start`, and of all later passes.

        None as `start` is the beginning of the pass.
        """
        for current in itertools.count(epoch):
            if self.epochs is not None and current >= self.epochs:
                break
            gave = start is not None
            for item in self._pass(current, start):
                gave = True
                yield item
            if self._stopped.is_set():
                break
            if not gave:
                raise nothing_readable(self.name, self.skipped)
            start = None
        self.skipped.tell_end(self._stopped)

    @abstractmethod
    def _pass(self, epoch: int, start: Start | None) -> Iterator[tuple[Sample, Position]]:
        """Yield the samples of one pass after a place, until `stop`; None: from the beginning."""


def no_sample(name: str) -> SourceError:
    """Return the error for a source whose files are whole and hold no sample."""
    return SourceError(f"source {name!r}: its files hold no sample; give files that hold some")


def nothing_readable(name: str, skipped: Skipped) -> SourceError:
    """Return the error for a pass that sent no sample. Further passes would also send none."""
    if not skipped.by_reason:
        return no_sample(name)
    return SourceError(
        f"source {name!r}: not one sample of a whole pass can be read; the log has the reasons"
    )
