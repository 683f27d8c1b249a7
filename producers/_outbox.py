"""The samples that a producer has accepted and that no receiver has acknowledged yet."""

from __future__ import annotations

from collections import deque

from stream_ssl.producers._packer import Offer, OnDelivery, Packer, Packet
from stream_ssl.producers._spool import Part, Spool
from stream_ssl.producers._window import Window
from stream_ssl.producers.stats import Delivery, Outcome, Rejection, Stats
from stream_ssl.wire import Welcome

LOAD_BYTES = 4 * 1024 * 1024  # maximum bytes to load from the spool at a time


class Offers:
    """The samples that send() has accepted and the producer's thread has not packed yet.

    Ctrl-C may interrupt the user's thread anywhere. So a single append accepts a sample, and only
    the producer's thread, which no signal interrupts, takes samples out.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self._offers: list[Offer] = []

    def __len__(self) -> int:
        return len(self._offers)

    def accepted(self) -> tuple[int, int]:
        """Return the number of the samples, and the bytes of their data."""
        return len(self._offers), sum(len(offer[0].data) for offer in self._offers)

    def add(self, offer: Offer) -> None:
        """Append a sample."""
        self._offers.append(offer)
        self.bytes += offer[1]

    def take(self) -> list[Offer]:
        """Remove and return all samples."""
        found, self._offers, self.bytes = self._offers, [], 0
        return found


class Outbox:
    """A queue of samples, from the call of send() until the outcome of each sample is known.

        offered -> packer -> window                     in memory
        offered -> packer -> staged -> spool -> window  while the network is down, with a spool

    An outbox is not thread-safe. It uses no sockets, and writes no file itself. `active` says
    whether the receiver accepts packets now, and `now` is monotonic time in seconds.

    Args:
        packer: collects samples into packets.
        linger: seconds after which a packet that is not full is sent.
        spool: stores packets while the network is down. None: packets stay in memory.
        buffer_bytes: maximum bytes of packets in memory.

    Attributes:
        window: the packets that are sent and unacknowledged, or wait to be sent.
        outcomes: the record of the outcomes of samples.
        stats: the producer's counters.
        staged: packets that wait to be written to the spool.
        offered: samples that send() has accepted and the producer's thread has not packed yet.
        flush_to: packets with samples up to this number must not linger.
    """

    def __init__(
        self, packer: Packer, linger: float, spool: Spool | None = None, buffer_bytes: int = 1 << 26
    ) -> None:
        self.packer = packer
        self.linger = linger
        self.spool = spool
        self.buffer_bytes = buffer_bytes
        self.window = Window()
        self.outcomes = Outcomes()
        self.stats = self.outcomes.stats
        self.staged: deque[Packet] = deque()
        self.offered = Offers()
        self._packed = 0 if spool is None else spool.samples  # in this run, or spooled before
        self.flush_to = 0
        self._limits: Welcome | None = None  # the receiver's limits for packets
        self._staged_bytes = 0
        self._mark_due = False  # write the sequences of spooled packets before sending them
        if spool is not None:
            self.window.limit = buffer_bytes // 4
            self.packer.position = spool.position

    @property
    def taken(self) -> int:
        """How many samples were accepted in this run, or spooled by an earlier run."""
        return self._packed + len(self.offered)

    @property
    def done(self) -> int:
        """How many of the first `taken` samples are acknowledged, rejected or dropped."""
        return self.window.settled

    @property
    def memory(self) -> int:
        """The bytes of all samples in memory."""
        return self.window.size + self._staged_bytes + self.packer.size + self.offered.bytes

    @property
    def buffered(self) -> int:
        """The number of samples in memory."""
        staged = sum(packet.count for packet in self.staged)
        return self.window.samples + staged + len(self.packer) + len(self.offered)

    @property
    def idle(self) -> bool:
        """Whether all closed packets have been sent. Until then, the open packet fills up."""
        return self.window.unacked == len(self.window)

    # Samples and packets on their way into the window

    def offer(self, offer: Offer) -> bool:
        """Accept a sample. Return whether a packet is full."""
        self.offered.add(offer)
        return self.packer.is_full_with(len(self.offered), self.offered.bytes)

    def take_in(self) -> None:
        """Pack the offered samples."""
        self.stats.accepted.add(*self.offered.accepted())
        offers = self.offered.take()
        self._packed += len(offers)
        for packet in self.packer.add(offers):
            self.enqueue(packet)

    def enqueue(self, packet: Packet) -> None:
        """Queue a closed packet for the window or the spool."""
        if self.spool is not None and (self.staged or self.spool.unloaded):
            self.staged.append(packet)
            self._staged_bytes += packet.size
        else:
            self._append(packet)

    def _append(self, packet: Packet) -> None:
        """Append a packet to the window, split to the receiver's limits if it exceeds them."""
        limits = self._limits
        if limits is None:
            self.window.append(packet)
            return
        for part in packet.split(limits.max_packet, limits.max_samples):
            if part.size <= limits.max_packet:
                self.window.append(part)
            else:
                self.window.skip(part.count)
                self._reject_oversize(part, limits)

    def close_packet(self, now: float, active: bool) -> None:
        """Close the open packet once its linger is over or a flush waits for it."""
        self.take_in()
        packer = self.packer
        if packer.began is None or (active and not self.idle):
            return
        packed = self.taken - len(packer)
        if self.flush_to > packed or now - packer.began >= self.linger:
            self.enqueue(packer.take())

    # The spool. The caller writes to disk between these calls

    def to_spool(self, active: bool) -> tuple[list[Packet], int, tuple[int, list[Part]] | None]:
        """Return the packets to spool, how many are in the window, and the mark to write first.

        Packets of the window are spooled while the network is down or the buffer is half full, and
        before staged packets, which come after them.
        """
        assert self.spool is not None
        fresh: list[Packet] = []
        if not active or self.staged or self.memory > self.buffer_bytes // 2:
            fresh = [packet for packet in self.window if packet.spooled is None]
        known = active or any(packet.sent for packet in fresh)
        mark = self.sequences(fresh) if fresh and known else None  # or the next WELCOME sets it
        return fresh + list(self.staged), len(fresh), mark

    def sequences(self, fresh: list[Packet] | None = None) -> tuple[int, list[Part]] | None:
        """Return the window's first sequence, and number and count of each packet in the spool.

        Return None if the sequence is unknown or the window is empty.

        Args:
            fresh: packets of the window that the caller will append to the spool.
        """
        assert self.spool is not None
        if self.window.first is None or not len(self.window):
            return None
        parts, number = [], self.spool.end
        for packet in self.window:
            if packet.spooled is not None:
                parts.append((packet.spooled, packet.count))
            elif fresh:
                parts.append((number, packet.count))
                number += packet.count
        return self.window.first, parts

    def on_spooled(self, written: list[Packet], loaded: int, active: bool) -> None:
        """Record that packets are on disk, and unload packets that the window does not need.

        Args:
            written: the packets.
            loaded: how many of the first packets are in the window.
        """
        assert self.spool is not None
        for packet in written:
            self.outcomes.spooled(packet)
        for _ in written[loaded:]:
            self._staged_bytes -= self.staged.popleft().size
        if not active and self.window.first is not None:
            self.window.rewind(self.window.first)
        self.window.unload(self.buffer_bytes // 4, self.spool)

    def load_spool(self, active: bool) -> bool:
        """Load packets from the spool into the window, and then packets that wait to be spooled.

        Return True if the caller must write `sequences` as a mark.
        """
        spool, window = self.spool, self.window
        assert spool is not None
        room = min(self.buffer_bytes // 4, LOAD_BYTES)
        if active and spool.unloaded and window.size < (room + 1) // 2:
            while window.size < room:
                packet = spool.load()
                if spool.lost:
                    window.skip(spool.lost)
                    self.stats.drop("spool_damaged", spool.lost, 0)
                    spool.lost = 0
                if packet is None:
                    self._ack_spool()  # the last samples may be lost
                    break
                self._append(packet)
                self._mark_due = True
        # Packets that the spool cannot take, because it is too small or its disk is full.
        while active and self.staged and not spool.unloaded and window.size < room:
            self._staged_bytes -= self.staged[0].size
            self._append(self.staged.popleft())
        due, self._mark_due = self._mark_due, False
        return due

    # The receiver's answers

    def welcomed(self, welcome: Welcome, restarted: bool) -> None:
        """Apply the limits and the credit of a WELCOME.

        If the receiver has `restarted`, it has none of the buffered packets, so they may be split.
        """
        self._limits = welcome
        self.grant(welcome.credit)
        self.packer.limit(welcome.max_packet, welcome.max_samples)
        if restarted:
            for packet in self.window.split(welcome.max_packet, welcome.max_samples):
                self._reject_oversize(packet, welcome)
        self._mark_due = any(packet.spooled is not None for packet in self.window)

    def moved(self) -> None:
        """Forget the sequences and the limits of the earlier receiver, which has all sent packets.

        The WELCOME of the new receiver sets them.
        """
        assert self.window.unacked == 0
        self.window.first, self.window.sent_through = None, 0
        self._limits, self._mark_due = None, False
        if self.spool is not None:
            self.spool.forget_mark()

    def next(self) -> tuple[int, Packet] | None:
        """Return the packet to send now, with its sequence, or None."""
        due = None if self._mark_due else self.window.next()
        self.window.leaving = due[1] if due else None  # it is sent while others add and drop
        return due

    def on_sent(self, packet: Packet) -> None:
        """Record that the packet that `next` returned has been sent."""
        count = self.stats.resent if packet.sent else self.stats.sent
        count.add(packet.count, packet.size)
        self.window.advance(packet)

    def grant(self, credit: int) -> None:
        """Set the bytes that may be outstanding."""
        self.window.credit = self.stats.credit = credit

    def ack(self, through: int) -> bool:
        """Remove the packets up to a durable sequence. Return whether there were any."""
        acked = self.window.ack(through)
        if self.spool is not None and not len(self.window) and self.window.first is not None:
            # The spool holds sent packets that memory no longer holds. A packet may be damaged by
            # now. Loading it would shift the sequences of the packets after it.
            unloaded = self.spool.skip(through - self.window.first + 1)
            self.window.first += len(unloaded)
            for _, count in unloaded:
                self.window.skip(count)
                self.stats.acked.add(count, 0)
        self._forget(acked)
        return bool(acked)

    def reject(self, sequence: int, reason: str, detail: str) -> bool:
        """Record that the receiver rejects a packet. Return False if the packet is not known."""
        packet = self.window.find(sequence)
        if packet is not None and not packet.rejected:
            packet.rejected = True
            self.outcomes.rejected(packet, reason, detail)
            self._forget(self.window.pop_rejected())
        return packet is not None

    def _forget(self, packets: list[Packet]) -> None:
        for packet in packets:
            if not packet.rejected:
                self.outcomes.acknowledged(packet)
        self._ack_spool()

    def _ack_spool(self) -> None:
        """Remove settled samples from the spool. Spooled packets are at the head of the window."""
        if self.spool is not None:
            first = next(iter(self.window), None)
            number = None if first is None else first.spooled
            self.spool.ack(self.spool.next if number is None else number)

    def _reject_oversize(self, packet: Packet, limits: Welcome) -> None:
        detail = f"{packet.size} bytes in a packet, the receiver takes {limits.max_packet}"
        self.outcomes.rejected(packet, "oversize", detail)
        self._ack_spool()

    # Samples that are given up

    def drop_oldest(self) -> bool:
        """Drop the oldest packet that was never sent. Return False if there is none."""
        if (packet := self.window.drop_oldest()) is None:
            return False
        self.outcomes.dropped(packet, "oldest", "it made room for a newer sample")
        return True

    def drop_rest(self) -> int:
        """Drop all samples that are neither acknowledged nor spooled, as the producer closes.

        Return the number of dropped samples.
        """
        rest = [*self.window, *self.staged]
        if len(self.packer):
            rest.append(self.packer.take())
        rest = [packet for packet in rest if packet.spooled is None and not packet.rejected]
        for packet in rest:
            self.outcomes.dropped(packet, "closed", "the producer was closed")
        return sum(packet.count for packet in rest)


class Outcomes:
    """A record of the outcomes of samples.

    Attributes:
        stats: the producer's counters.
        rejections: rejections that on_rejected has not got yet.
        deliveries: outcomes that on_delivery has not got yet, each with its callback.
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
