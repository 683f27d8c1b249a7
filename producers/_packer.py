"""Gathers samples into packets."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from stream_ssl.producers.stats import Delivery
from stream_ssl.wire import Data, Position, Sample
from stream_ssl.wire.messages import MAX_HEADER_BYTES
from stream_ssl.wire.sample import MAX_POSITION_BYTES

ROW_BYTES = 96  # at least what a header's map takes beyond id, source and meta
HEADER_BYTES = MAX_HEADER_BYTES - MAX_POSITION_BYTES - 1024  # for the samples' maps
NOT_GIVEN = object()

OnDelivery = Callable[[Delivery], None]


@dataclass(slots=True, eq=False)
class Packet:
    """One packet: packed once, numbered when it is first sent."""

    data: Data  # its sequence is only a place-holder
    count: int
    size: int
    positions: tuple[Position, ...]  # after each sample, so that the packet can be split
    callbacks: tuple[OnDelivery | None, ...]  # of each sample; empty: none has one
    sent: bool = False
    rejected: bool = False
    behind: int = 0  # samples after its own that are gone already, and count once it is gone
    spooled: int | None = None  # number of its first sample in the spool; None: not there

    @property
    def ids(self) -> tuple[str, ...]:
        """Of its samples."""
        return tuple(row["id"] for row in self.data.fields["samples"])

    def split(self, max_packet: int, max_samples: int) -> Iterator[Packet]:
        """The same samples within the limits; a sample too large for any packet stands alone."""
        if self.count == 1 or (self.size <= max_packet and self.count <= max_samples):
            yield self
            return
        half = self.count // 2
        for part in (self.part(0, half), self.part(half, self.count)):
            yield from part.split(max_packet, max_samples)

    def part(self, start: int, end: int) -> Packet:
        """The samples from `start` to before `end`, as a packet; always the same bytes."""
        if (start, end) == (0, self.count):
            return self
        samples = list(itertools.islice(self.data.samples(), start, end))
        part = pack(samples, self.positions[start:end], self.callbacks[start:end])
        part.sent = self.sent
        part.spooled = None if self.spooled is None else self.spooled + start
        return part


class Packer:
    """Samples on their way into the next packet.

    Args:
        packet_bytes: a packet closes before it grows beyond; one larger sample travels alone.
        packet_samples: a packet closes at so many.
    """

    def __init__(self, packet_bytes: int, packet_samples: int) -> None:
        self.packet_bytes = self._wanted_bytes = packet_bytes
        self.packet_samples = self._wanted_samples = packet_samples
        self.size = 0  # an upper estimate of the packet's bytes
        self._header = 0  # of those, the header's
        self.began: float | None = None  # monotonic time of the first sample
        self._samples: list[Sample] = []
        self._positions: list[Position] = []
        self._callbacks: list[OnDelivery | None] = []
        self.position: Position = None  # the last one known: a packet never takes it back

    def __len__(self) -> int:
        return len(self._samples)

    def limit(self, max_packet: int, max_samples: int) -> None:
        """The receiver's limits, which apply where they are below the user's."""
        self.packet_bytes = min(self._wanted_bytes, max_packet)
        self.packet_samples = min(self._wanted_samples, max_samples)

    def add(
        self,
        sample: Sample,
        cost: int,
        position: object,
        now: float,
        callback: OnDelivery | None = None,
    ) -> list[Packet]:
        """Takes in a sample of a cost_of(); the packets that are full now, at most two."""
        full = []
        described = cost - len(sample.data)
        if self._samples and (
            self.size + cost > self.packet_bytes
            or self._header + described > HEADER_BYTES
            or self._samples[0].source != sample.source
        ):
            full.append(self.take())
        if not self._samples:
            self.began = now
        if position is not NOT_GIVEN:
            self.position = position
        self._samples.append(sample)
        self._positions.append(self.position)
        self._callbacks.append(callback)
        self.size += cost
        self._header += described
        if len(self._samples) >= self.packet_samples or self.size >= self.packet_bytes:
            full.append(self.take())
        return full

    def take(self) -> Packet:
        """The open packet as it is; there must be a sample in it."""
        callbacks = tuple(self._callbacks) if any(self._callbacks) else ()
        packet = pack(self._samples, tuple(self._positions), callbacks)
        self._samples, self._positions, self._callbacks = [], [], []
        self.size, self._header, self.began = 0, 0, None
        return packet


def pack(
    samples: list[Sample],
    positions: tuple[Position, ...],
    callbacks: tuple[OnDelivery | None, ...] = (),
) -> Packet:
    """One packet of samples with one source."""
    data = Data.pack(0, samples, positions[-1])
    return Packet(data, len(samples), data.size, positions, callbacks)


def cost_of(sample: Sample) -> int:
    """An upper estimate of a sample's bytes in a packet, position and meta apart."""
    cost = len(sample.data) + ROW_BYTES + len(sample.id) + len(sample.source)
    if not sample.id.isascii() or not sample.source.isascii():
        cost += 3 * (len(sample.id) + len(sample.source))
    if sample.meta:
        cost += sum(16 + 4 * (len(name) + len(str(value))) for name, value in sample.meta.items())
    return cost
