"""The producer's side of the protocol: the state machine of docs/wire.md.

The module uses no sockets and no clocks.

    offline --connected--> greeting --WELCOME--> active --silence, hello-required, BYE--> greeting
    any --refused for good--> refused

ProducerProtocol is not thread-safe. `now` is monotonic time in seconds.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from stream_ssl.producers._outbox import Outbox
from stream_ssl.producers._packer import Packet
from stream_ssl.producers.errors import (
    DamagedError,
    ProducerError,
    RefusedError,
    SupersededError,
    UnauthorisedError,
    VersionRefusedError,
)
from stream_ssl.producers.stats import State
from stream_ssl.rate_limited_logger import RateLimitedLogger, printable
from stream_ssl.wire import VERSION, Ack, Bye, Hello, Message, Nack, Position, Welcome, WireError
from stream_ssl.wire.messages import Verdict, Verdicts

HELLO_SECONDS = 1.0  # between two HELLOs without an answer
SILENCE_SECONDS = 5.0  # maximum time without a message while packets are unacknowledged
STARVED_SECONDS = 30.0  # the same while packets wait for credit: three probes of the receiver
GREETING_SECONDS = 10.0  # maximum wait for WELCOME, then the connection is closed
REWIND_SECONDS = 1.0  # further NACKs for the same gap within this time are ignored
SUPERSEDED_SECONDS = 8.0  # enough for the receiver to detect a connection that died silently
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


class ProducerProtocol:
    """The greeting, sending and acknowledgement of one producer's packets.

    Args:
        hello: the HELLO of this producer.
        outbox: the samples to send.
        reason: why there is no connection yet.
        key: names the producer's key in error messages.
        takeover: whether HELLO displaces a connected producer of the same name.

    Attributes:
        state: "offline", "greeting", "active" or "refused".
        reason: why the state is not active.
        welcome: the last WELCOME of this receiver.
        told_before: the WELCOME of the earlier receiver.
        fatal: why the producer cannot go on.
        verdicts: waiting for on_verdict.
    """

    def __init__(
        self,
        hello: Hello,
        outbox: Outbox,
        reason: str,
        key: str = "this key",
        takeover: bool = True,
    ) -> None:
        self.hello = hello
        self.outbox = outbox
        self.window = outbox.window
        self.state = "offline"
        self.reason = reason
        self.welcome: Welcome | None = None
        self.told_before: Welcome | None = None
        self.fatal: ProducerError | None = None
        self.verdicts: list[Verdict] = []
        self._key, self._takeover = key, takeover
        self._owner = takeover  # whether HELLO may carry the true epoch: see greeting()
        self._announce = False  # send HELLO again, with the true epoch
        self._connections = 0
        self._next_hello = 0.0
        self._greeting_since = 0.0
        self._quiet_since = 0.0
        self._superseded_since: float | None = None
        self._gap: tuple[int, float] = (0, 0.0)
        self._damaged = 0
        self._limited_log = RateLimitedLogger(logger)

    @property
    def active(self) -> bool:
        """Whether the receiver accepts packets now."""
        return self.state == "active"

    @property
    def public_state(self) -> State:
        """The state under its public name, as in Stats."""
        if self.state == "refused":
            return "refused"
        if self.state == "active":
            return "connected"
        return "disconnected" if self.welcome is not None else "connecting"

    # Events of the connection

    def connected(self, now: float) -> None:
        """Begin the greeting, because the transport is up."""
        self._connections += 1
        self.outbox.stats.reconnects = self._connections - 1
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
        self.outbox.moved()
        self.told_before, self.welcome = self.welcome, None
        self._owner, self._announce = self._takeover, False
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
            self.outbox.close_packet(now, active=True)
        if (self.state == "greeting" and now >= self._next_hello) or self._announce:
            return self.greeting()
        if not self.active:
            self.window.leaving = None
            return None
        return self.outbox.next()

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
        if not self.window.unacked:
            self._quiet_since = now
        self.outbox.on_sent(message[1])

    def timer(self, now: float) -> float:
        """Return the seconds until the next call of `outgoing`, if no event happens before.

        The time never exceeds the linger, so a sample that opens a packet need not wake the thread.
        """
        if self.state == "greeting":
            return min(1.0, max(0.0, self._next_hello - now))
        linger, began = self.outbox.linger, self.outbox.packer.began
        left = max(linger, MIN_SLEEP_SECONDS)
        if self.active and began is not None and self.outbox.idle:
            left = max(0.0, began + linger - now)
        return min(1.0, left)

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
            self.stop(VersionRefusedError(self._refusal("version", str(error))))
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
            if self.outbox.spool is not None:
                window.settled += self.outbox.spool.resume(welcome.resume)
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
        restarted = previous is None or previous.epoch != welcome.epoch
        self.outbox.welcomed(welcome, restarted)

    def _acked(self, through: int, credit: int) -> bool:
        """Remove durable packets. Return False if the receiver has packets that were never sent."""
        window = self.window
        if window.first is None:
            return True
        if through > window.sent_through:
            text = f"the receiver has sequence {through}, the last sent is {window.sent_through}"
            self.stop(SupersededError(self._refusal("superseded", text)))
            return False
        if self.outbox.ack(through):
            self._damaged = 0
        self.outbox.grant(credit)
        return True

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
            self.stop(cls(self._refusal(nack.reason, nack.detail)))
            return
        known = self.outbox.reject(nack.sequence, nack.reason, nack.detail)
        if not known and nack.sequence == 0:
            self.stop(RefusedError(f"the receiver refuses: {nack.reason}: {nack.detail}"))

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
                self.stop(DamagedError(f"{text}; check this machine's memory and network"))
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

    def stop(self, error: ProducerError) -> None:
        """End all communication because of an error."""
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
