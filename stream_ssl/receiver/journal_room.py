"""How far the learner has read, and how much the journal can still accept."""

from __future__ import annotations

import logging
import shutil

from stream_ssl.journal.consumer_offsets import ConsumerOffsets, Positions
from stream_ssl.journal.errors import JournalError
from stream_ssl.journal.journal import Journal
from stream_ssl.rate_limited_logger import RateLimitedLogger
from stream_ssl.receiver.credit import Credit

log = logging.getLogger(__name__)

_MOST_RESERVE = 256 << 20  # bytes kept free for a checkpoint until its real size is known
_RESERVE_SHARE = 16  # until then, at most a sixteenth of the disk is kept free
_MOST_LOST = 1 << 32  # most records before the learner's position that a power cut can lose
_TRIM_SECONDS = 0.02  # most seconds of a tick for deleting old segments


class JournalRoom:
    """Trims the journal behind the learner, and measures the room for further packets.

    Args:
        journal: the journal of the receiver.
        offsets: the positions that the learner publishes.
        max_packet: most bytes of a packet.
        max_lag: most bytes that the learner may be behind; None: no limit but the budget.

    Attributes:
        lag: bytes in the journal that the learner has not read.
        full: whether no packet fits, because the journal's budget or the disk is used up.
        bytes: the bytes that the journal can still accept.
        journal_away: whether the journal's folder was moved, deleted or replaced.

    Raises:
        ValueError: no producer would ever get credit with these limits.
    """

    def __init__(
        self, journal: Journal, offsets: ConsumerOffsets, max_packet: int, max_lag: int | None
    ) -> None:
        if max_lag is not None and max_lag < max_packet:
            raise ValueError(
                f"receiver.max_lag_bytes {max_lag}: must be at least receiver.max_packet "
                f"({max_packet} bytes), or no producer ever gets credit"
            )
        if journal.budget < 4 * max_packet:
            raise ValueError(
                f"journal.budget {journal.budget}: must be at least {4 * max_packet} bytes (4 "
                f"times receiver.max_packet, {max_packet}), or no producer ever gets credit: "
                "raise the budget, or lower receiver.max_packet"
            )
        self._journal, self._offsets = journal, offsets
        self._max_packet, self._max_lag = max_packet, max_lag
        self._limited_log = RateLimitedLogger(log)
        self._slow_log = RateLimitedLogger(log, seconds=60.0)
        self.lag = 0
        self.full = self.journal_away = False
        self.bytes = journal.room
        journal.identify(offsets.load().journal)
        # A power cut may have lost a limited number of records that the learner had read.
        self._positions = Positions()
        self._positions = self._consumed(journal.last + 1 + _MOST_LOST)
        journal.skip_to(self._positions.read)

    @property
    def disk_full(self) -> bool:
        """Whether no packet fits, because of the disk and not of the budget."""
        return self.full and self._journal.room // 2 >= self._max_packet

    def measure(self, credit: Credit, failed: bool) -> None:
        """Trim the journal, and tell the credit how much may be sent.

        Args:
            credit: the credit of the producers.
            failed: whether the last commit failed because the journal was full.
        """
        journal = self._journal
        positions = self._positions = self._consumed(journal.last + 1)
        try:
            journal.trim(positions.checkpointed, _TRIM_SECONDS)
        except JournalError as error:
            self._limited_log.warning("trim", f"cannot trim: {error}")
        self.lag = journal.bytes_after(positions.read)
        credit.unread.read(positions.read)
        cost = self.lag + credit.unread.waiting
        self.bytes = self._free(positions.checkpoint_bytes)
        self.journal_away = not journal.lock.is_in_place()
        room = self.bytes // 2  # packets take more bytes on disk, above all small packets
        self.full = full = failed or room < self._max_packet
        if self._offsets.journal_full != full:  # compare with the file, which others may change
            self._offsets.set_journal_full(full)
        most = journal.budget // 2
        if self._max_lag is not None:
            room, most = min(room, self._max_lag - cost), min(most, self._max_lag)
        credit.unread.most = most
        credit.room = min(room, (journal.budget - cost) // 2)
        credit.scarce = credit.room < min(credit.policy.total, most // 4)

    def _free(self, checkpoint_bytes: int) -> int:
        """Return the bytes that the journal can accept, with room left for a checkpoint.

        The journal is trimmed only after a checkpoint. If the checkpoint has no room, a disk that
        the journal has filled stays full.
        """
        try:
            disk = shutil.disk_usage(self._journal.path)
        except OSError as error:
            self._limited_log.warning("disk", f"the room on the disk is not known: {error}")
            return self._journal.room
        reserve = max(checkpoint_bytes, min(_MOST_RESERVE, disk.total // _RESERVE_SHARE))
        left = max(0, disk.free - reserve)
        if left // 2 < self._max_packet:
            needed = reserve + 2 * self._max_packet
            text = (
                f"the disk of {self._journal.path} has {disk.free / 1e6:.0f} MB free, and "
                f"producers get no credit below {needed / 1e6:.0f} MB ({reserve / 1e6:.0f} MB are "
                "for a checkpoint, the rest is for one packet); make room on it"
            )
            self._slow_log.warning("disk", text)
        return min(self._journal.room, left)

    def _consumed(self, end: int) -> Positions:
        """Return the positions of the learner, or the beginning if they are of another journal.

        A position after `end` is invalid and is ignored, because trimming by it would delete unread
        records.
        """
        positions = self._offsets.load()
        if positions.journal not in (None, self._journal.id):
            return Positions()
        if positions.read > end:
            self._limited_log.warning(
                "cursor",
                f"{self._offsets.path} says that record {positions.read} is read next, and the "
                f"journal ends before {end}: keeping {self._positions.read}. Restart the learner, "
                "which writes the file again",
            )
            return self._positions
        return positions
