"""Packets of samples, and the packer that collects samples into packets."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from stream_ssl.producers.stats import Delivery
from stream_ssl.wire import Data, Position, Sample
from stream_ssl.wire.messages import MAX_HEADER_BYTES
from stream_ssl.wire.sample import MAX_POSITION_BYTES

ROW_BYTES = 96  # upper bound of a sample's map in the header, without id, source and meta
HEADER_BYTES = MAX_HEADER_BYTES - MAX_POSITION_BYTES - 1024  # available for the samples' maps
NOT_GIVEN = object()

OnDelivery = Callable[[Delivery], None]

Offer = tuple[Sample, int, object, float, OnDelivery | None]
"""A sample, its cost_of(), the source's position after it or NOT_GIVEN, the monotonic time at which
it was accepted, and a callback for its Delivery. A named tuple would take longer to make."""


@dataclass(slots=True, eq=False)
class Packet:
    """A packet of samples that is packed once and gets its sequence when it is first sent."""

    data: Data  # the sequence in it is a placeholder
    count: int
    size: int
    positions: tuple[Position, ...]  # after each sample, so that the packet can be split
    callbacks: tuple[OnDelivery | None, ...]  # one for each sample; empty if there are none
    sent: bool = False
    rejected: bool = False
    behind: int = 0  # samples after this packet that are gone; they count once the packet is gone
    spooled: int | None = None  # the number of its first sample in the spool; None: not spooled

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids of the samples."""
        return tuple(row["id"] for row in self.data.fields["samples"])

    def split(self, max_packet: int, max_samples: int) -> Iterator[Packet]:
        """Yield packets of the same samples, of at most `max_packet` bytes and `max_samples` each.

        A sample that is too large for any packet is alone in its packet.
        """
        if self.count == 1 or (self.size <= max_packet and self.count <= max_samples):
            yield self
            return
        half = self.count // 2
        for part in (self.part(0, half), self.part(half, self.count)):
            yield from part.split(max_packet, max_samples)

    def part(self, start: int, end: int) -> Packet:
        """Return a packet of the samples in [start, end). Equal arguments give equal bytes."""
        if (start, end) == (0, self.count):
            return self
        samples = list(itertools.islice(self.data.samples(), start, end))
        part = pack(samples, self.positions[start:end], self.callbacks[start:end])
        part.sent = self.sent
        part.spooled = None if self.spooled is None else self.spooled + start
        return part


class Packer:
    """A collector of samples for the next packet.

    All samples of a packet have the same source.

    Args:
        packet_bytes: maximum bytes of a packet. A larger sample travels alone.
        packet_samples: maximum number of samples in a packet.
    """

    def __init__(self, packet_bytes: int, packet_samples: int) -> None:
        self.packet_bytes = self._wanted_bytes = packet_bytes
        self.packet_samples = self._wanted_samples = packet_samples
        self.size = 0  # upper estimate of the packet's bytes
        self._header = 0  # upper estimate of the header's bytes, which `size` includes
        self.began: float | None = None  # monotonic time of the first sample
        self._samples: list[Sample] = []
        self._positions: list[Position] = []
        self._callbacks: list[OnDelivery | None] = []
        self.position: Position = None  # the last position given, which later packets repeat

    def __len__(self) -> int:
        return len(self._samples)

    def limit(self, max_packet: int, max_samples: int) -> None:
        """Apply the receiver's limits if they are below the user's."""
        self.packet_bytes = min(self._wanted_bytes, max_packet)
        self.packet_samples = min(self._wanted_samples, max_samples)

    def add(self, offers: Iterable[Offer]) -> list[Packet]:
        """Add samples, and return the packets that are full."""
        full = []
        for sample, cost, position, now, callback in offers:
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

    def is_full_with(self, samples: int, size: int) -> bool:
        """Return whether a packet is full with so many further samples and bytes."""
        count = len(self._samples) + samples
        return count >= self.packet_samples or self.size + size >= self.packet_bytes

    def take(self) -> Packet:
        """Close the open packet and return it. It must contain a sample."""
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
    """Return a packet of samples that have the same source."""
    data = Data.pack(0, samples, positions[-1])
    return Packet(data, len(samples), data.size, positions, callbacks)


def cost_of(sample: Sample) -> int:
    """Return an upper estimate of a sample's bytes in a packet, without its position."""
    cost = len(sample.data) + ROW_BYTES + len(sample.id) + len(sample.source)
    if not sample.id.isascii() or not sample.source.isascii():
        cost += 3 * (len(sample.id) + len(sample.source))
    if sample.meta:
        cost += sum(16 + 4 * (len(name) + len(str(value))) for name, value in sample.meta.items())
    return cost
