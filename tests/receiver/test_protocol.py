"""The protocol without a socket: above all, a packet is acknowledged once it is durable."""

import math
import os
import tempfile
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from receiver_peer import MIB, packet

from stream_ssl.journal.errors import JournalError
from stream_ssl.journal.journal import Journal
from stream_ssl.journal.reader import JournalReader
from stream_ssl.receiver import credit
from stream_ssl.receiver import protocol as protocol_module
from stream_ssl.receiver.credit import CreditPolicy
from stream_ssl.receiver.group_commit import GroupCommit
from stream_ssl.receiver.protocol import ReceiverProtocol
from stream_ssl.receiver.sessions import Sessions
from stream_ssl.wire import Ack, Bye, Data, Hello, Nack, Sample, Welcome, encode

ROUTE, OTHER = b"connection", b"another connection"


class WatchedJournal(Journal):
    """Notes each append among the messages sent; fails with `error` while it has one."""

    def __init__(self, path, events):
        super().__init__(path)
        self.events = events
        self.error = None

    def append(self, entries):
        self.events.append("append")
        if self.error is not None:
            raise self.error
        commit = super().append(entries)
        self.events.append("durable")
        return commit


class Protocol(ReceiverProtocol):
    """A receiver's protocol with one connected producer, whose events are in order in `events`."""

    def __init__(self, path, access=None):
        self.events, self.credits = [], []
        journal = WatchedJournal(path, self.events)
        group = GroupCommit(journal, max_packets=3, max_bytes=MIB, seconds=10.0)
        policy = CreditPolicy(each=MIB, total=MIB, max_packet=MIB // 16)
        super().__init__(group, policy, access, Sessions(4), 16, 4, self.note)
        self.gone = set()  # routes of connections that have ended
        self.say(Hello("robot", epoch=2, first=1))
        self.events.clear()

    def note(self, route, message):
        if route in self.gone:
            return None
        if isinstance(message, Ack):
            self.events.append(f"ACK {message.through}")
        elif isinstance(message, Nack):
            self.events.append(f"NACK {message.sequence} {message.reason}")
        elif isinstance(message, Welcome):
            self.events.append(f"WELCOME {message.resume}")
            self.credits.append(message.credit)
        return True

    def say(self, message, now=100.0, route=ROUTE):
        self.handle(route, None, [memoryview(frame) for frame in encode(message)], now)


@pytest.fixture
def protocol(tmp_path):
    protocol = Protocol(tmp_path)
    with closing(protocol.journal):
        yield protocol


def test_the_receiver_answers_packets_once_they_are_durable(protocol):
    protocol.say(packet(1))
    protocol.say(Data(2, b"no msgpack", b""))
    protocol.say(packet(3))
    assert protocol.events == []
    assert protocol.commit(100.0)
    assert protocol.events == ["append", "durable", "NACK 2 malformed", "ACK 3"]
    assert protocol.journal.state("robot").sequence == 3
    assert protocol.counters.acked_samples == 4


def test_the_counters_name_the_last_refused_peer_of_each_reason(protocol):
    for route, peer in ((ROUTE, "10.0.0.7"), (OTHER, "10.0.0.8")):
        protocol.handle(route, None, [memoryview(b"nothing of ours")], 100.0, peer)
        (reason,) = protocol.counters.refused_last
        known = {"10.0.0.7": "robot at 10.0.0.7"}.get(peer, peer)
        assert protocol.counters.refused_last[reason] == known
    assert protocol.counters.refused == {reason: 2}


def test_the_receiver_retries_a_failed_journal_later_and_acknowledges_nothing_before(protocol):
    protocol.say(packet(1))
    protocol.journal.error = JournalError("disk on fire")
    assert not protocol.commit(100.0)
    assert not protocol.commit(100.2)  # too early for another attempt
    assert protocol.events == ["append"]
    assert (protocol.group.ready, protocol.group.journal_full) == (False, False)

    protocol.journal.error = None
    assert protocol.commit(100.3)
    assert protocol.events[1:] == ["append", "durable", "ACK 1"]
    assert protocol.group.ready


def test_the_receiver_drops_a_batch_out_of_order_and_requires_a_hello(protocol):
    protocol.say(packet(1))
    protocol.journal.error = ValueError("sequences only grow")
    assert protocol.commit(100.0)
    protocol.journal.error = None
    protocol.say(packet(2))
    assert protocol.events == ["append", "NACK 2 hello-required"]
    assert not protocol.group.batch


def test_a_batch_is_due_when_it_is_full_or_its_first_packet_has_waited(protocol):
    group = protocol.group
    assert group.due_at() == float("inf")
    assert not group.is_due(1e9)
    protocol.say(packet(1))
    began = group.batch.began
    assert group.due_at() == began + 10.0
    assert not group.is_due(began + 9.9)
    assert group.is_due(began + 10.0)
    assert group.is_due(began, wait=False)
    for sequence in (2, 3):
        assert not group.is_due(began)
        protocol.say(packet(sequence))
    assert group.is_due(began)


def test_a_duplicate_is_acknowledged_at_the_next_flush(protocol):
    protocol.say(packet(1))
    protocol.commit(100.0)
    protocol.events.clear()
    protocol.say(packet(1))
    assert protocol.events == []
    protocol.answers.flush(100.0)
    protocol.answers.flush(100.0)
    assert protocol.events == ["ACK 1"]
    assert protocol.counters.duplicates == 2


def test_a_gap_is_reported_once_a_second_and_again_after_progress(protocol):
    for sequence, now in ((3, 100.0), (4, 100.9), (5, 101.1), (1, 101.2), (4, 101.3)):
        protocol.say(packet(sequence), now)
    assert protocol.events == ["NACK 1 gap", "NACK 1 gap", "NACK 2 gap"]


def test_a_packet_that_takes_long_to_decode_waits_for_the_learner(protocol):
    """The receiver accepts cheap packets meanwhile, and requests this one after the read."""
    header = b"RIFF0000WEBPVP8L0000\x2f" + (1023 << 14 | 1023).to_bytes(4, "little") + bytes(9)
    bomb = [Data.pack(n, [Sample("a", header, "webp", time=1.0)]) for n in range(6)]
    protocol.credit.room, protocol.credit.unread.most = MIB, 65_536
    protocol.credit.grant(100.0)
    protocol.say(bomb[1])
    protocol.say(packet(2))
    protocol.say(bomb[3], 100.1)
    protocol.commit(100.1)
    extra = 65_536 - len(header)
    assert protocol.credit.unread.waiting == 2 * extra
    assert protocol.credit.room < MIB - 2 * extra
    protocol.events.clear()
    for now in (100.2, 100.3):
        protocol.say(bomb[4], now)
    assert protocol.events == ["NACK 4 gap"]
    protocol.say(bomb[4], 100.4)
    protocol.credit.grant(101.3)
    assert [event for event in protocol.events if "NACK" in event] == ["NACK 4 gap"]

    protocol.credit.unread.read(protocol.journal.last + 1)
    assert protocol.credit.unread.waiting == 0
    protocol.credit.room = MIB
    protocol.credit.grant(101.4)
    assert [event for event in protocol.events if "NACK" in event] == ["NACK 4 gap"] * 2
    protocol.say(bomb[4], 101.5)
    protocol.commit(101.5)
    protocol.credit.grant(103.0)
    assert protocol.journal.state("robot").sequence == 4
    assert [event for event in protocol.events if "NACK" in event] == ["NACK 4 gap"] * 2


def test_a_packet_that_takes_long_to_decode_is_accepted_only_on_credit(protocol):
    """A producer that ignores its credit leaves the room to others."""
    header = b"RIFF0000WEBPVP8L0000\x2f" + (1023 << 14 | 1023).to_bytes(4, "little") + bytes(9)
    bomb = [Data.pack(n, [Sample("a", header, "webp", time=1.0)]) for n in range(3)]
    protocol.credit.room, protocol.credit.unread.most = MIB, MIB
    protocol.credit.grant(100.0)
    protocol.credit.room = 0
    protocol.credit.grant(101.0)
    protocol.events.clear()
    protocol.say(bomb[1], 101.2)  # may have been on its way
    protocol.say(bomb[2], 101.3)
    assert protocol.events == ["NACK 2 gap"]
    assert len(protocol.group.batch) == 1


def test_an_older_epoch_is_superseded_only_while_the_newer_one_is_connected(protocol):
    protocol.say(Hello("robot", epoch=1, first=1), route=OTHER)
    assert protocol.events == ["ACK 0", "NACK 0 superseded"]
    protocol.gone.add(ROUTE)
    protocol.say(Hello("robot", epoch=1, first=1), route=OTHER)
    assert protocol.events[2:] == ["WELCOME 0"]


def test_a_producer_that_reconnects_is_welcome_at_once(protocol):
    """Its earlier connection has the same epoch, and may still count as connected."""
    protocol.say(Hello("robot", epoch=2, first=1), route=OTHER)
    protocol.say(packet(1), route=OTHER)
    assert protocol.commit(100.0)
    assert protocol.events == ["WELCOME 0", "append", "durable", "ACK 1"]


@pytest.mark.parametrize("order", [("first", "second"), ("second", "first")])
def test_only_one_of_two_producers_gets_a_name_that_both_request(protocol, order):
    """Both have asked by epoch 0 before either says HELLO with its own epoch."""
    routes, own = {"first": b"a", "second": b"b"}, {"first": 7, "second": 8}
    for route in routes.values():
        protocol.say(Hello("camera", 0, first=1), route=route)
    assert protocol.events == ["WELCOME 0", "ACK 0", "NACK 0 superseded"]
    protocol.events.clear()
    for name in order:
        if name == "first":  # the other one has no WELCOME, and asks again
            protocol.say(Hello("camera", own[name], first=1), route=routes[name])
        else:
            protocol.say(Hello("camera", 0, first=1), route=routes[name])
    assert sorted(protocol.events) == ["ACK 0", "NACK 0 superseded", "WELCOME 0"]
    assert protocol.sessions.by_producer("camera").route == routes["first"]


def test_a_producer_may_send_as_soon_as_it_is_welcome(protocol):
    protocol.credit.room = MIB
    protocol.say(Hello("other", epoch=1, first=1), route=OTHER)
    assert protocol.credits[-1] >= MIB // 16  # the largest packet


@pytest.mark.parametrize("clock", [math.inf, 0.0])
def test_a_hello_with_an_invalid_clock_sets_no_producer_clock(protocol, clock):
    protocol.say(Hello("other", epoch=1, first=1, clock=clock), route=OTHER)
    assert "other" not in protocol.counters.producer_clock
    assert "other" in protocol.counters.producer_finished


@pytest.mark.parametrize(("key", "counted"), [("*", "fleet/left"), ("fleet", "fleet")])
def test_a_producer_counts_under_its_key_or_under_its_own_name_if_the_key_is_for_all(
    tmp_path, key, counted
):
    """Names below that of a key count as one producer, but a key for all names has no name."""
    access = SimpleNamespace(
        knows=lambda user: True,
        permits=lambda user, name: True,
        allow=SimpleNamespace(name_of=lambda user: key),
    )
    protocol = Protocol(tmp_path, access)
    with closing(protocol.journal):
        protocol.say(Hello("fleet/left", epoch=1, first=1), route=OTHER)
        assert counted in protocol.counters.producer_finished
        assert "*" not in protocol.counters.producer_finished


def test_a_new_hello_sets_whether_silence_is_a_fault(protocol):
    protocol.say(Hello("camera", 7, first=1, sporadic=True))
    assert protocol.counters.producer_sporadic["camera"] == 1.0
    protocol.say(Hello("camera", 8, first=1), route=OTHER)
    protocol.say(Hello("camera", 8, first=1), now=200.0, route=OTHER)
    assert protocol.counters.producer_sporadic["camera"] == 0.0


def test_a_connection_counts_once_although_the_producer_first_asks_for_its_name(protocol, caplog):
    """A producer asks with epoch 0 if its name is free, and again if the answer is late."""
    caplog.set_level("INFO")
    for epoch in (0, 0, 7, 7):
        protocol.say(Hello("camera", epoch, first=1), route=OTHER)
    record = protocol.sessions.by_producer("camera").record
    connected = record.connected
    assert record.hellos == 1
    assert [r.getMessage() for r in caplog.records] == ["producer camera () is new"]
    protocol.say(Bye(), route=OTHER)
    assert protocol.counters.producer_finished["camera"] == 1.0
    for epoch in (0, 8):
        protocol.say(Hello("camera", epoch, first=1), now=101.0, route=b"a third")
    assert record.hellos == 2
    assert protocol.counters.producer_finished["camera"] == 0.0
    protocol.say(Bye(Bye.ENDED), now=101.0, route=b"a third")
    assert protocol.counters.producer_finished["camera"] == 2.0
    assert record.connected > connected


def test_a_hello_waits_for_the_group_commit_and_causes_no_commit_of_its_own(protocol):
    """A producer that says HELLO after each packet must not make an fsync of each."""
    for sequence in (1, 2):
        protocol.say(packet(sequence))
        protocol.say(Hello("robot", epoch=2, first=1))
        protocol.say(Hello("robot", epoch=2, first=1))
    assert protocol.events == []
    protocol.commit(100.0)
    assert protocol.events == ["append", "durable", "ACK 2", "WELCOME 2"]


def test_a_hello_is_answered_although_the_journal_fails(protocol):
    protocol.say(packet(1))
    protocol.journal.error = JournalError("disk on fire")
    protocol.say(Hello("robot", epoch=2, first=1))
    protocol.commit(100.0)
    assert protocol.events == ["append", "WELCOME 0"]


def test_a_restarted_producer_is_answered_once_its_earlier_packets_are_durable(protocol):
    """Otherwise, it would reuse their sequences, and take their ACK for its own."""
    protocol.say(packet(1))
    protocol.say(packet(2))
    protocol.journal.error = JournalError("disk on fire")
    for now in (100.0, 101.0):
        protocol.say(Hello("robot", epoch=3, first=1), route=OTHER)
        assert not protocol.commit(now)
    assert protocol.events == ["append", "append"]
    protocol.journal.error = None
    assert protocol.commit(102.0)
    told = ["append", "durable", "ACK 2", "NACK 0 superseded", "WELCOME 2"]
    assert protocol.events[2:] == told
    protocol.say(packet(3), route=OTHER)
    assert protocol.commit(103.0)
    assert protocol.journal.state("robot").sequence == 3


def test_a_packet_of_a_superseded_producer_that_waited_for_room_is_refused(protocol):
    """The commit that makes room answers the HELLO of the newer incarnation."""
    sequence = 1
    session = protocol.sessions.by_producer("robot")
    while not protocol.exceeds_memory(session, large := packet(sequence, 1, side=240)):
        protocol.say(large)
        sequence += 1
    protocol.say(Hello("robot", epoch=3, first=1), route=OTHER)
    protocol.say(large)
    last = sequence - 1
    assert protocol.events == [
        *("append", "durable", f"ACK {last}", "NACK 0 superseded", f"WELCOME {last}"),
        f"NACK {sequence} hello-required",
    ]
    assert not protocol.group.batch
    protocol.say(packet(sequence), route=OTHER)
    assert protocol.commit(200.0)
    assert protocol.events[-1] == f"ACK {sequence}"


def test_the_receiver_bounds_the_empty_packets_that_wait_for_the_journal(protocol, monkeypatch):
    monkeypatch.setattr(protocol_module, "MAX_WAITING", 100)
    protocol.journal.error = JournalError("disk on fire")
    for sequence in range(1, 200):
        protocol.say(Data(sequence, b"?", b""))
    assert len(protocol.group.batch) == 100
    assert protocol.events == ["append", "NACK 101 gap"]
    protocol.journal.error = None
    assert protocol.commit(200.0)
    assert protocol.journal.state("robot").sequence == 100


def test_the_receiver_notes_all_idle_producers_in_one_pass(protocol, monkeypatch):
    """A thousand silent producers must not keep the receiver from the active ones."""
    asked = []
    for n in range(3):
        protocol.say(Hello(f"robot/{n}", epoch=1, first=1), route=b"%d" % n)
    protocol.credit.room = MIB
    protocol.credit.grant(100.0)
    monkeypatch.setattr(credit, "least_served", lambda holders: asked.append(holders) or 0)
    protocol.credit.grant(200.0)
    assert len(asked) == 1


def test_a_producer_that_sends_a_little_all_the_time_delays_no_other(protocol):
    """The learner makes room for 1 MB/s; two producers would fill it, and a third sends 20 kB/s."""
    sides = {"small": 25, "large": 100, "larger": 150}
    sent = dict.fromkeys(sides, 0)
    for name in sides:
        protocol.say(Hello(name, epoch=1, first=1), route=name.encode())
    protocol.credit.scarce, protocol.credit.room, now = True, 0, 100.0
    for step in range(400):  # 20 seconds
        now += 0.05
        protocol.credit.room = min(protocol.credit.room + 50_000, 300_000)
        protocol.credit.grant(now)
        for name, side in sides.items():
            session = protocol.sessions.by_producer(name)
            budget = min(session.credit, protocol.credit.room)
            if name == "small":  # two packets a step, and what waited
                budget = min(budget, (2 * (step + 1) - sent[name]) * side * side)
            while session.credit and budget >= side * side:
                sent[name] += 1
                protocol.say(packet(sent[name], 1, side), now, name.encode())
                budget, protocol.credit.room = (
                    budget - side * side,
                    protocol.credit.room - side * side,
                )
        protocol.commit(now)
        if step == 0:
            first = dict(sent)
    took = {name: (sent[name] - first[name]) * side * side for name, side in sides.items()}
    assert took["small"] > 0.95 * 400 * 2 * 25 * 25
    # Without the third producer, they take 9.98 MB by grants of this size.
    assert took["large"] + took["larger"] > 0.9 * 9_980_000
    assert min(took["large"], took["larger"]) > 0.7 * max(took["large"], took["larger"])


IN_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
PRODUCERS = st.sampled_from(["left", "right"])


def refused(producer, sequence):
    """Return whether the packet of this sequence is one that no receiver accepts."""
    return (sequence + len(producer)) % 5 == 0


class Delivery(RuleBasedStateMachine):
    """Producers send packets again and out of order, on connections that come and go.

    The disk of the receiver fails, and the receiver is killed. Each answer must be true.
    """

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(dir=IN_MEMORY)
        self.acked = {"left": 0, "right": 0}
        self.next = {"left": 1, "right": 1}
        self.sent = {"left": 0, "right": 0}  # by the current incarnation
        self.greeted = {}  # epoch of the last HELLO by route
        self.welcome = {}  # routes by producer
        self.welcomed = {}  # epochs by producer
        self.epoch = 0
        self.start()

    def start(self):
        self.journal = WatchedJournal(self.folder.name, [])
        group = GroupCommit(self.journal, max_packets=4, max_bytes=MIB, seconds=10.0)
        policy = CreditPolicy(each=MIB, total=MIB, max_packet=MIB // 16)
        self.protocol = ReceiverProtocol(group, policy, None, Sessions(3), 16, 4, self.note)
        self.now = 100.0

    def note(self, route, message):
        """Check that each answer to a producer is already true on the disk."""
        producer = route.decode().partition("/")[0]
        if isinstance(message, Ack | Welcome):
            told = message.through if isinstance(message, Ack) else message.resume
            assert told <= self.journal.state(producer).sequence
            self.acked[producer] = max(self.acked[producer], told)
        if isinstance(message, Welcome):
            if self.welcomed.get(producer) != self.greeted[route]:
                self.welcomed[producer], self.sent[producer] = self.greeted[route], told
            self.welcome[producer] = route
            self.next[producer] = told + 1
        elif isinstance(message, Ack) and self.welcome.get(producer) == route:
            assert told <= self.sent[producer], "an ACK of another incarnation's packets"
        elif isinstance(message, Nack):
            if message.reason == "malformed":
                assert refused(producer, message.sequence)
                assert message.sequence <= self.journal.state(producer).sequence
            elif message.reason == "gap":
                self.next[producer] = message.sequence
            elif self.welcome.get(producer) == route:
                del self.welcome[producer]
        return True

    def say(self, route, message):
        self.now += 0.3
        self.protocol.handle(route, None, [memoryview(f) for f in encode(message)], self.now)

    @rule(producer=PRODUCERS, connection=st.integers(0, 1), newer=st.booleans())
    def hello(self, producer, connection, newer):
        self.epoch += newer
        route = f"{producer}/{connection}".encode()
        self.greeted[route] = self.epoch
        self.say(route, Hello(producer, epoch=self.epoch, first=1))

    @rule(
        producer=PRODUCERS,
        count=st.integers(1, 6),
        offset=st.sampled_from([0, 0, 0, -1, -3, 1, 2]),
        order=st.sampled_from([1, 1, 1, -1]),
        commit=st.booleans(),
    )
    def send(self, producer, count, offset, order, commit):
        if producer not in self.welcome:
            self.hello(producer, 0, True)
        route = self.welcome.get(producer, f"{producer}/0".encode())
        start = max(1, self.next[producer] + offset)
        for sequence in range(start, start + count)[::order]:
            data = Data(sequence, b"?", b"") if refused(producer, sequence) else packet(sequence)
            self.sent[producer] = max(self.sent[producer], sequence)
            self.say(route, data)
        self.next[producer] = max(self.next[producer], start + count)
        if commit:
            self.commit(None)

    @rule(producer=PRODUCERS)
    def bye(self, producer):
        self.say(self.welcome.pop(producer, b"left/0"), Bye())

    @rule(error=st.sampled_from([None, None, JournalError("disk on fire")]))
    def commit(self, error):
        self.now += 1.0
        self.journal.error = error
        self.protocol.answers.flush(self.now)
        self.protocol.commit(self.now)

    @rule(producer=PRODUCERS, connection=st.integers(0, 1))
    def restart_while_the_disk_fails(self, producer, connection):
        self.send(producer, 2, 0, 1, False)
        self.hello(producer, connection, True)
        self.commit(JournalError("disk on fire"))

    @rule()
    def kill(self):
        self.journal.close()  # packets that were not appended are gone
        self.start()

    @invariant()
    def acknowledged_packets_are_stored_once(self):
        held = {"left": [], "right": []}
        with closing(JournalReader(self.folder.name)) as reader:
            position = 1
            while records := reader.read(position):
                position = records[-1].position + 1
                for record in records:
                    held[record.producer].append(record.sequence)
                    assert (record.header, record.payload) == (
                        packet(record.sequence).header,
                        packet(record.sequence).payload,
                    )
        for producer, sequences in held.items():
            due = range(1, self.journal.state(producer).sequence + 1)
            assert sequences == [number for number in due if not refused(producer, number)]
            assert self.acked[producer] <= len(due)

    def teardown(self):
        self.journal.close()
        self.folder.cleanup()


TestDelivery = Delivery.TestCase
TestDelivery.settings = settings(
    max_examples=int(os.environ.get("CHAOS_EXAMPLES", "60")),
    stateful_step_count=25,
    derandomize=True,
)
