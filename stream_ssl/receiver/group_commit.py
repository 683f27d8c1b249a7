"""Group commit: the packets that wait for one fsync together, and the commit that makes them
durable.

A packet is durable when `Journal.append` returns. `GroupCommit` is the only caller, and
`ProtocolState.commit` acknowledges exactly the packets that it returns.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from stream_ssl.journal.journal import Entry, Journal, JournalError, JournalFull
from stream_ssl.wire import Data, Nack

log = logging.getLogger(__name__)

_RETRY_SECONDS = 0.25  # between attempts to write to a journal that refused


class CommitBatch:
    """Packets in order of arrival, accepted but not yet durable.

    Attributes:
        entries: for the journal.
        last_sequences: producer -> last sequence in the batch.
        epochs: producer -> the incarnation that sent it.
        bytes: of headers and payloads.
        extra: cost of decoding beyond these bytes.
        samples: in all packets.
        began: when the first packet came, time.monotonic.
    """

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.last_sequences: dict[str, int] = {}
        self.epochs: dict[str, int] = {}
        self.bytes = 0
        self.extra = 0
        self.samples = 0
        self.began = 0.0
        # One tuple for each entry: epoch, samples, extra cost, NACK.
        self._details: list[tuple[int, int, int, tuple[bytes, Nack] | None]] = []

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def nacks(self) -> list[tuple[bytes, Nack]]:
        """(route, NACK) of the refused packets, to send once their sequences are durable."""
        return [nack for *_, nack in self._details if nack is not None]

    @property
    def cost(self) -> int:
        """Bytes and extra cost together."""
        return self.bytes + self.extra

    def add(self, producer: str, epoch: int, data: Data, checksum: int, extra: int = 0) -> None:
        """Add a packet; `extra` is the cost of decoding it beyond its bytes.

        Raises:
            WireError: its header breaks the protocol.
        """
        packet = (data.header, data.payload, checksum)
        entry = Entry(producer, data.sequence, data.position, time.time(), *packet)
        self._add(entry, epoch, len(data), extra)

    def add_refused(self, producer: str, epoch: int, route: bytes, nack: Nack) -> None:
        """Adds only the advance of the sequence past a packet that is refused for good."""
        self._add(Entry(producer, nack.sequence), epoch, nack=(route, nack))

    def split(self, count: int) -> tuple[CommitBatch, CommitBatch]:
        """The first `count` entries, and the others."""
        parts = CommitBatch(), CommitBatch()
        for index, (entry, details) in enumerate(zip(self.entries, self._details, strict=True)):
            parts[index >= count]._add(entry, *details)
        for part in parts:
            part.began = self.began
        return parts

    def _add(
        self,
        entry: Entry,
        epoch: int,
        samples: int = 0,
        extra: int = 0,
        nack: tuple[bytes, Nack] | None = None,
    ) -> None:
        if not self.entries:
            self.began = time.monotonic()
        self.entries.append(entry)
        self._details.append((epoch, samples, extra, nack))
        self.last_sequences[entry.producer] = entry.sequence
        self.epochs[entry.producer] = epoch
        self.bytes += len(entry.header or b"") + len(entry.payload)
        self.samples += samples
        self.extra += extra


@dataclass(frozen=True, slots=True)
class CommitResult:
    """What became of a commit: the packets that are durable now, and why others are not."""

    durable: CommitBatch | None = None
    fsync_seconds: float = 0.0
    error: JournalError | None = None  # the others stay in the batch, to be tried again


class GroupCommit:
    """The batch that waits for the journal, and when it is due.

    Args:
        journal: where it is written.
        max_packets, max_bytes: size at which a batch is written at once.
        seconds: how long a packet may wait for others.

    Attributes:
        batch: what waits.
        ready: False: the journal refused the last commit.
        journal_full: whether it did so for want of room.
    """

    def __init__(self, journal: Journal, max_packets: int, max_bytes: int, seconds: float) -> None:
        self.journal = journal
        self.seconds = seconds
        self.batch = CommitBatch()
        self.ready = True
        self.journal_full = False
        self._max_packets, self._max_bytes = max_packets, max_bytes
        self._retry_at = 0.0

    def is_full(self) -> bool:
        """Whether the batch has the size at which it is written at once."""
        return len(self.batch) >= self._max_packets or self.batch.bytes >= self._max_bytes

    def is_due(self, now: float, wait: bool = True) -> bool:
        """Whether to commit now; without `wait`, whether there is anything to commit."""
        seconds = self.seconds if wait else 0.0
        return self.is_full() or (len(self.batch) > 0 and now - self.batch.began >= seconds)

    def due_at(self) -> float:
        """When the batch is due, time.monotonic; never while it is empty or the journal refuses."""
        return self.batch.began + self.seconds if self.batch and self.ready else float("inf")

    def commit(self, now: float) -> CommitResult:
        """Writes the batch, or as much of it as fits, to the journal.

        Writes nothing for a while after the journal has refused.

        Raises:
            ValueError: the batch is out of order; it stays as it is.
        """
        if not self.batch or now < self._retry_at:
            return CommitResult()
        try:
            result = self._append(self.batch)
        except JournalFull as error:
            self._refused(now, full=True)
            return self._commit_what_fits(error)
        except JournalError as error:
            self._refused(now, full=False)
            return CommitResult(error=error)
        self.batch, self.ready, self.journal_full = CommitBatch(), True, False
        return result

    def discard(self) -> CommitBatch:
        """Takes the batch out unwritten."""
        batch, self.batch = self.batch, CommitBatch()
        return batch

    def _append(self, batch: CommitBatch) -> CommitResult:
        written = self.journal.append(batch.entries)  # returns when the batch is on disk: durable
        return CommitResult(batch, written.seconds)

    def _commit_what_fits(self, error: JournalFull) -> CommitResult:
        """The learner may have read all that came before, and can then free no more room for the
        whole batch: so write the part that fits."""
        count = self.journal.count_fitting(self.batch.entries)
        if 0 < count < len(self.batch):
            first, rest = self.batch.split(count)
            try:
                result = self._append(first)
            except JournalError as another:
                log.debug("nor does a part of the batch fit: %s", another)
            else:
                self.batch = rest
                return CommitResult(first, result.fsync_seconds, error)
        return CommitResult(error=error)

    def _refused(self, now: float, full: bool) -> None:
        self._retry_at = now + _RETRY_SECONDS
        self.ready, self.journal_full = False, full
