"""The outcomes of samples: the producer's counters, and what waits for the user's callbacks."""

from __future__ import annotations

import logging

from stream_ssl.producers._packer import OnDelivery, Packet
from stream_ssl.producers.stats import Delivery, Outcome, Rejection, Stats

logger = logging.getLogger("stream_ssl.producers")


class Outcomes:
    """A record of what became of samples.

    Attributes:
        stats: the producer's counters.
        rejections: waiting for on_rejected.
        deliveries: waiting for on_delivery.
    """

    def __init__(self) -> None:
        self.stats = Stats()
        self.rejections: list[Rejection] = []
        self.deliveries: list[tuple[OnDelivery, Delivery]] = []

    def acknowledged(self, packet: Packet) -> None:
        """Record that the receiver has stored a packet."""
        self.stats.acked.add(packet.count, packet.size)
        self._deliver(packet, "acknowledged")

    def spooled(self, packet: Packet) -> None:
        """Record that a packet is in the spool."""
        self._deliver(packet, "spooled")

    def rejected(self, packet: Packet, reason: str, detail: str) -> None:
        """Record that a packet cannot be stored."""
        self.stats.rejected.add(packet.count, packet.size)
        logger.warning("%d samples rejected: %s: %s", packet.count, reason, detail)
        self.rejections.append(Rejection(reason, detail, packet.ids))
        self._deliver(packet, "rejected", f"{reason}: {detail}")

    def dropped(self, packet: Packet, reason: str, detail: str) -> None:
        """Record that a packet is given up."""
        self.stats.drop(reason, packet.count, len(packet.data.payload))
        self._deliver(packet, "dropped", f"{reason}: {detail}")

    def take(self) -> tuple[list[Rejection], list[tuple[OnDelivery, Delivery]]]:
        """Remove and return the rejections and deliveries."""
        found = self.rejections, self.deliveries
        self.rejections, self.deliveries = [], []
        return found

    def _deliver(self, packet: Packet, outcome: Outcome, detail: str = "") -> None:
        """Queue the Delivery of each sample of a packet for its callback."""
        if packet.callbacks:
            for name, callback in zip(packet.ids, packet.callbacks, strict=True):
                if callback is not None:
                    self.deliveries.append((callback, Delivery(name, outcome, detail)))
            packet.callbacks = ()
