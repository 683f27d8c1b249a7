"""The state machine alone, against a simulated receiver that loses messages and packets."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from random import Random

import pytest
from client_peer import image, welcome

from stream_ssl.producers import Delivery
from stream_ssl.producers._outbox import Outbox
from stream_ssl.producers._packer import OnDelivery, Packer, Packet
from stream_ssl.producers._protocol import (
    GREETING_SECONDS,
    SILENCE_SECONDS,
    STARVED_SECONDS,
    ProducerProtocol,
)
from stream_ssl.wire import Ack, Bye, Data, Hello, Message, Nack, Sample

SIZE = 200  # at least the size of a packet of the tests


def new_protocol() -> ProducerProtocol:
    return ProducerProtocol(Hello("a", 1, 1), Outbox(Packer(1 << 20, 1), 0.2), reason="")


def put(protocol: ProducerProtocol, number: int, told: OnDelivery | None = None) -> None:
    """Add one sample as a packet of its own."""
    sample = Sample.from_array(image(side=1), str(number), source="a", time=0.0)
    protocol.outbox.offer((sample, 100, number, 0.0, told))
    protocol.outbox.take_in()


def pull(protocol: ProducerProtocol, now: float) -> Hello | tuple[int, Packet] | None:
    """Send and return the next message."""
    message = protocol.outgoing(now)
    if message is not None:
        protocol.on_sent(message, now)
    return message


@dataclass
class Receiver:
    """An honest receiver: durable journal, volatile group, one connection."""

    journal: list[str] = field(default_factory=list)  # ids; the sequence is the index + 1
    group: list[str] = field(default_factory=list)  # taken, not yet durable
    epoch: int = 1
    known: bool = False
    credit: int = 3 * SIZE

    @property
    def expected(self) -> int:
        return len(self.journal) + len(self.group) + 1

    def take(self, message: Hello | Data, damaged: bool) -> Message | None:
        if isinstance(message, Hello):
            assert message.first <= self.expected, "acknowledged packets are gone"
            self.known = True
            return welcome(resume=len(self.journal), credit=self.credit, epoch=self.epoch)
        if not self.known:
            return Nack(message.sequence, "hello-required", "", permanent=False)
        if damaged:
            return Nack(self.expected, "checksum", "", permanent=False)
        if message.sequence > self.expected:
            return Nack(self.expected, "gap", "", permanent=False)
        if message.sequence < self.expected:
            return Ack(len(self.journal), self.credit)
        self.group.append(next(message.samples()).id)
        return None

    def commit(self) -> Ack:
        self.journal += self.group
        self.group = []
        return Ack(len(self.journal), self.credit)

    def restart(self) -> None:
        self.group, self.known = [], False
        self.epoch += 1


class Simulation:
    """A run that sends, breaks and restarts in any order, and then heals: everything must arrive.

    With `drops`, other threads drop the oldest packet at any moment, also while one is on its way
    out: then each sample was dropped, or has arrived.
    """

    def __init__(self, rng: Random, drops: bool) -> None:
        self.rng, self.drops, self.busy = rng, drops, True
        self.flushes: list[tuple[int, int]] = []  # samples put until then, and what is waited for
        self.dropped: list[int] = []
        self.acked: list[int] = []
        self.now = 0.0
        self.protocol = new_protocol()
        self.receiver = Receiver()
        self.count = 0
        self.connected = False
        self.there: deque[Hello | Data] = deque()
        self.back: deque[Message] = deque()

    def step(self) -> None:
        """Do one random event."""
        if self.rng.random() < 0.3:
            self.put(self.rng.randint(1, 4))
        elif self.rng.random() < 0.1:
            self.fault()
        else:
            self.flow()
        self.check()

    def put(self, count: int) -> None:
        for _ in range(count):
            put(self.protocol, self.count, self.tell)
            self.count += 1

    def tell(self, delivery: Delivery) -> None:
        assert delivery.outcome in ("acknowledged", "dropped")
        of = self.acked if delivery.outcome == "acknowledged" else self.dropped
        of.append(int(delivery.id))

    def flow(self) -> None:
        """Deliver some of the messages in both directions."""
        rng = self.rng
        if not self.connected:
            self.connect()
        self.now += rng.choice([0.0, 0.0, 0.3, 1.1])
        self.producer_speaks(rng.randint(0, 9))
        self.receiver_hears(rng.randint(0, 9), damaged=rng.random() < 0.05)
        self.producer_hears(rng.randint(0, 12))

    def fault(self) -> None:
        rng = self.rng
        fault = rng.choice(["cut", "restart", "forget", "silence", "credit"])
        if fault == "forget":
            self.receiver.known = False
        elif fault == "silence":
            self.now += SILENCE_SECONDS + 1
        elif fault != "credit":
            self.disconnect(restarted=fault == "restart")
        self.receiver.credit = rng.choice([0, SIZE, 3 * SIZE])
        if self.receiver.known and self.connected:
            self.back.append(Ack(len(self.receiver.journal), self.receiver.credit))

    def connect(self) -> None:
        self.connected = True
        self.receiver.known = False
        self.protocol.connected(self.now)

    def disconnect(self, restarted: bool) -> None:
        self.connected = False
        self.there.clear()
        self.back.clear()
        self.protocol.disconnected("cut")
        if restarted:
            self.receiver.restart()

    def producer_speaks(self, count: int) -> None:
        for _ in range(count):
            message = self.protocol.outgoing(self.now)
            if isinstance(message, Hello):
                self.there.append(message)
            elif message is not None:
                sequence, packet = message
                window = self.protocol.window
                assert window.outstanding + packet.size <= window.credit
                self.there.append(Data(sequence, packet.data.header, packet.data.payload))
            self.meanwhile()
            if message is not None:
                self.protocol.on_sent(message, self.now)

    def meanwhile(self) -> None:
        """Act as the user's threads do while the socket takes a message."""
        if self.busy and self.rng.random() < 0.1:
            self.put(1)
        if self.busy and self.drops and self.rng.random() < 0.2:
            self.protocol.outbox.drop_oldest()
        if self.busy and self.rng.random() < 0.02:
            self.protocol.outbox.flush_to = self.protocol.outbox.taken
            self.flushes.append((self.count, self.protocol.outbox.taken))

    def receiver_hears(self, count: int, damaged: bool) -> None:
        for turn in range(min(count, len(self.there))):
            answer = self.receiver.take(self.there.popleft(), damaged and turn == 0)
            if answer is not None:
                self.back.append(answer)
        if self.receiver.known and self.connected and count % 2:
            self.back.append(self.receiver.commit())

    def producer_hears(self, count: int) -> None:
        for _ in range(min(count, len(self.back))):
            self.protocol.received(self.back.popleft(), self.now)

    def check(self) -> None:
        """Nothing is lost, nothing is doubled, and the books balance."""
        _, told = self.protocol.outbox.outcomes.take()
        for callback, delivery in told:
            callback(delivery)
        taken = [int(name) for name in self.receiver.journal + self.receiver.group]
        window = self.protocol.window
        packets = list(window._packets)
        held = [packet.data.position for packet in packets]
        assert sorted([*self.acked, *self.dropped, *held]) == list(range(self.count))
        assert taken == sorted(set(taken) - set(self.dropped))
        assert self.acked == taken[: len(self.acked)]
        assert held == sorted(held)
        assert len(self.acked) <= len(self.receiver.journal)
        for count, target in self.flushes:
            assert (self.protocol.outbox.done >= target) == all(number >= count for number in held)
        assert window.size == sum(packet.size for packet in packets)
        assert window.outstanding == sum(packet.size for packet in packets[: window.unacked])

    def heal(self) -> None:
        """Deliver every message from now on."""
        self.busy = False
        self.receiver.credit = 3 * SIZE
        for _ in range(200 + 5 * self.count):
            self.work_spool()
            if not self.connected:
                self.connect()
            self.producer_speaks(6)
            self.receiver_hears(7, damaged=False)
            self.producer_hears(20)
            self.now += 0.1
            self.check()
            if self.protocol.outbox.done == self.protocol.outbox.taken and not self.receiver.group:
                break

    def work_spool(self) -> None:
        """Do what the I/O thread does with the disk: nothing, without a spool."""


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_samples_that_are_not_dropped_arrive_once_and_in_order_after_faults(
    seed: int, drops: bool
) -> None:
    rng = Random(seed)
    for _ in range(50):
        simulation = Simulation(rng, drops)
        for _ in range(80):
            simulation.step()
            if simulation.protocol.fatal is not None:
                assert "damaged 3 times" in str(simulation.protocol.fatal)
                break
        else:
            simulation.heal()
            assert simulation.protocol.fatal is None
            outbox = simulation.protocol.outbox
            assert len(simulation.receiver.journal) == outbox.stats.acked.samples
            dropped = outbox.stats.dropped.samples
            assert outbox.stats.acked.samples == simulation.count - dropped
            assert outbox.done == outbox.taken
            assert (dropped > 0) == drops


@pytest.fixture
def active() -> ProducerProtocol:
    protocol = new_protocol()
    protocol.connected(0.0)
    assert isinstance(pull(protocol, 0.0), Hello)
    protocol.received(welcome(), 0.0)
    return protocol


def test_silence_with_unacknowledged_packets_causes_a_new_hello(active: ProducerProtocol) -> None:
    put(active, 0)
    assert isinstance(pull(active, 100.0), tuple)
    assert pull(active, 100.0 + SILENCE_SECONDS) is None
    assert pull(active, 100.1 + SILENCE_SECONDS) == Hello("a", 1, 1)


def test_silence_of_an_idle_producer_causes_no_new_hello(active: ProducerProtocol) -> None:
    assert pull(active, 1e6) is None
    put(active, 0)
    assert isinstance(pull(active, 1e6 + 3), tuple)
    assert pull(active, 1e6 + 4) is None


def test_a_producer_without_credit_says_hello_only_after_a_long_wait(
    active: ProducerProtocol,
) -> None:
    active.received(Ack(0, 0), 0.0)
    put(active, 0)
    assert pull(active, STARVED_SECONDS) is None
    assert isinstance(pull(active, STARVED_SECONDS + 1), Hello)


def test_hello_repeats_each_second_until_the_greeting_times_out() -> None:
    protocol = new_protocol()
    protocol.connected(0.0)
    said = [isinstance(pull(protocol, tenth / 10), Hello) for tenth in range(30)]
    assert [tenth for tenth, hello in enumerate(said) if hello] == [0, 10, 20]
    assert not protocol.greeting_timed_out(GREETING_SECONDS)
    assert protocol.greeting_timed_out(GREETING_SECONDS + 0.1)


def test_a_partial_packet_waits_while_others_wait_for_credit(active: ProducerProtocol) -> None:
    active.outbox.packer.packet_samples = 10  # so that one sample does not fill it
    sample = Sample.from_array(image(), "x")
    active.received(Ack(0, 0), 0.0)
    active.outbox.enqueue(_packet(sample))
    assert not list(active.outbox.packer.add([(sample, 100, None, 0.0, None)]))
    assert pull(active, 1.0) is None
    assert len(active.outbox.packer) == 1
    active.received(Ack(0, 1 << 20), 1.0)
    assert isinstance(pull(active, 1.0), tuple)
    assert isinstance(pull(active, 1.0), tuple)
    assert len(active.outbox.packer) == 0


def test_a_new_receiver_replaces_the_packet_limits_of_the_old_one(active: ProducerProtocol) -> None:
    active.disconnected("cut")
    active.connected(1.0)
    active.received(welcome(max_packet=1000, max_samples=2, epoch=2), 1.0)
    assert (active.outbox.packer.packet_bytes, active.outbox.packer.packet_samples) == (1000, 1)
    active.disconnected("cut")
    active.connected(2.0)
    active.received(welcome(max_packet=1 << 24, max_samples=1024, epoch=3), 2.0)
    assert active.outbox.packer.packet_bytes == 1 << 20


def _packet(sample: Sample) -> Packet:
    data = Data.pack(0, [sample])
    return Packet(data, 1, data.size, (None,), ())


def test_the_producer_reports_a_receivers_words_as_printable_and_bounded_text() -> None:
    words = "\x1b]0;owned\x07\n" + "x" * 5000
    for message in (Nack(0, "odd\x1b[2J", words, permanent=True), Bye(words)):
        protocol = new_protocol()
        protocol.received(message, 1.0)
        assert protocol.reason.isprintable()
        assert "?]0;owned" in protocol.reason
        assert len(protocol.reason) < 1300
