"""The producer's side of the protocol: the state machine of docs/wire.md.

The module uses no sockets and no clocks.

    offline --connected--> greeting --WELCOME--> active --silence, hello-required, BYE--> greeting
    any --refused for good--> refused

ProtocolState is not thread-safe. `now` is monotonic time in seconds.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import replace

from stream_ssl.producers._packer import OnDelivery, Packer, Packet
from stream_ssl.producers._spool import Part, Spool
from stream_ssl.producers._window import Window
from stream_ssl.producers.errors import (
    DamagedError,
    ProducerError,
    RefusedError,
    SupersededError,
    UnauthorisedError,
    VersionRefusedError,
)
from stream_ssl.producers.stats import Delivery, Outcome, Rejection, State, Stats
from stream_ssl.rate_limited_logger import RateLimitedLogger, printable
from stream_ssl.wire import VERSION, Ack, Bye, Hello, Message, Nack, Position, Welcome, WireError
from stream_ssl.wire.messages import Verdict, Verdicts

HELLO_SECONDS = 1.0  # between two HELLOs without an answer
SILENCE_SECONDS = 5.0  # maximum time without a message while packets are unacknowledged
STARVED_SECONDS = 30.0  # the same while packets wait for credit: three probes of the receiver
GREETING_SECONDS = 10.0  # maximum wait for WELCOME, then the connection is closed
REWIND_SECONDS = 1.0  # further NACKs for the same gap within this time are ignored
SUPERSEDED_SECONDS = 8.0  # enough for the receiver to detect a connection that died silently
LOAD_BYTES = 4 * 1024 * 1024  # maximum bytes to load from the spool at a time
MAX_DAMAGED = 3
MAX_RESUME = 1 << 63  # leaves room for the sequences that follow, which have 64 bits
MIN_SLEEP_SECONDS = 0.05
MAX_UNTOLD = 4096  # maximum verdicts that wait for the callback; others are dropped

logger = logging.getLogger("stream_ssl.producers")

_REFUSALS: dict[str, tuple[type[RefusedError], str]] = {
    "version": (
        VersionRefusedError,
        (
            f"the receiver refuses protocol version {VERSION}: {{detail}}; install the same "
            "release of stream-ssl on both sides"
        ),
    ),
    "superseded": (
        SupersededError,
        (
            "another producer named {name!r} {did}: {detail}; give each producer its own name, or "
            "displace the other with takeover=True (--takeover)"
        ),
    ),
    "unauthorised": (
        UnauthorisedError,
        (
            "{key} may not speak for {name!r}: {detail}; use the key's name on the receiver's "
            "allow-list, or that name + '/...'"
        ),
    ),
}


class ProtocolState:
    """The protocol state of one producer.

    Args:
        hello: the HELLO of this producer.
        packer: collects samples into packets.
        linger: seconds after which a packet that is not full is sent.
        reason: why there is no connection yet.
        key: names the producer's key in error messages.
        takeover: whether HELLO displaces a connected producer of the same name.
        spool: stores packets while the network is down. None: packets stay in memory.
        buffer_bytes: maximum bytes of packets in memory.
    """

    def __init__(
        self,
        hello: Hello,
        packer: Packer,
        linger: float,
        reason: str,
        key: str = "this key",
        takeover: bool = True,
        spool: Spool | None = None,
        buffer_bytes: int = 1 << 26,
    ) -> None:
        self.hello = hello
        self.packer = packer
        self.window = Window()
        self.stats = Stats()
        self.state = "offline"
        self.welcome: Welcome | None = None
        self.told_before: Welcome | None = None  # the WELCOME of the earlier receiver
        self.fatal: ProducerError | None = None
        self.reason = reason  # why the state is not active
        self.rejections: list[Rejection] = []  # waiting for on_rejected
        self.deliveries: list[tuple[OnDelivery, Delivery]] = []  # waiting for on_delivery
        self.verdicts: list[Verdict] = []  # waiting for on_verdict
        self.taken = 0  # samples accepted in this run, or spooled by an earlier run
        self.flush_to = 0  # packets with samples up to this number must not linger
        self.linger = linger
        self.spool = spool
        self.staged: deque[Packet] = deque()  # packets that wait to be written to the spool
        self.buffer_bytes = buffer_bytes
        self._staged_bytes = 0
        self._key, self._takeover = key, takeover
        self._owner = takeover  # whether HELLO may carry the true epoch: see greeting()
        self._announce = False  # send HELLO again, with the true epoch
        self._mark_due = False  # write the sequences of spooled packets before sending them
        self._connections = 0
        self._next_hello = 0.0
        self._greeting_since = 0.0
        self._quiet_since = 0.0
        self._superseded_since: float | None = None
        self._gap: tuple[int, float] = (0, 0.0)
        self._damaged = 0
        self._limited_log = RateLimitedLogger(logger)
        if spool is not None:
            self.taken = spool.samples
            self.window.limit = buffer_bytes // 4
            self.packer.position = spool.position

    @property
    def public_state(self) -> State:
        """The state under its public name, as in Stats."""
        if self.state == "refused":
            return "refused"
        if self.state == "active":
            return "connected"
        return "disconnected" if self.welcome is not None else "connecting"

    @property
    def done(self) -> int:
        """How many of the first `taken` samples are acknowledged, rejected or dropped."""
        return self.window.settled

    @property
    def memory(self) -> int:
        """The bytes of all samples in memory."""
        return self.window.size + self._staged_bytes + self.packer.size

    @property
    def buffered(self) -> int:
        """The number of samples in memory."""
        staged = sum(packet.count for packet in self.staged)
        return self.window.samples + staged + len(self.packer)

    # Events of the connection

    def connected(self, now: float) -> None:
        """Begin the greeting, because the transport is up."""
        self._connections += 1
        self.stats.reconnects = self._connections - 1
        self._greet(now, "connected, but the receiver has not said WELCOME yet")

    def disconnected(self, reason: str) -> None:
        """Go offline, because the transport is down or was never up."""
        self.window.leaving = None
        if self.state != "refused":
            self.state, self.reason = "offline", reason

    def moved(self) -> None:
        """Prepare to connect to a new receiver. Its WELCOME sets the next sequence.

        The earlier receiver has sent WELCOME, and no packet was sent to it since.
        """
        assert self.window.unacked == 0
        self.told_before, self.welcome = self.welcome, None
        self.window.first, self.window.sent_through = None, 0
        self._owner, self._announce, self._mark_due = self._takeover, False, False
        if self.spool is not None:
            self.spool.forget_mark()
        self.disconnected("moving to another receiver")

    @property
    def position(self) -> Position:
        """The source's position, from this receiver or the earlier one, whichever wrote last."""
        here, before = self.welcome, self.told_before
        assert here is not None
        if before is not None and (not here.resume or before.written > here.written):
            return before.position
        return here.position

    def greeting_timed_out(self, now: float) -> bool:
        """Return whether the wait for WELCOME has timed out."""
        return self.state == "greeting" and now - self._greeting_since > GREETING_SECONDS

    # Sending

    def outgoing(self, now: float) -> Hello | tuple[int, Packet] | None:
        """Return the message to send now, or None. Call `on_sent` once it has been sent."""
        if self.state == "active":
            self._check_silence(now)
            self.close_packet(now)
        if (self.state == "greeting" and now >= self._next_hello) or self._announce:
            return self.greeting()
        due = self.window.next() if self.state == "active" and not self._mark_due else None
        self.window.leaving = due[1] if due else None  # it is sent while others add and drop
        return due

    def _check_silence(self, now: float) -> None:
        """Send HELLO after a long silence, because the receiver may have lost this connection."""
        if not self.window.unacked and not self.window.starved:
            self._quiet_since = now
        patience = SILENCE_SECONDS if self.window.unacked else STARVED_SECONDS
        if now - self._quiet_since > patience:
            self._greet(now, f"the receiver has been silent for {patience:.0f} s")

    def greeting(self) -> Hello:
        """Return the HELLO to send now.

        The receiver keeps the producer with the greater epoch. Epoch 0 asks whether the name is
        free and never displaces another producer. After the WELCOME, a second HELLO carries the
        true epoch.
        """
        epoch = self.hello.epoch if self._owner else 0
        return replace(self.hello, epoch=epoch, first=self.window.first or 1)

    def on_sent(self, message: Hello | tuple[int, Packet], now: float) -> None:
        """Record that the message that `outgoing` returned has been sent."""
        if isinstance(message, Hello):
            self._next_hello, self._announce = now + HELLO_SECONDS, False
            return
        packet = message[1]
        count = self.stats.resent if packet.sent else self.stats.sent
        count.add(packet.count, packet.size)
        if not self.window.unacked:
            self._quiet_since = now
        self.window.advance(packet)

    def timer(self, now: float) -> float:
        """Return the seconds until the next call of `outgoing`, if no event happens before.

        The time never exceeds the linger, so a sample that opens a packet need not wake the thread.
        """
        if self.state == "greeting":
            return min(1.0, max(0.0, self._next_hello - now))
        left = max(self.linger, MIN_SLEEP_SECONDS)
        if self.state == "active" and self.packer.began is not None and self._idle:
            left = max(0.0, self.packer.began + self.linger - now)
        return min(1.0, left)

    @property
    def _idle(self) -> bool:
        """Whether all closed packets have been sent. Until then, the open packet fills up."""
        return self.window.unacked == len(self.window)

    def enqueue(self, packet: Packet) -> None:
        """Queue a closed packet for the window or the spool."""
        if self.spool is not None and (self.staged or self.spool.unloaded):
            self._stage(packet)
        else:
            self._append(packet)

    def _append(self, packet: Packet) -> None:
        """Append a packet to the window, split to the receiver's limits if it exceeds them."""
        limits = self.welcome
        if limits is None:
            self.window.append(packet)
            return
        for part in packet.split(limits.max_packet, limits.max_samples):
            if part.size <= limits.max_packet:
                self.window.append(part)
            else:
                self.window.skip(part.count)
                self._oversize(part, limits)

    def close_packet(self, now: float) -> None:
        """Close the open packet once its linger is over or a flush waits for it."""
        packer = self.packer
        if packer.began is None or (self.state == "active" and not self._idle):
            return
        packed = self.taken - len(packer)
        if self.flush_to > packed or now - packer.began >= self.linger:
            self.enqueue(packer.take())

    # The spool. The caller writes to disk between these calls

    def to_spool(self) -> tuple[list[Packet], int, tuple[int, list[Part]] | None]:
        """Return the packets to spool, how many are in the window, and the mark to write first.

        Packets of the window are spooled while the network is down or the buffer is half full.
        """
        assert self.spool is not None
        fresh: list[Packet] = []
        if self.state != "active" or self.memory > self.buffer_bytes // 2:
            fresh = [packet for packet in self.window if packet.spooled is None]
        known = self.state == "active" or any(packet.sent for packet in fresh)
        mark = self.sequences(fresh) if fresh and known else None  # else the next WELCOME sets it
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

    def on_spooled(self, written: list[Packet], loaded: int) -> None:
        """Record that packets are on disk, and unload packets that the window does not need.

        Args:
            written: the packets.
            loaded: how many of the first packets are in the window.
        """
        assert self.spool is not None
        for packet in written:
            self._deliver(packet, "spooled")
        for _ in written[loaded:]:
            self._staged_bytes -= self.staged.popleft().size
        if self.state != "active" and self.window.first is not None:
            self.window.rewind(self.window.first)
        self.window.unload(self.buffer_bytes // 4, self.spool)

    def load_spool(self) -> bool:
        """Load packets from the spool into the window.

        Return True if the caller must write `sequences` as a mark.
        """
        spool, window = self.spool, self.window
        assert spool is not None
        room = min(self.buffer_bytes // 4, LOAD_BYTES)
        if self.state == "active" and spool.unloaded and window.size < (room + 1) // 2:
            while window.size < room and (packet := spool.load()) is not None:
                self._append(packet)
                self._mark_due = True
            window.settled += spool.lost
            self.stats.drop("spool_damaged", spool.lost, 0) if spool.lost else None
            spool.lost = 0
        due, self._mark_due = self._mark_due, False
        return due

    def _stage(self, packet: Packet) -> None:
        self.staged.append(packet)
        self._staged_bytes += packet.size

    # Receiving

    def received(self, message: Message, now: float) -> None:
        """Handle a message of the receiver."""
        self._quiet_since = now
        if isinstance(message, Nack):  # its text is printed, so remove control characters
            words = printable(message.reason), printable(message.detail, 1000)
            message = replace(message, reason=words[0], detail=words[1])
        match message:
            case Welcome():
                self._welcomed(message)
            case Ack():
                self._acked(message.through, message.credit)
            case Nack(permanent=True):
                self._refused(message, now)
            case Nack():
                self._sent_back(message, now)
            case Verdicts():
                if len(self.verdicts) < MAX_UNTOLD:  # a slow callback misses verdicts
                    self.verdicts += message.rows
            case Bye():
                why = printable(message.reason) or "no reason"
                self._greet(now, f"the receiver said BYE: {why}")
                self._next_hello = now + HELLO_SECONDS
            case _:
                text = f"ignored a {type(message).__name__} from the receiver"
                self._limited_log.warning("ignored", text)

    def unreadable(self, error: WireError) -> None:
        """Handle a message that could not be decoded."""
        if error.reason == "version":
            self._stop(VersionRefusedError(self._refusal("version", str(error))))
        else:
            text = f"ignored a message that could not be read: {printable(str(error), 200)}"
            self._limited_log.warning("unreadable", text)

    def _welcomed(self, welcome: Welcome) -> None:
        window, previous = self.window, self.welcome
        if welcome.resume > MAX_RESUME:
            raise WireError("malformed", f"WELCOME: resume {welcome.resume} exceeds {MAX_RESUME}")
        if self.state != "greeting":  # the answer to a repeated HELLO
            self._acked(welcome.resume, welcome.credit)
            return
        if window.first is None:
            window.first = welcome.resume + 1
            window.sent_through = welcome.resume
            if self.spool is not None:
                window.settled += self.spool.resume(welcome.resume)
        elif not self._acked(welcome.resume, welcome.credit):
            return
        else:
            if welcome.resume + 1 < window.first:
                logger.warning(
                    "the receiver's journal ends at %d, but it had acknowledged %d: it is another "
                    "journal, or has lost data",
                    welcome.resume,
                    window.first - 1,
                )
            window.rewind(window.first)
        self._announce, self._owner = not self._owner, True
        self._superseded_since = None
        self.state, self.welcome, self._gap, self._damaged = "active", welcome, (0, 0.0), 0
        window.credit = self.stats.credit = welcome.credit
        self.packer.limit(welcome.max_packet, welcome.max_samples)
        if previous is None or previous.epoch != welcome.epoch:
            # This receiver has none of the buffered packets, so they may still be split.
            for packet in self.window.split(welcome.max_packet, welcome.max_samples):
                self._oversize(packet, welcome)
        self._mark_due = any(packet.spooled is not None for packet in window)

    def _oversize(self, packet: Packet, limits: Welcome) -> None:
        detail = f"{packet.size} bytes in a packet, the receiver takes {limits.max_packet}"
        self._reject(packet, "oversize", detail)
        self._ack_spool()

    def _acked(self, through: int, credit: int) -> bool:
        """Remove durable packets. Return False if the receiver has packets that were never sent."""
        window = self.window
        if window.first is None:
            return True
        if through > window.sent_through:
            text = f"the receiver has sequence {through}, the last sent is {window.sent_through}"
            self._stop(SupersededError(self._refusal("superseded", text)))
            return False
        acked = window.ack(through)
        self._forget(acked)
        if acked:
            self._damaged = 0
        window.credit = self.stats.credit = credit
        return True

    def _forget(self, packets: list[Packet]) -> None:
        for packet in packets:
            if not packet.rejected:
                self.stats.acked.add(packet.count, packet.size)
                self._deliver(packet, "acknowledged")
        self._ack_spool()

    def _ack_spool(self) -> None:
        """Remove settled samples from the spool. Spooled packets are at the head of the window."""
        if self.spool is not None:
            first = next(iter(self.window), None)
            number = None if first is None else first.spooled
            self.spool.ack(self.spool.next if number is None else number)

    def _refused(self, nack: Nack, now: float) -> None:
        if nack.reason == "superseded" and self.state == "greeting":
            since = self._superseded_since = self._superseded_since or now
            if now - since < SUPERSEDED_SECONDS:
                # The other connection may be a dead one of this producer's last run. The receiver
                # detects it soon. So a clock that stepped back does not stop a robot.
                self.reason = self._refusal("superseded", nack.detail)
                self._next_hello = now + HELLO_SECONDS
                return
        if nack.reason in _REFUSALS:
            cls = _REFUSALS[nack.reason][0]
            self._stop(cls(self._refusal(nack.reason, nack.detail)))
            return
        packet = self.window.find(nack.sequence)
        if packet is None:
            if nack.sequence == 0:
                self._stop(RefusedError(f"the receiver refuses: {nack.reason}: {nack.detail}"))
        elif not packet.rejected:
            packet.rejected = True
            self._reject(packet, nack.reason, nack.detail)
            self._forget(self.window.pop_rejected())

    def _reject(self, packet: Packet, reason: str, detail: str) -> None:
        self.stats.rejected.add(packet.count, packet.size)
        logger.warning("%d samples rejected: %s: %s", packet.count, reason, detail)
        self.rejections.append(Rejection(reason, detail, packet.ids))
        self._deliver(packet, "rejected", f"{reason}: {detail}")

    def drop_oldest(self) -> bool:
        """Drop the oldest packet that was never sent. Return False if there is none."""
        packet = self.window.drop_oldest()
        if packet is None:
            return False
        self._drop(packet, "oldest", "it made room for a newer sample")
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
            self._drop(packet, "closed", "the producer was closed")
        return sum(packet.count for packet in rest)

    def _drop(self, packet: Packet, reason: str, detail: str) -> None:
        self.stats.drop(reason, packet.count, len(packet.data.payload))
        self._deliver(packet, "dropped", f"{reason}: {detail}")

    def _deliver(self, packet: Packet, outcome: Outcome, detail: str = "") -> None:
        """Queue the Delivery of each sample of a packet for its callback."""
        if packet.callbacks:
            for name, callback in zip(packet.ids, packet.callbacks, strict=True):
                if callback is not None:
                    self.deliveries.append((callback, Delivery(name, outcome, detail)))
            packet.callbacks = ()

    def _sent_back(self, nack: Nack, now: float) -> None:
        if self.state != "active":
            return
        if nack.reason == "hello-required":
            self._greet(now, "the receiver asked for HELLO")
        elif nack.reason not in ("gap", "checksum"):
            self._greet(now, f"the receiver refuses for now: {nack.reason}: {nack.detail}")
            self._next_hello = now + HELLO_SECONDS
        elif nack.reason == "gap" and self._gap[0] == nack.sequence and now < self._gap[1]:
            return
        else:
            self._damaged += nack.reason == "checksum"
            if self._damaged >= MAX_DAMAGED:
                text = f"packet {nack.sequence} arrived damaged {MAX_DAMAGED} times in a row"
                self._stop(DamagedError(f"{text}; check this machine's memory and network"))
                return
            self._gap = (nack.sequence, now + REWIND_SECONDS)
            if not self.window.rewind(nack.sequence):
                self._greet(
                    now, f"the receiver expects sequence {nack.sequence}, which is gone here"
                )

    def _greet(self, now: float, reason: str) -> None:
        if self.state == "refused":
            return
        self.state, self.reason = "greeting", reason
        self._next_hello = self._greeting_since = now

    def _refusal(self, reason: str, detail: str) -> str:
        did = "is connected" if self.state == "greeting" else "has taken over"
        name, text = self.hello.producer, _REFUSALS[reason][1]
        return text.format(detail=detail, name=name, key=self._key, did=did)

    def _stop(self, error: ProducerError) -> None:
        self.fatal, self.state, self.reason = error, "refused", str(error)

    def why(self) -> str:
        """Return why samples are not acknowledged now, as text for people."""
        if self.state != "active":
            return self.reason
        if not self.window.unacked and (self.window.starved or not self.window.credit):
            return (
                "the receiver grants no credit: its journal is full, its disk cannot be written, "
                "or the learner lags too far behind"
            )
        return f"{self.window.unacked} packets are sent and not acknowledged yet"
