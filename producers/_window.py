"""The packets that are not yet acknowledged, and how far they have been sent.

    first          cursor            end
      |  sent, unacknowledged  |  to be sent  |

Sequences are contiguous. They are unknown until the first WELCOME names the last durable one.
"""

from __future__ import annotations

from collections import deque

from producers._packer import Packet


class Window:
    """A queue with a cursor. Not thread-safe."""

    def __init__(self) -> None:
        self.first: int | None = None  # sequence of the oldest packet held, once known
        self.sent_through = 0  # the highest sequence that ever left
        self.credit = 0
        self.outstanding = 0  # bytes of packets before the cursor
        self.size = 0  # bytes of all packets
        self.samples = 0
        self._packets: deque[Packet] = deque()
        self._cursor = 0  # index of the next packet to send

    def __len__(self) -> int:
        return len(self._packets)

    @property
    def unacked(self) -> int:
        """Packets sent and not acknowledged."""
        return self._cursor

    def append(self, packet: Packet) -> None:
        """A new packet at the end."""
        self._packets.append(packet)
        self.size += packet.size
        self.samples += packet.count

    def next(self) -> tuple[int, Packet] | None:
        """The packet to send now, with its sequence; None: nothing to send, or no credit."""
        if self.first is None or self._cursor >= len(self._packets):
            return None
        packet = self._packets[self._cursor]
        if self.outstanding + packet.size > self.credit:
            return None
        return self.first + self._cursor, packet

    @property
    def starved(self) -> bool:
        """Whether only credit keeps the next packet back."""
        return self.first is not None and self._cursor < len(self._packets) and self.next() is None

    def advance(self) -> None:
        """The packet that next() named has left."""
        assert self.first is not None
        packet = self._packets[self._cursor]
        packet.sent = True
        self.outstanding += packet.size
        self.sent_through = max(self.sent_through, self.first + self._cursor)
        self._cursor += 1

    def ack(self, through: int) -> list[Packet]:
        """Forgets all packets up to a sequence, and returns them."""
        done = []
        while self._packets and self.first is not None and self.first <= through:
            done.append(self._pop())
        return done

    def pop_rejected(self) -> list[Packet]:
        """Forgets rejected packets that nothing unacknowledged stands before."""
        done = []
        while self._packets and self._packets[0].rejected:
            done.append(self._pop())
        return done

    def rewind(self, sequence: int) -> bool:
        """Sends again from a sequence on; False when it is not held."""
        assert self.first is not None
        index = sequence - self.first
        if not 0 <= index <= self._cursor:
            return False
        self._cursor = index
        self.outstanding = sum(self._packets[i].size for i in range(index))
        return True

    def find(self, sequence: int) -> Packet | None:
        """The sent packet with a sequence."""
        if self.first is None or not 0 <= sequence - self.first < self._cursor:
            return None
        return self._packets[sequence - self.first]

    def split(self, max_packet: int, max_samples: int) -> list[Packet]:
        """Cuts all packets to new limits; returns single samples that are too large, removed.

        Only after a rewind to the start, and only when no receiver holds any of the packets.
        """
        assert self._cursor == 0
        refused, kept = list[Packet](), deque[Packet]()
        for packet in self._packets:
            for part in packet.split(max_packet, max_samples):
                (kept if part.size <= max_packet else refused).append(part)
        self._packets = kept
        self.size = sum(packet.size for packet in kept)
        self.samples = sum(packet.count for packet in kept)
        return refused

    def _pop(self) -> Packet:
        packet = self._packets.popleft()
        assert self.first is not None
        self.first += 1
        self.size -= packet.size
        self.samples -= packet.count
        if self._cursor:
            self._cursor -= 1
            self.outstanding -= packet.size
        return packet
