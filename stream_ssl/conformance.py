"""Tests whether a producer keeps the rules of docs/wire.md, with a receiver that behaves badly.

Each rule is a function of a `Trial`, which is a producer that has just started and the receiver's
side of its connection. The function returns if the producer keeps the rule, and raises `Broken` if
not. The section "Conformance" in docs/wire.md lists the rules by name.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Self

import msgpack
import zmq

from stream_ssl.wire.messages import (
    Ack,
    Bye,
    Data,
    Frames,
    Hello,
    Message,
    Nack,
    Welcome,
    decode,
    encode,
)
from stream_ssl.wire.sample import CODECS

PATIENCE = 10.0  # most seconds to wait for a message that is due immediately
REWIND_SECONDS = 3.0  # less than the silence that also makes a producer send HELLO and go back
UNDER_WAY = 0.5  # seconds in which messages in flight may still arrive
HELLO_DUE = 3.0  # seconds for HELLO after BYE; after 5 s of silence, HELLO comes without BYE
QUIET = 0.7  # seconds after HELLO in which no DATA may arrive
CREDIT = 4 << 20
MAX_PACKET = 1 << 20

Start = Callable[[str], Callable[[], int | None]]
"""Start the producer with the receiver's address; return a function that kills the producer.

That function returns the exit status of a producer that had ended by itself, and otherwise None.
"""


class Broken(Exception):
    """An error for a broken rule; the message says what was received and what was expected."""


class Untried(Exception):
    """An error for a rule that could not be tested with this producer; the message says why."""


@dataclass(frozen=True, slots=True)
class RuleResult:
    """The result for one rule; `kept` is None if the rule could not be tested."""

    rule: str
    promise: str
    kept: bool | None
    why: str = ""


class Trial:
    """A producer under test, and a receiver's side that sends what the rule requires.

    Args:
        start: starts the producer.

    Attributes:
        address: the address that the producer connects to.
        hello: the last HELLO that was received.
        status: the exit status of the producer if it had ended before the end of the trial.
    """

    def __init__(self, start: Start) -> None:
        self._start = start
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.address = "tcp://127.0.0.1:0"
        self._who = b""
        self._welcome = Welcome(0, None, CREDIT, MAX_PACKET, 1024, CODECS, time.time_ns())
        self.hello: Hello | None = None
        self.status: int | None = None
        self._open()
        try:
            self._end = start(self.address)
        except OSError:
            self._context.destroy(0)
            raise

    def _open(self) -> None:
        self._socket = self._context.socket(zmq.ROUTER)
        for option in (zmq.HEARTBEAT_TIMEOUT, zmq.HEARTBEAT_TTL):
            self._socket.setsockopt(option, 3000)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, 1000)
        self._socket.linger = 0
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                self._socket.bind(self.address)
                break
            except zmq.ZMQError:  # the previous socket may not have released the port yet
                if time.monotonic() >= deadline:
                    raise
                time.sleep(0.01)
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def drop(self) -> None:
        """Close the connection, and listen again on the same port."""
        self._socket.close(0)
        self._open()

    def restart(self) -> None:
        """Kill the producer and start it again."""
        self._end()
        self.drop()
        self._end = self._start(self.address)

    def hear(self, seconds: float) -> Message | None:
        """Return the next message after checking all of it, or None after the timeout.

        Without time left, it returns None although messages wait: a faulty producer may flood it.
        """
        if seconds <= 0 or not self._socket.poll(int(1000 * seconds)):
            return None
        self._who, *frames = self._socket.recv_multipart()
        try:
            message = decode(frames)
            if isinstance(message, Data):
                list(message.samples())
        except ValueError as error:
            raise Broken(f"a message breaks the format: {error}") from None
        if isinstance(message, Hello):
            self.hello = message
        return message

    def during(self, seconds: float) -> Iterator[Message]:
        """Yield the messages that arrive within the given time."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if (message := self.hear(left)) is not None:
                yield message

    def greet(self, **fields: Any) -> Hello:
        """Wait for HELLO, send WELCOME, and return the HELLO.

        Raises:
            Broken: HELLO did not arrive in time, or DATA arrived before it.
        """
        end = time.monotonic() + PATIENCE
        while not isinstance(message := self.hear(end - time.monotonic()), Hello):
            if message is None:
                raise Broken(f"no HELLO within {PATIENCE:g} s")
            if isinstance(message, Data):
                raise Broken(f"DATA {message.sequence} came before WELCOME")
        self.welcome(**fields)
        return message

    def welcome(self, **fields: Any) -> None:
        """Send WELCOME with the fields of the previous one, except for the given fields."""
        self._welcome = replace(self._welcome, **fields)
        self.say(self._welcome)

    def data(self) -> Data:
        """Return the next DATA; answer each HELLO before it, which a takeover repeats."""
        end = time.monotonic() + PATIENCE
        while (message := self.hear(end - time.monotonic())) is not None:
            if isinstance(message, Data):
                return message
            if isinstance(message, Hello):
                self.say(self._welcome)
            elif isinstance(message, Bye):
                raise Broken("it said BYE and sent no more")
        raise Broken(f"no DATA within {PATIENCE:g} s")

    def packets(self, count: int, first: int) -> list[Data]:
        """Return the next `count` packets; they must be numbered from `first` without gaps."""
        found = []
        for sequence in range(first, first + count):
            packet = self.data()
            if packet.sequence != sequence:
                raise Broken(f"DATA {packet.sequence} came, and {sequence} was due")
            found.append(packet)
        return found

    def say(self, message: Message) -> None:
        """Send a message to the connection of the last received message."""
        self.frames(encode(message))

    def ack(self, through: int, credit: int = CREDIT) -> None:
        """Send ACK."""
        self._welcome = replace(self._welcome, resume=max(self._welcome.resume, through))
        self.say(Ack(through, credit))

    def frames(self, frames: Frames) -> None:
        """Send arbitrary frames."""
        self._socket.send_multipart([self._who, *frames])

    def settle(self) -> None:
        """Ignore the messages in flight."""
        for _ in self.during(UNDER_WAY):
            pass

    def nothing(self, kinds: type | tuple[type, ...], seconds: float, after: str) -> None:
        """Check that no message of these kinds arrives after the messages in flight."""
        self.settle()
        for message in self.during(seconds):
            if isinstance(message, kinds):
                what = f" {message.sequence}" if isinstance(message, Data) else ""
                raise Broken(f"{type(message).__name__.upper()}{what} came after {after}")

    def greeted_again(self, seconds: float, after: str) -> None:
        """Check that HELLO arrives in time and that no DATA follows it."""
        if not any(isinstance(message, Hello) for message in self.during(seconds)):
            raise Broken(f"no HELLO within {seconds:g} s of {after}")
        for message in self.during(QUIET):
            if isinstance(message, Data):
                raise Broken(f"DATA {message.sequence} came after HELLO, before WELCOME")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(Exception):
            self.status = self._end()
        self._context.destroy(0)


def same(first: Data, again: Data) -> None:
    """Check that a packet that was sent again is unchanged.

    Raises:
        Broken: the header or the payload differs.
    """
    if (bytes(first.header), bytes(first.payload)) != (bytes(again.header), bytes(again.payload)):
        raise Broken(f"DATA {again.sequence} was sent again with other bytes")


def framing(trial: Trial) -> None:
    """Every message can be decoded, byte for byte as in the golden messages."""
    trial.greet()
    for packet in trial.packets(5, 1):
        trial.ack(packet.sequence)


def greeting(trial: Trial) -> None:
    """HELLO is sent first and again each second, and no DATA is sent before WELCOME."""
    hellos = 0
    end = time.monotonic() + PATIENCE
    while hellos < 3:
        message = trial.hear(min(end - time.monotonic(), PATIENCE if not hellos else 3.0))
        if message is None:
            raise Broken(f"{hellos} HELLOs came, and another each second was due")
        if isinstance(message, Data):
            raise Broken(f"DATA {message.sequence} came before WELCOME")
        hellos += isinstance(message, Hello)
    trial.welcome()
    trial.packets(1, 1)


def numbering(trial: Trial) -> None:
    """The first packet is `resume` + 1, and sequences have no gaps."""
    trial.greet(resume=41)
    for packet in trial.packets(4, 42):
        trial.ack(packet.sequence)


def restart(trial: Trial) -> None:
    """A restart without state resumes at `resume` + 1, with the source at `position`."""
    trial.greet()
    packets = trial.packets(6, 1)
    trial.restart()
    kept = packets[2]
    if kept.position is None:
        raise Untried("its packets carry no position")
    trial.greet(resume=3, position=kept.position)
    again = next(trial.packets(1, 4)[0].samples())
    due = next(packets[3].samples())
    if again.id != due.id:
        raise Broken(f"it went on with sample {again.id!r}, and {due.id!r} was due")


def reconnect(trial: Trial) -> None:
    """After a reconnect, HELLO and all packets that are not durable are sent again, unchanged."""
    trial.greet()
    packets = trial.packets(3, 1)
    trial.ack(1)
    trial.drop()
    hello = trial.greet(resume=2)
    if not 1 <= hello.first <= 2:
        raise Broken(f"HELLO's first was {hello.first}, and its oldest packet is 1 or 2")
    same(packets[2], trial.packets(1, 3)[0])
    trial.packets(2, 4)


def rewind(trial: Trial) -> None:
    """`gap` rewinds to its sequence, once for a burst of equal NACKs, with unchanged packets."""
    trial.greet()
    packets = trial.packets(3, 1)
    for _ in range(4):
        trial.say(Nack(2, "gap", "expected 2", False))
    end = time.monotonic() + REWIND_SECONDS
    while (packet := trial.data()).sequence != 2:
        if time.monotonic() > end:
            raise Broken("it did not go back to 2")
    same(packets[1], packet)
    same(packets[2], trial.packets(1, 3)[0])
    trial.ack(3)
    due = 4
    for message in trial.during(0.6):
        if isinstance(message, Data):
            if message.sequence != due:
                raise Broken(f"DATA {message.sequence} came, and {due} was due: it went back again")
            trial.ack(due)
            due += 1


def hello_required(trial: Trial) -> None:
    """After `hello-required`, HELLO is sent, and no DATA until WELCOME."""
    trial.greet()
    packets = trial.packets(2, 1)
    trial.say(Nack(0, "hello-required", "who are you", False))
    trial.greeted_again(4.0, "hello-required")
    trial.welcome(resume=1)
    same(packets[1], trial.packets(1, 2)[0])


def silence(trial: Trial) -> None:
    """After 5 s of silence with unacknowledged packets, HELLO is sent."""
    trial.greet()
    trial.packets(1, 1)
    for message in trial.during(1.5):  # a HELLO that belongs to the greeting, for a takeover
        if isinstance(message, Hello):
            trial.welcome()
    trial.greeted_again(6.5, "silence")
    trial.welcome()
    trial.packets(1, 1)


def bye(trial: Trial) -> None:
    """After the receiver's BYE, no DATA is sent until the next WELCOME."""
    trial.greet()
    trial.packets(2, 1)
    trial.say(Bye("restarting"))
    trial.greeted_again(HELLO_DUE, "BYE")
    trial.greet(resume=2)
    trial.packets(1, 3)


def credit(trial: Trial) -> None:
    """At most `credit` bytes are outstanding; at credit 0 the producer waits without giving up."""
    trial.greet()
    size = trial.packets(1, 1)[0].size
    trial.ack(1, credit=0)
    trial.settle()
    trial.drop()
    trial.greet(resume=1, credit=3 * size)
    outstanding, last = 0, 1
    for message in trial.during(1.5):
        if isinstance(message, Hello):
            trial.welcome()
        if isinstance(message, Data):
            last, outstanding = message.sequence, outstanding + message.size
        if outstanding > 3 * size:
            raise Broken(f"{outstanding} bytes were outstanding, of {3 * size} granted")
    if outstanding < size:
        raise Untried("it sent too little for its credit to matter")
    trial.ack(last, credit=0)
    trial.nothing((Data, Bye), 2.0, "credit 0")
    trial.ack(last)
    trial.packets(1, last + 1)


def refused(trial: Trial) -> None:
    """A permanently rejected packet is dropped, and the next sequence follows."""
    trial.greet()
    packets = trial.packets(3, 1)
    trial.ack(1)
    trial.say(Nack(2, "malformed", "refused to see what happens", True))
    last = 3
    for message in trial.during(1.0):
        if isinstance(message, Data):
            if message.sequence <= last:
                raise Broken(f"DATA {message.sequence} came again after 2 was refused for good")
            last = message.sequence
    trial.drop()
    trial.greet(resume=2)
    same(packets[2], trial.packets(1, 3)[0])


def stop(trial: Trial) -> None:
    """The producer stops on `superseded`, `unauthorised` and `version`."""
    for reason in ("unauthorised", "superseded", "version"):
        trial.greet(resume=0)
        trial.packets(1, 1)
        frames = encode(Nack(0, reason, "to see whether it stops", True))
        if reason == "version":
            frames[0] = bytes(frames[0][:2]) + b"\x09" + bytes(frames[0][3:])
        trial.frames(frames)
        trial.nothing((Data, Hello), 2.5, f"refusal for {reason}")
        trial.restart()
    trial.greet(resume=0)


def limits(trial: Trial) -> None:
    """Packets do not exceed `max_packet` and `max_samples`."""
    trial.greet()
    packet = trial.packets(1, 1)[0]
    largest = max(len(sample.data) for sample in packet.samples())
    trial.restart()
    max_packet = 2 * largest + 2048
    trial.greet(resume=0, max_packet=max_packet, max_samples=2)
    for packet in trial.packets(4, 1):
        if packet.size > max_packet or len(packet) > 2:
            raise Broken(
                f"a packet of {packet.size} bytes and {len(packet)} samples came, and the limits "
                f"are {max_packet} and 2"
            )
        trial.ack(packet.sequence)


def unknown_keys(trial: Trial) -> None:
    """Unknown map keys are ignored."""

    def extended(message: Message) -> Frames:
        prefix, packed = encode(message)
        return [prefix, msgpack.packb({**msgpack.unpackb(packed), "of_a_later_year": [1, {}]})]

    trial.greet()
    packets = trial.packets(2, 1)
    trial.say(Bye("once more"))
    trial.greeted_again(HELLO_DUE, "BYE")
    trial.frames(extended(replace(trial._welcome, resume=1)))
    same(packets[1], trial.packets(1, 2)[0])
    trial.frames(extended(Ack(2, CREDIT)))
    trial.packets(2, 3)


def repeated_ack(trial: Trial) -> None:
    """An ACK that arrives twice changes nothing."""
    trial.greet()
    trial.packets(2, 1)
    for _ in range(3):
        trial.ack(2)
    for packet in trial.packets(4, 3):
        trial.ack(packet.sequence)
        trial.ack(packet.sequence)


def lost_journal(trial: Trial) -> None:
    """If the journal lost acknowledged packets, HELLO's `first` and DATA are the oldest left."""
    trial.greet()
    packets = trial.packets(4, 1)
    trial.ack(3)
    trial.settle()
    trial.drop()
    hello = trial.greet(resume=1, epoch=time.time_ns())
    if hello.first != 4:
        raise Broken(f"HELLO's first was {hello.first}, and its oldest packet is 4")
    same(packets[3], trial.packets(1, 4)[0])


RULES: dict[str, Callable[[Trial], None]] = {
    "framing": framing,
    "greeting": greeting,
    "numbering": numbering,
    "restart": restart,
    "reconnect": reconnect,
    "rewind": rewind,
    "hello-required": hello_required,
    "silence": silence,
    "bye": bye,
    "credit": credit,
    "refused": refused,
    "stop": stop,
    "limits": limits,
    "unknown-keys": unknown_keys,
    "repeated-ack": repeated_ack,
    "lost-journal": lost_journal,
}


def tried(rule: str, start: Start) -> RuleResult:
    """Test a producer for one rule and return the result."""
    promise = (RULES[rule].__doc__ or "").strip()
    try:
        with Trial(start) as trial:
            RULES[rule](trial)
    except Broken as error:
        ended = "" if trial.status is None else f"; the producer had ended: status {trial.status}"
        return RuleResult(rule, promise, False, f"{error}{ended}")
    except Untried as error:
        return RuleResult(rule, promise, None, str(error))
    return RuleResult(rule, promise, True)
