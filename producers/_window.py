"""The window of packets that are sent and unacknowledged, or wait to be sent."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from stream_ssl.producers._packer import Packet
from stream_ssl.producers._spool import Spool


class Window:
    """A queue of the packets that are not yet acknowledged, with a cursor at the next to send.

        first          cursor            end
          |  sent, unacknowledged  |  to be sent  |

    Sequences are contiguous. They are unknown until the first WELCOME gives the last durable one.
    """

    def __init__(self) -> None:
        self.first: int | None = None  # sequence of the oldest packet, once known
        self.sent_through = 0  # the highest sequence that was ever sent
        self.credit = 0  # bytes that may be outstanding, as granted by the receiver
        self.limit = 1 << 62  # maximum outstanding bytes, whatever the credit
        self.outstanding = 0  # bytes of packets before the cursor
        self.size = 0  # bytes of all packets
        self.samples = 0
        self.settled = 0  # samples at the head that are acknowledged, rejected or dropped
        self.leaving: Packet | None = None  # the packet being sent, which may be on the wire
        self._packets: deque[Packet] = deque()
        self._cursor = 0  # index of the next packet to send

    def __len__(self) -> int:
        return len(self._packets)

    def __iter__(self) -> Iterator[Packet]:
        return iter(self._packets)

    @property
    def unacked(self) -> int:
        """The number of packets that are sent and not acknowledged."""
        return self._cursor

    def append(self, packet: Packet) -> None:
        """Append a packet."""
        self._packets.append(packet)
        self.size += packet.size
        self.samples += packet.count

    def next(self) -> tuple[int, Packet] | None:
        """Return the packet to send next, with its sequence.

        Return None if there is no packet to send, or the credit or the limit is too small.
        """
        if self.first is None or self._cursor >= len(self._packets):
            return None
        packet = self._packets[self._cursor]
        if self.outstanding + packet.size > self.credit:
            return None
        if self.outstanding and self.outstanding + packet.size > self.limit:
            return None
        return self.first + self._cursor, packet

    @property
    def starved(self) -> bool:
        """Whether the next packet waits for credit."""
        return self.first is not None and self._cursor < len(self._packets) and self.next() is None

    def advance(self, packet: Packet) -> None:
        """Record that the packet that next() returned has been sent."""
        assert self.first is not None
        assert packet is self._packets[self._cursor]
        packet.sent, self.leaving = True, None
        self.outstanding += packet.size
        self.sent_through = max(self.sent_through, self.first + self._cursor)
        self._cursor += 1

    def ack(self, through: int) -> list[Packet]:
        """Remove all packets up to a sequence, and return them."""
        done = []
        while self._packets and self.first is not None and self.first <= through:
            done.append(self._pop())
        return done

    def pop_rejected(self) -> list[Packet]:
        """Remove the rejected packets at the head, and return them."""
        done = []
        while self._packets and self._packets[0].rejected:
            done.append(self._pop())
        return done

    def rewind(self, sequence: int) -> bool:
        """Move the cursor back to a sequence. Return False if that packet is not in the window."""
        assert self.first is not None
        index = sequence - self.first
        if not 0 <= index <= self._cursor:
            return False
        self._cursor = index
        self.outstanding = sum(self._packets[i].size for i in range(index))
        return True

    def find(self, sequence: int) -> Packet | None:
        """Return the sent packet with a sequence, or None."""
        if self.first is None or not 0 <= sequence - self.first < self._cursor:
            return None
        return self._packets[sequence - self.first]

    def split(self, max_packet: int, max_samples: int) -> list[Packet]:
        """Split all packets to new limits. Remove and return single samples that are too large.

        Call this only after a rewind to the start, and only when no receiver has any of the
        packets.
        """
        assert self._cursor == 0
        refused, kept = list[Packet](), deque[Packet]()
        for packet in self._packets:
            behind, packet.behind = packet.behind, 0
            for part in packet.split(max_packet, max_samples):
                if part.size <= max_packet:
                    kept.append(part)
                else:
                    refused.append(part)
                    self._settle(part.count, kept)
            self._settle(behind, kept)
        self._packets = kept
        self.size = sum(packet.size for packet in kept)
        self.samples = sum(packet.count for packet in kept)
        return refused

    def drop_oldest(self) -> Packet | None:
        """Remove and return the oldest packet that was never sent. Return None if there is none."""
        packets = self._packets
        held = (i for i, it in enumerate(packets) if not it.sent and it is not self.leaving)
        if (index := next(held, None)) is None:
            return None
        packet = packets[index]
        self._settle(packet.count + packet.behind, [packets[index - 1]] if index else [])
        del packets[index]
        self.size -= packet.size
        self.samples -= packet.count
        return packet

    def skip(self, samples: int) -> None:
        """Record that the samples after the last packet are gone."""
        self._settle(samples, self._packets)

    def _settle(self, samples: int, before: Sequence[Packet]) -> None:
        """Count samples as settled, once all packets `before` them are settled.

        flush() waits for samples in their order.
        """
        if before:
            before[-1].behind += samples
        else:
            self.settled += samples

    def unload(self, size: int, spool: Spool) -> None:
        """Remove spooled packets from memory, last first, until `size` bytes are left.

        Sent packets that are unacknowledged stay in memory.
        """
        while len(self._packets) > self._cursor and self.size > size:
            packet = self._packets[-1]
            if packet.spooled is None:
                return
            self._packets.pop()
            self.size -= packet.size
            self.samples -= packet.count
            self.skip(packet.behind)
            spool.unload((packet.spooled, packet.count))

    def _pop(self) -> Packet:
        packet = self._packets.popleft()
        assert self.first is not None
        self.first += 1
        self.settled += packet.count + packet.behind
        self.size -= packet.size
        self.samples -= packet.count
        if self._cursor:
            self._cursor -= 1
            self.outstanding -= packet.size
        return packet
