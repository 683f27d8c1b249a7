"""What each producer did since this receiver started: for people, and for the page they look at."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

MOST_REASONS = 32
"""Reasons of refusal told apart for one producer."""


@dataclass(slots=True)
class ProducerRecord:
    """One producer, over all its connections. Times are of time.monotonic.

    Attributes:
        name: as it calls itself.
        key: the name on the allow-list that it proved to be; None in plain text.
        agent: what it says that it runs.
        since: when it first said HELLO.
        connected: when its present connection did; None while there is none.
        last_received: when a message last came.
        hellos: how often it has connected.
        packets, samples, bytes: taken for the first time.
        duplicates: samples that came again.
        rejected: samples, by reason of refusal.
        credit: bytes that it may have unacknowledged now.
    """

    name: str
    key: str | None
    agent: str
    since: float
    connected: float | None
    last_received: float
    hellos: int = 0
    packets: int = 0
    samples: int = 0
    bytes: int = 0
    duplicates: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    credit: int = 0

    def reject(self, reason: str, samples: int) -> None:
        """Count samples that were refused."""
        known = reason in self.rejected or len(self.rejected) < MOST_REASONS
        self.rejected[reason if known else "other"] += samples


class ProducerTable:
    """A record for each producer that has said HELLO, of the `limit` last heard of.

    Args:
        limit: most records.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._records: OrderedDict[str, ProducerRecord] = OrderedDict()  # silent for longest first

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[ProducerRecord]:
        return iter(self._records.values())

    def get(self, name: str) -> ProducerRecord | None:
        """The producer's record."""
        return self._records.get(name)

    def opened(self, name: str, key: str | None, agent: str, now: float) -> ProducerRecord:
        """A producer has said HELLO."""
        record = self._records.get(name)
        if record is None:
            record = ProducerRecord(name, key, agent, now, now, now)
            self._records[name] = record
            while len(self._records) > self._limit:
                self._records.popitem(last=False)
        record.key, record.agent, record.connected = key, agent, now
        record.hellos += 1
        self.heard(record, now)
        return record

    def heard(self, record: ProducerRecord, now: float) -> None:
        """A message has come."""
        record.last_received = now
        if record.name in self._records:
            self._records.move_to_end(record.name)

    def copy(self) -> list[ProducerRecord]:
        """Records that nobody changes any more, silent for longest first."""
        return [replace(record, rejected=record.rejected.copy()) for record in self]
