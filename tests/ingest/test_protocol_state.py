"""The protocol without a socket: above all, a packet is acknowledged once it is durable."""

from contextlib import closing

import pytest
from receiver_peer import MIB, packet

from stream_ssl.ingest.credit import CreditPolicy
from stream_ssl.ingest.group_commit import GroupCommit
from stream_ssl.ingest.journal import Journal, JournalError
from stream_ssl.ingest.protocol_state import ProtocolState, Sessions
from stream_ssl.wire import Ack, Data, Hello, Nack, Welcome, encode

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


class Protocol(ProtocolState):
    """A protocol state with one connected producer, whose events are in order in `events`."""

    def __init__(self, path):
        self.events = []
        journal = WatchedJournal(path, self.events)
        group = GroupCommit(journal, max_packets=3, max_bytes=MIB, seconds=10.0)
        policy = CreditPolicy(each=MIB, total=MIB, max_packet=MIB // 16)
        super().__init__(group, policy, None, Sessions(4), 16, 4, self.note)
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
        return True

    def say(self, message, now=100.0, route=ROUTE):
        self.handle(route, None, [memoryview(frame) for frame in encode(message)], now)


@pytest.fixture
def protocol(tmp_path):
    protocol = Protocol(tmp_path)
    with closing(protocol.journal):
        yield protocol


def test_packets_and_refusals_are_told_of_once_they_are_durable(protocol):
    protocol.say(packet(1))
    protocol.say(Data(2, b"no msgpack", b""))
    protocol.say(packet(3))
    assert protocol.events == []
    assert protocol.commit(100.0)
    assert protocol.events == ["append", "durable", "NACK 2 malformed", "ACK 3"]
    assert protocol.journal.state("robot").sequence == 3
    assert protocol.counters.acked_samples == 4


def test_a_journal_that_fails_is_tried_again_later_and_nothing_is_acknowledged(protocol):
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


def test_a_batch_that_is_out_of_order_is_dropped_and_its_producer_says_hello(protocol):
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
    protocol.flush(100.0)
    protocol.flush(100.0)
    assert protocol.events == ["ACK 1"]
    assert protocol.counters.duplicates == 2


def test_a_gap_is_told_of_once_a_second_and_again_after_progress(protocol):
    for sequence, now in ((3, 100.0), (4, 100.9), (5, 101.1), (1, 101.2), (4, 101.3)):
        protocol.say(packet(sequence), now)
    assert protocol.events == ["NACK 1 gap", "NACK 1 gap", "NACK 2 gap"]


def test_an_older_epoch_is_superseded_only_while_the_newer_one_is_connected(protocol):
    protocol.say(Hello("robot", epoch=1, first=1), route=OTHER)
    assert protocol.events == ["ACK 0", "NACK 0 superseded"]
    protocol.gone.add(ROUTE)
    protocol.say(Hello("robot", epoch=1, first=1), route=OTHER)
    assert protocol.events[2:] == ["WELCOME 0"]


def test_a_hello_waits_for_the_group_commit_and_costs_none_of_its_own(protocol):
    """A producer that says HELLO after each packet must not make an fsync of each."""
    for sequence in (1, 2):
        protocol.say(packet(sequence))
        protocol.say(Hello("robot", epoch=2, first=1))
        protocol.say(Hello("robot", epoch=2, first=1))
    assert protocol.events == []
    protocol.commit(100.0)
    assert protocol.events == ["append", "durable", "ACK 2", "WELCOME 2"]


def test_a_hello_is_answered_though_the_journal_fails(protocol):
    protocol.say(packet(1))
    protocol.journal.error = JournalError("disk on fire")
    protocol.say(Hello("robot", epoch=2, first=1))
    protocol.commit(100.0)
    assert protocol.events == ["append", "WELCOME 0"]
