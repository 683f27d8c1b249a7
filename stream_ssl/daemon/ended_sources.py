"""Remembers, for a receiver that starts again, whether the sources of all producers have ended."""

from __future__ import annotations

import contextlib
import json
import logging
from collections import Counter
from pathlib import Path

from stream_ssl.bounded_files import read_map
from stream_ssl.durable import write
from stream_ssl.receiver.records import SOURCE_ENDED, ReceiverRecord

MOST_PRODUCERS = 64
"""With more producers than this, a receiver that starts again does not know that they ended."""

LATEST = 1e11
"""The latest possible time of a packet, in seconds since the Unix epoch."""

log = logging.getLogger("stream_ssl.receiver")


class EndedSources:
    """The producers of a run and the times of their last packets, if all their sources have ended.

    RUN/ended_sources.json stores them. The file is absent while any producer may send more. Without
    the file, a receiver that starts again after a bulk upload would report that producers are
    missing.
    """

    def __init__(self, run: Path) -> None:
        self._path = run / "ended_sources.json"
        self._received: dict[str, float] = {}
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
            saved = dict(read_map(self._path)["producers"])
            self._received = {name: float(at) for name, at in saved.items() if 0 <= at < LATEST}
        self._finished = dict.fromkeys(self._received, SOURCE_ENDED)

    @property
    def record(self) -> ReceiverRecord:
        """A record of the producers in the file, without new samples."""
        return ReceiverRecord(
            producer_samples=Counter(dict.fromkeys(self._received, 0)),
            producer_received=dict(self._received),
            producer_finished=dict(self._finished),
        )

    def consume(self, record: ReceiverRecord) -> None:
        """Take one record of the receiver, and write or delete the file if it has changed."""
        if len(self._finished) <= MOST_PRODUCERS:
            self._finished |= record.producer_finished
            came = record.producer_received.items()
            self._received |= {name: at for name, at in came if name in self._finished}
        if not record.producer_finished:
            return
        many = len(self._finished) > MOST_PRODUCERS
        try:
            if many or any(how != SOURCE_ENDED for how in self._finished.values()):
                self._path.unlink(missing_ok=True)
            else:
                text = json.dumps({"producers": self._received})
                write(self._path, f"{text}\n", wait=False)
        except OSError as error:
            log.warning("%s: %s; after a restart, producers may seem missing", self._path, error)
