"""What docs/wire.md asks of a producer, tried by a receiver that behaves in many ways.

Each rule is a function of a `Trial`: a producer that has just been started, and the receiver's side
of its connection. It returns where the rule was kept, and raises `Broken` with what was seen where
not. The rules' names are those of the list under "Conformance" in docs/wire.md.
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

PATIENCE = 10.0  # seconds for what must happen at once
REWIND_SECONDS = 3.0  # less than the silence after which HELLO has it go back as well
UNDER_WAY = 0.5  # seconds in which what was sent before may still arrive
HELLO_DUE = 3.0  # seconds for an answer to BYE; at 5 s of silence a producer greets by itself
CREDIT = 4 << 20
MAX_PACKET = 1 << 20

Start = Callable[[str], Callable[[], None]]
"""Starts the producer with the receiver's address; returns what ends it, without warning."""


class Broken(Exception):
    """A rule was not kept; the message says what was seen, and what was due."""


class Untried(Exception):
    """The producer gave no occasion to try a rule; the message says why."""


@dataclass(frozen=True, slots=True)
class Result:
    """Of one rule. `kept` is None where it could not be tried."""

    rule: str
    promise: str
    kept: bool | None
    why: str = ""


class Trial:
    """One producer, and a receiver's side that says what a rule tells it to.

    Attributes:
        hello: the last HELLO.
    """

    def __init__(self, start: Start) -> None:
        self._start = start
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.address = "tcp://127.0.0.1:0"
        self._who = b""
        self._welcome = Welcome(0, None, CREDIT, MAX_PACKET, 1024, CODECS, time.time_ns())
        self.hello: Hello | None = None
        self._open()
        self._end = start(self.address)

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
            except zmq.ZMQError:  # the one before has not left the port yet
                if time.monotonic() >= deadline:
                    raise
                time.sleep(0.01)
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def drop(self) -> None:
        """The connection breaks, and comes back at the same port."""
        self._socket.close(0)
        self._open()

    def restart(self) -> None:
        """The producer is killed and started again."""
        self._end()
        self.drop()
        self._end = self._start(self.address)

    def hear(self, seconds: float) -> Message | None:
        """The next message, all of it checked; None: there is none in time."""
        if not self._socket.poll(max(0, int(1000 * seconds))):
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
        """What comes in so many seconds."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if (message := self.hear(left)) is not None:
                yield message

    def greet(self, **fields: Any) -> Hello:
        """Waits for HELLO, before which no DATA may come, and says WELCOME."""
        end = time.monotonic() + PATIENCE
        while not isinstance(message := self.hear(end - time.monotonic()), Hello):
            if message is None:
                raise Broken(f"no HELLO within {PATIENCE:g} s")
            if isinstance(message, Data):
                raise Broken(f"DATA {message.sequence} came before WELCOME")
        self.welcome(**fields)
        return message

    def welcome(self, **fields: Any) -> None:
        """Says WELCOME, with the fields of the last one but for those given."""
        self._welcome = replace(self._welcome, **fields)
        self.say(self._welcome)

    def data(self) -> Data:
        """The next DATA; a HELLO repeated before it, as for takeover, is answered."""
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
        """So many packets, which must be numbered from `first` on without gaps."""
        found = []
        for sequence in range(first, first + count):
            packet = self.data()
            if packet.sequence != sequence:
                raise Broken(f"DATA {packet.sequence} came, and {sequence} was due")
            found.append(packet)
        return found

    def say(self, message: Message) -> None:
        """Answers the last one heard."""
        self.frames(encode(message))

    def ack(self, through: int, credit: int = CREDIT) -> None:
        """Acknowledges."""
        self._welcome = replace(self._welcome, resume=max(self._welcome.resume, through))
        self.say(Ack(through, credit))

    def frames(self, frames: Frames) -> None:
        """Sends any frames."""
        self._socket.send_multipart([self._who, *frames])

    def nothing(self, kinds: type | tuple[type, ...], seconds: float, after: str) -> None:
        """No message of these kinds comes, once what was under way has arrived."""
        for _ in self.during(UNDER_WAY):
            pass
        for message in self.during(seconds):
            if isinstance(message, kinds):
                what = f" {message.sequence}" if isinstance(message, Data) else ""
                raise Broken(f"{type(message).__name__.upper()}{what} came after {after}")

    def quiet_after_bye(self, reason: str) -> None:
        """Says BYE. HELLO answers it, ahead of silence doing so, and no DATA comes behind that."""
        self.say(Bye(reason))
        if not any(isinstance(message, Hello) for message in self.during(HELLO_DUE)):
            raise Broken(f"no HELLO within {HELLO_DUE:g} s of BYE")
        for message in self.during(0.7):
            if isinstance(message, Data):
                raise Broken(f"DATA {message.sequence} came after BYE")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(Exception):
            self._end()
        self._context.destroy(0)


def same(first: Data, again: Data) -> None:
    """Raises Broken where a packet has changed."""
    if (bytes(first.header), bytes(first.payload)) != (bytes(again.header), bytes(again.payload)):
        raise Broken(f"DATA {again.sequence} was sent again with other bytes")


def framing(trial: Trial) -> None:
    """Every message decodes, byte for byte as in the golden messages."""
    trial.greet()
    for packet in trial.packets(5, 1):
        trial.ack(packet.sequence)


def greeting(trial: Trial) -> None:
    """HELLO comes first and again each second, and no DATA before WELCOME."""
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
    """A restart without state goes on at `resume` + 1, with the source at `position`."""
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
    """After a reconnect: HELLO, then what is not durable, in order and unchanged."""
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
    """`gap` rewinds to the sequence named, once for a burst of the same; packets are unchanged."""
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
    """`hello-required` is answered by HELLO, and no DATA until WELCOME."""
    trial.greet()
    packets = trial.packets(2, 1)
    trial.say(Nack(0, "hello-required", "who are you", False))
    greeted_again(trial, 4.0, "hello-required")
    trial.welcome(resume=1)
    same(packets[1], trial.packets(1, 2)[0])


def silence(trial: Trial) -> None:
    """HELLO asks after 5 s of silence with packets unacknowledged."""
    trial.greet()
    trial.packets(1, 1)
    for message in trial.during(1.5):  # a HELLO of the greeting's, for takeover
        if isinstance(message, Hello):
            trial.welcome()
    greeted_again(trial, 6.5, "silence")
    trial.welcome()
    trial.packets(1, 1)


def greeted_again(trial: Trial, seconds: float, after: str) -> None:
    """HELLO comes in time, and no DATA behind it."""
    if not any(isinstance(message, Hello) for message in _until_hello(trial, seconds)):
        raise Broken(f"no HELLO within {seconds:g} s of {after}")
    for message in trial.during(0.5):
        if isinstance(message, Data):
            raise Broken(f"DATA {message.sequence} came after HELLO, before WELCOME")


def _until_hello(trial: Trial, seconds: float) -> Iterator[Message]:
    for message in trial.during(seconds):
        yield message
        if isinstance(message, Hello):
            return


def bye(trial: Trial) -> None:
    """After the receiver's BYE: no DATA until the next WELCOME."""
    trial.greet()
    trial.packets(2, 1)
    trial.quiet_after_bye("restarting")
    trial.greet(resume=2)
    trial.packets(1, 3)


def credit(trial: Trial) -> None:
    """Never more than `credit` bytes outstanding; at credit 0 it waits without giving up."""
    trial.greet()
    size = trial.packets(1, 1)[0].size
    trial.ack(1, credit=0)
    for _ in trial.during(UNDER_WAY):
        pass
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
    """A packet refused for good is dropped, its sequence consumed, and the next one goes on."""
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
    """`superseded`, `unauthorised` and another version end it."""
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
    """Packets keep to `max_packet` and `max_samples`."""
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
    """Keys of a map that it does not know are passed over."""

    def extended(message: Message) -> Frames:
        prefix, packed = encode(message)
        return [prefix, msgpack.packb({**msgpack.unpackb(packed), "of_a_later_year": [1, {}]})]

    trial.greet()
    packets = trial.packets(2, 1)
    trial.quiet_after_bye("once more")
    trial.frames(extended(replace(trial._welcome, resume=1)))
    same(packets[1], trial.packets(1, 2)[0])
    trial.frames(extended(Ack(2, CREDIT)))
    trial.packets(2, 3)


def repeated_ack(trial: Trial) -> None:
    """An ACK that comes twice changes nothing."""
    trial.greet()
    trial.packets(2, 1)
    for _ in range(3):
        trial.ack(2)
    for packet in trial.packets(4, 3):
        trial.ack(packet.sequence)
        trial.ack(packet.sequence)


def lost_journal(trial: Trial) -> None:
    """Where the journal lost what it had acknowledged: HELLO's `first` and DATA are the oldest."""
    trial.greet()
    packets = trial.packets(4, 1)
    trial.ack(3)
    for _ in trial.during(UNDER_WAY):
        pass
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


def tried(rule: str, start: Start) -> Result:
    """What one rule's trial of a producer showed."""
    promise = (RULES[rule].__doc__ or "").strip()
    try:
        with Trial(start) as trial:
            RULES[rule](trial)
    except Broken as error:
        return Result(rule, promise, False, str(error))
    except Untried as error:
        return Result(rule, promise, None, str(error))
    return Result(rule, promise, True)
