"""The next offset of each partition of a Kafka topic: while messages travel, and in a position."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from stream_ssl.producers.sources.base import Facts, checked, wrong_position
from stream_ssl.wire.sample import Position


class PartitionOffsets:
    """The next offset of each partition, at three stages. It is not thread-safe.

    Args:
        consumed: the offsets from which to go on.

    Attributes:
        consumed: after the consumed messages.
        sent: after the sent messages.
        safe: after the messages that are on the receiver's disk.
    """

    def __init__(self, consumed: Mapping[int, int]) -> None:
        self.consumed = dict(consumed)
        self.sent: dict[int, int] = {}
        self.safe: dict[int, int] = {}

    def place(self, partition: int, at: int) -> None:
        """Let a partition go on at an offset."""
        self.consumed[partition] = self.sent[partition] = self.safe[partition] = at

    def send(self) -> list[list[int]]:
        """Record that all consumed messages are sent, and return the offsets by partition."""
        self.sent = dict(self.consumed)
        return [list(one) for one in sorted(self.sent.items())]

    def acknowledge(self, offsets: Mapping[int, int]) -> None:
        """Record the offsets before which all samples are on the receiver's disk."""
        for partition, at in offsets.items():
            self.safe[partition] = max(at, self.safe.get(partition, at))

    def settled(self, partitions: Iterable[int]) -> bool:
        """Return whether all sent messages of partitions are on the receiver's disk."""
        return all(self.safe[one] >= self.sent[one] for one in self._known(partitions))

    def to_commit(self, partitions: Iterable[int]) -> list[tuple[int, int]]:
        """Return (partition, offset) to commit, including skipped messages after settled samples.

        Only offsets of `partitions` are returned, because a position may also contain partitions
        that other members own.
        """
        return [
            (one, (self.consumed if self.settled([one]) else self.safe)[one])
            for one in self._known(partitions)
        ]

    def forget(self, partitions: Iterable[int]) -> None:
        """Remove partitions that another member owns now."""
        for one in partitions:
            for offsets in (self.consumed, self.sent, self.safe):
                offsets.pop(one, None)

    def _known(self, partitions: Iterable[int]) -> list[int]:
        return [one for one in partitions if one in self.sent and one in self.safe]


def offsets_in(position: Position, facts: Facts, name: str) -> dict[int, int]:
    """Return the offset of each partition in a position.

    Raises:
        ValueError: the position does not belong to the source called `name`.
    """
    if position is None:
        return {}
    at = checked(position, facts, name)
    try:
        return {int(partition): int(offset) for partition, offset in at}
    except (TypeError, ValueError):
        raise wrong_position(name, f"{at!r:.80} is no list of [partition, offset]") from None
