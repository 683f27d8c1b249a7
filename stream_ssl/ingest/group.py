"""What waits for the next group commit, and what is counted until the next record."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

from stream_ssl.ingest.journal import Entry
from stream_ssl.ingest.sessions import Session
from stream_ssl.wire import Data, Nack, WireError


class Group:
    """Packets that are taken but not yet on disk.

    Attributes:
        entries: in order of arrival.
        last: producer -> last sequence among them.
        began: when the first came, time.monotonic.
    """

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.last: dict[str, int] = {}
        self.bytes = 0
        self.samples = 0
        self.began = 0.0
        self._samples: list[int] = []  # of each entry
        self._nacks: list[tuple[bytes, Nack] | None] = []  # of each entry

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def nacks(self) -> list[tuple[bytes, Nack]]:
        """Refusals to send when the advance behind them is durable."""
        return [nack for nack in self._nacks if nack is not None]

    def split(self, count: int) -> tuple[Group, Group]:
        """The first entries, and the others."""
        parts = Group(), Group()
        for place, told in enumerate(zip(self.entries, self._samples, self._nacks, strict=True)):
            parts[place >= count]._add(*told)
        for part in parts:
            part.began = self.began
        return parts

    def take(self, session: Session, data: Data, checksum: int) -> None:
        """Adds a packet.

        Raises:
            WireError: its header is not what it must be.
        """
        entry = Entry(
            session.producer,
            data.sequence,
            data.position,
            time.time(),
            data.header,
            data.payload,
            checksum,
        )
        self._add(entry, len(data))

    def refuse(self, session: Session, sequence: int, error: WireError) -> None:
        """Adds only the advance past a packet that no receiver will ever take."""
        nack = Nack(sequence, error.reason, str(error), permanent=True)
        self._add(Entry(session.producer, sequence), nack=(session.route, nack))

    def _add(self, entry: Entry, samples: int = 0, nack: tuple[bytes, Nack] | None = None) -> None:
        if not self.entries:
            self.began = time.monotonic()
        self.entries.append(entry)
        self._samples.append(samples)
        self._nacks.append(nack)
        self.last[entry.producer] = entry.sequence
        self.bytes += len(entry.header or b"") + len(entry.payload)
        self.samples += samples


@dataclass(slots=True)
class Tally:
    """Increments of the record that comes next; the names are ReceiverRecord's."""

    packets: int = 0
    samples: int = 0
    bytes: int = 0
    duplicates: int = 0
    missing: int = 0
    acked_samples: int = 0
    journal_failures: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    fsync_seconds: float | None = None


def samples_of(data: Data) -> int:
    """The number of samples; 1 where the header cannot say."""
    try:
        return len(data)
    except WireError:
        return 1


def captured_at(data: Data) -> float:
    """The capture time of a packet's last sample, seconds since the Unix epoch."""
    return float(data.fields["samples"][-1]["time"])
