"""Group commit: one fsync makes all packets durable that have waited together.

A packet is durable when `Journal.append` returns. `GroupCommit` is the only caller of `append`, and
`ReceiverProtocol.commit` acknowledges exactly the packets that `GroupCommit.commit` returns.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from stream_ssl.journal.errors import JournalError, JournalFull
from stream_ssl.journal.journal import Journal
from stream_ssl.journal.segment import JournalEntry
from stream_ssl.wire import Data, Nack

log = logging.getLogger(__name__)

_RETRY_SECONDS = 0.25  # before the next attempt after a failed commit


class CommitBatch:
    """A batch of packets in order of arrival, accepted but not yet durable.

    Attributes:
        entries: the entries for the journal.
        last_sequences: producer -> last sequence in the batch.
        epochs: producer -> epoch that sent its last packet.
        bytes: the bytes of all headers and payloads.
        extra: the decode cost beyond these bytes.
        samples: the number of samples in all packets.
        began: the time of time.monotonic when the first packet arrived.
    """

    def __init__(self) -> None:
        self.entries: list[JournalEntry] = []
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
        """(route, NACK) of the rejected packets, to send when their sequences are durable."""
        return [nack for *_, nack in self._details if nack is not None]

    @property
    def cost(self) -> int:
        """The sum of bytes and extra cost."""
        return self.bytes + self.extra

    def add(self, producer: str, epoch: int, data: Data, checksum: int, extra: int = 0) -> None:
        """Add a packet; `extra` is its decode cost beyond its bytes.

        Raises:
            WireError: the header of the packet is invalid.
        """
        packet = (data.header, data.payload, checksum)
        entry = JournalEntry(producer, data.sequence, data.position, time.time(), *packet)
        self._add(entry, epoch, len(data), extra)

    def add_refused(self, producer: str, epoch: int, route: bytes, nack: Nack) -> None:
        """Add a permanently rejected packet, which only advances the producer's sequence."""
        self._add(JournalEntry(producer, nack.sequence), epoch, nack=(route, nack))

    def split(self, count: int) -> tuple[CommitBatch, CommitBatch]:
        """Return two batches: the first `count` entries, and the other entries."""
        parts = CommitBatch(), CommitBatch()
        for index, (entry, details) in enumerate(zip(self.entries, self._details, strict=True)):
            parts[index >= count]._add(entry, *details)
        for part in parts:
            part.began = self.began
        return parts

    def _add(
        self,
        entry: JournalEntry,
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
    """The result of a commit: the packets that are now durable, and the error for the others."""

    durable: CommitBatch | None = None
    fsync_seconds: float = 0.0
    error: JournalError | None = None  # the other packets stay in the batch, for a retry


class GroupCommit:
    """The batch that waits for the journal, and the rule when to commit it.

    Args:
        journal: the journal to write.
        max_packets: number of packets at which a batch is written at once.
        max_bytes: number of bytes at which a batch is written at once.
        seconds: most seconds that a packet waits for others.

    Attributes:
        batch: the packets that wait.
        ready: False if the last commit failed.
        journal_full: whether the last commit failed because the journal was full.
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
        """Return whether the batch has the size at which it is written at once."""
        return len(self.batch) >= self._max_packets or self.batch.bytes >= self._max_bytes

    def is_due(self, now: float, wait: bool = True) -> bool:
        """Return whether to commit now; if not `wait`, return whether the batch has packets."""
        seconds = self.seconds if wait else 0.0
        return self.is_full() or (len(self.batch) > 0 and now - self.batch.began >= seconds)

    def due_at(self) -> float:
        """Return the time of time.monotonic when the batch is due.

        The result is infinite while the batch is empty or after a failed commit.
        """
        return self.batch.began + self.seconds if self.batch and self.ready else float("inf")

    def commit(self, now: float) -> CommitResult:
        """Write the batch, or as much of it as fits, to the journal.

        After a failed commit, calls do nothing for _RETRY_SECONDS.

        Raises:
            ValueError: the sequences in the batch are out of order; the batch is unchanged.
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
        """Remove and return the batch without writing it."""
        batch, self.batch = self.batch, CommitBatch()
        return batch

    def _append(self, batch: CommitBatch) -> CommitResult:
        written = self.journal.append(batch.entries)  # the batch is durable when this returns
        return CommitResult(batch, written.seconds)

    def _commit_what_fits(self, error: JournalFull) -> CommitResult:
        """Write the part of the batch that fits.

        If the learner has already read everything before the batch, trimming cannot free more room
        for the whole batch.
        """
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
