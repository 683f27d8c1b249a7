"""What a producer says when: the state machine of docs/wire.md, without sockets or clocks.

    offline --connected--> greeting --WELCOME--> active --silence, hello-required, BYE--> greeting
    any --refused for good--> refused

Not thread-safe; `now` is monotonic seconds.
"""

from __future__ import annotations

import logging

from producers._packer import Packer, Packet
from producers._window import Window
from producers.errors import (
    DamagedError,
    ProducerError,
    RefusedError,
    SupersededError,
    UnauthorisedError,
    VersionRefusedError,
)
from producers.stats import Rejection, Stats
from stream_ssl.wire import VERSION, Ack, Bye, Hello, Message, Nack, Welcome, WireError

HELLO_SECONDS = 1.0  # between two HELLOs that were not answered
SILENCE_SECONDS = 5.0  # without a word while packets are unacknowledged
STARVED_SECONDS = (
    30.0  # without a word while only credit is missing: three of the receiver's probes
)
GREETING_SECONDS = 10.0  # without WELCOME: the connection is thrown away
REWIND_SECONDS = 1.0  # in which further NACKs for the same gap are echoes of the first
MAX_DAMAGED = 3
MIN_SLEEP_SECONDS = 0.05

logger = logging.getLogger("producers")

_REFUSALS: dict[str, tuple[type[RefusedError], str]] = {
    "version": (
        VersionRefusedError,
        (
            f"the receiver refuses protocol version {VERSION}: {{}}; install the same release of "
            "stream-ssl on both sides"
        ),
    ),
    "superseded": (
        SupersededError,
        "another producer named {name!r} has taken over: {}; give each producer its own name",
    ),
    "unauthorised": (
        UnauthorisedError,
        (
            "this key may not speak for {name!r}: {}; use the name on the receiver's allow-list, "
            "or that name + '/...'"
        ),
    ),
}


class Dialogue:
    """One producer's side of the protocol."""

    def __init__(self, hello: Hello, packer: Packer, linger: float, trouble: str) -> None:
        self.hello = hello
        self.packer = packer
        self.window = Window()
        self.stats = Stats()
        self.state = "offline"
        self.welcome: Welcome | None = None
        self.fatal: ProducerError | None = None
        self.trouble = trouble  # why the state is not active
        self.rejections: list[Rejection] = []  # to be told and taken away
        self.done = 0  # samples acknowledged or rejected, of those accepted
        self.flush_to = 0  # samples, of those accepted, whose packet must not linger
        self.linger = linger
        self._connections = 0
        self._next_hello = 0.0
        self._greeting_since = 0.0
        self._quiet_since = 0.0
        self._gap: tuple[int, float] = (0, 0.0)
        self._damaged = 0

    # What happens to the connection

    def connected(self, now: float) -> None:
        """The transport is up."""
        self._connections += 1
        self.stats.reconnects = self._connections - 1
        self._greet(now, "connected, but the receiver has not said WELCOME yet")

    def disconnected(self, reason: str) -> None:
        """The transport is down, or was never up."""
        self.trouble = reason
        if self.state != "refused":
            self.state = "offline"

    def stale(self, now: float) -> bool:
        """Whether the connection has been up in vain for too long."""
        return self.state == "greeting" and now - self._greeting_since > GREETING_SECONDS

    # What leaves

    def outgoing(self, now: float) -> Hello | tuple[int, Packet] | None:
        """What to send now; to be followed by `left` when it has been sent."""
        if self.state == "active":
            self._close_packet(now)
            self._check_silence(now)
        if self.state == "greeting" and now >= self._next_hello:
            return self.greeting()
        return self.window.next() if self.state == "active" else None

    def _check_silence(self, now: float) -> None:
        """The receiver may have forgotten this connection: HELLO asks."""
        if not self.window.unacked and not self.window.starved:
            self._quiet_since = now
        patience = SILENCE_SECONDS if self.window.unacked else STARVED_SECONDS
        if now - self._quiet_since > patience:
            self._greet(now, f"the receiver has been silent for {patience:.0f} s")

    def greeting(self) -> Hello:
        """HELLO as of now."""
        first = self.window.first or 1
        hello = self.hello
        return Hello(hello.producer, hello.epoch, first, hello.codecs, hello.agent)

    def left(self, message: Hello | tuple[int, Packet], now: float) -> None:
        """What `outgoing` named has been sent."""
        if isinstance(message, Hello):
            self._next_hello = now + HELLO_SECONDS
            return
        packet = message[1]
        count = self.stats.resent if packet.sent else self.stats.sent
        count.add(packet.count, packet.size)
        if not self.window.unacked:
            self._quiet_since = now
        self.window.advance()

    def timer(self, now: float) -> float:
        """Seconds until `outgoing` should be asked again, if nothing happens before.

        Never longer than the linger, so that a sample that opens a packet need not wake anybody.
        """
        if self.state == "greeting":
            return max(0.0, self._next_hello - now)
        left = max(self.linger, MIN_SLEEP_SECONDS)
        if self.state == "active" and self.packer.began is not None and self._idle:
            left = max(0.0, self.packer.began + self.linger - now)
        return min(1.0, left)

    @property
    def _idle(self) -> bool:
        """Whether all closed packets have been sent; until then an open one had better fill up."""
        return self.window.unacked == len(self.window)

    def enqueue(self, packet: Packet) -> None:
        """A closed packet, cut to the receiver's limits if it has outgrown them."""
        limits = self.welcome
        if limits is None:
            self.window.append(packet)
            return
        for part in packet.split(limits.max_packet, limits.max_samples):
            if part.size <= limits.max_packet:
                self.window.append(part)
            else:
                self._oversize(part, limits)

    def _close_packet(self, now: float) -> None:
        packer = self.packer
        if packer.began is None or not self._idle:
            return
        packed = self.stats.accepted.samples - len(packer)
        if self.flush_to > packed or now - packer.began >= self.linger:
            self.enqueue(packer.take())

    # What arrives

    def received(self, message: Message, now: float) -> None:
        """Takes a message in."""
        self._quiet_since = now
        match message:
            case Welcome():
                self._welcomed(message)
            case Ack():
                self._acked(message.through, message.credit)
            case Nack(permanent=True):
                self._refused(message)
            case Nack():
                self._sent_back(message, now)
            case Bye():
                self._greet(now, f"the receiver said BYE: {message.reason or 'no reason'}")
                self._next_hello = now + HELLO_SECONDS
            case _:
                logger.warning("ignored a %s from the receiver", type(message).__name__)

    def misread(self, error: WireError) -> None:
        """A message that could not be read."""
        if error.reason == "version":
            self._stop(VersionRefusedError(_REFUSALS["version"][1].format(error)))
        else:
            logger.warning("ignored a message that could not be read: %s", error)

    def _welcomed(self, welcome: Welcome) -> None:
        window, previous = self.window, self.welcome
        if self.state != "greeting":  # the answer to a repeated HELLO
            self._acked(welcome.resume, welcome.credit)
            return
        if window.first is None:
            window.first = welcome.resume + 1
            window.sent_through = welcome.resume
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
        self.state, self.welcome, self._gap, self._damaged = "active", welcome, (0, 0.0), 0
        window.credit = self.stats.credit = welcome.credit
        self.packer.limit(welcome.max_packet, welcome.max_samples)
        if previous is None or previous.epoch != welcome.epoch:
            # This receiver has seen none of what is buffered: it may still be cut up.
            for packet in self.window.split(welcome.max_packet, welcome.max_samples):
                self._oversize(packet, welcome)

    def _oversize(self, packet: Packet, limits: Welcome) -> None:
        detail = f"{packet.size} bytes in a packet, the receiver takes {limits.max_packet}"
        self._reject(packet, "oversize", detail)
        self.done += packet.count

    def _acked(self, through: int, credit: int) -> bool:
        """Forgets what is durable. False: the receiver speaks of packets that never were."""
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
            self.done += packet.count
            if not packet.rejected:
                self.stats.acked.add(packet.count, packet.size)

    def _refused(self, nack: Nack) -> None:
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
        ids = tuple(row["id"] for row in packet.data.fields["samples"])
        logger.warning("%d samples rejected: %s: %s", packet.count, reason, detail)
        self.rejections.append(Rejection(reason, detail, ids))

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
                self._greet(now, f"the receiver expects sequence {nack.sequence}, not held here")

    def _greet(self, now: float, trouble: str) -> None:
        if self.state == "refused":
            return
        self.state, self.trouble = "greeting", trouble
        self._next_hello = self._greeting_since = now

    def _refusal(self, reason: str, detail: str) -> str:
        return _REFUSALS[reason][1].format(detail, name=self.hello.producer)

    def _stop(self, error: ProducerError) -> None:
        self.fatal, self.state, self.trouble = error, "refused", str(error)

    def why(self) -> str:
        """Why samples are not acknowledged now, for people."""
        if self.state != "active":
            return self.trouble
        if self.window.starved and not self.window.unacked:
            return (
                "the receiver grants no credit: its journal is full, its disk cannot be written, "
                "or the learner lags too far behind"
            )
        return f"{self.window.unacked} packets are sent and not acknowledged yet"
