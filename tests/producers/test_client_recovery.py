"""The recovery of a producer that has lost a connection, a receiver or a packet."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from typing import Any

import pytest
import zmq
from client_peer import MANY, Peer, arrived, background, image, welcome
from waiting import until

from stream_ssl.producers import (
    DamagedError,
    DeadlineError,
    Producer,
    RefusedError,
    SupersededError,
    UnauthorisedError,
    VersionRefusedError,
)
from stream_ssl.producers._connection import Connection
from stream_ssl.wire import Ack, Bye, Data, Hello, Message, Nack, Welcome, encode
from stream_ssl.wire.messages import Frame


@pytest.fixture
def producer(peer: Peer) -> Iterator[Producer]:
    """A connected producer that sends one sample a packet."""
    producer = Producer(peer.address, name="a", packet_samples=1)
    peer.welcome()
    producer.connect()
    yield producer
    peer.close()
    with pytest.MonkeyPatch.context() as patch:  # the test leaves packets unacknowledged
        patch.setattr(producer, "flush", lambda timeout: None)
        producer.close()


def send(producer: Producer, *names: str) -> None:
    for name in names:
        producer.send(image(), id=name)


def arrive(peer: Peer, count: int) -> list[tuple[int, str]]:
    """Return the sequence and the id of each of the next packets."""
    packets = [peer.expect(Data) for _ in range(count)]
    return [(data.sequence, next(data.samples()).id) for data in packets]


def test_a_restarted_receiver_gets_again_the_packets_that_it_lacks(
    peer: Peer, producer: Producer
) -> None:
    send(producer, "1", "2", "3", "4", "5")
    arrive(peer, 5)
    peer.say(Ack(1, MANY))
    until(lambda: producer.stats.acked.samples == 1)
    peer.restart()
    assert peer.welcome(resume=3, epoch=2).first == 2
    assert arrive(peer, 2) == [(4, "4"), (5, "5")]
    peer.say(Ack(5, MANY))
    producer.flush()
    stats = producer.stats
    assert (stats.acked.samples, stats.sent.samples, stats.resent.samples) == (5, 5, 2)
    assert stats.reconnects == 1


def test_the_producer_waits_for_a_receiver_that_is_away(peer: Peer, producer: Producer) -> None:
    peer.drop()
    send(producer, "1", "2")
    with pytest.raises(DeadlineError, match=r"2 of 2 samples are not acknowledged"):
        producer.flush(timeout=0.2)
    peer.open()
    peer.welcome(epoch=2)
    assert arrive(peer, 2) == [(1, "1"), (2, "2")]
    peer.say(Ack(2, MANY))
    producer.flush()


def test_the_producer_continues_although_the_journal_lost_acknowledged_packets(
    peer: Peer, producer: Producer
) -> None:
    send(producer, "1", "2", "3")
    arrive(peer, 3)
    peer.say(Ack(2, MANY))
    until(lambda: producer.stats.acked.samples == 2)
    peer.restart()
    assert peer.welcome(resume=0, epoch=2).first == 3
    assert arrive(peer, 1) == [(3, "3")]
    peer.say(Ack(3, MANY))
    producer.flush()


@pytest.mark.parametrize("lacking", [zmq.DEALER, zmq.PAIR])  # a PAIR is the monitor's socket
def test_a_lack_of_file_descriptors_does_not_end_a_producer(
    lacking: int, peer: Peer, producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = zmq.Context.socket

    def socket(context: zmq.Context[Any], kind: int) -> zmq.Socket[Any]:
        if kind == lacking:
            raise zmq.ZMQError(errno.EMFILE)
        return make(context, kind)

    monkeypatch.setattr(zmq.Context, "socket", socket)
    peer.restart()
    until(lambda: "no socket can be opened (Too many open files)" in producer.stats.last_error)
    monkeypatch.undo()
    peer.welcome()
    producer.connect()
    send(producer, "1")
    arrive(peer, 1)
    peer.say(Ack(1, MANY))
    producer.flush()


def test_repeated_answers_about_one_gap_rewind_the_producer_once(
    peer: Peer, producer: Producer
) -> None:
    send(producer, "1", "2", "3", "4")
    arrive(peer, 4)
    for _ in range(2):  # packets 3 and 4 each find 2 missing
        peer.say(Nack(2, "gap", "expected 2", permanent=False))
    assert arrive(peer, 3) == [(2, "2"), (3, "3"), (4, "4")]
    peer.say(Ack(4, MANY))
    producer.flush()
    assert producer.stats.resent.samples == 3


def test_a_gap_before_the_oldest_held_packet_causes_a_new_hello(
    peer: Peer, producer: Producer
) -> None:
    send(producer, "1", "2", "3")
    arrive(peer, 3)
    peer.say(Ack(2, MANY))
    peer.say(Nack(1, "gap", "expected 1", permanent=False))
    assert peer.welcome(resume=0).first == 3
    assert arrive(peer, 1) == [(3, "3")]


def test_the_producer_says_hello_when_the_receiver_requires_hello(
    peer: Peer, producer: Producer
) -> None:
    send(producer, "1", "2")
    arrive(peer, 2)
    for sequence in (1, 2):
        peer.say(Nack(sequence, "hello-required", "who are you?", permanent=False))
    assert peer.welcome(resume=1).first == 1
    assert arrive(peer, 1) == [(2, "2")]


def test_a_receivers_bye_stops_data_until_the_next_welcome(peer: Peer, producer: Producer) -> None:
    peer.say(Bye("draining"))
    until(lambda: "BYE: draining" in producer._protocol.why())
    send(producer, "1")
    assert peer.quiet()
    peer.welcome()
    assert arrive(peer, 1) == [(1, "1")]


def test_a_second_welcome_acknowledges_packets_and_resends_none(
    peer: Peer, producer: Producer
) -> None:
    send(producer, "1", "2", "3")
    arrive(peer, 3)
    peer.say(welcome(resume=1))
    until(lambda: producer.stats.acked.samples == 1)
    assert peer.quiet()
    assert producer.stats.resent.samples == 0


def test_the_producer_sends_no_packet_without_credit(peer: Peer) -> None:
    with Producer(peer.address, name="a", packet_samples=1) as producer:
        peer.welcome(credit=0)
        producer.connect()
        send(producer, "1", "2", "3")
        with pytest.raises(DeadlineError, match="no credit"):
            producer.flush(0.1)
        assert peer.quiet()
        size = producer.stats.buffered.bytes // 3
        peer.say(Ack(0, 2 * size))
        assert arrive(peer, 2) == [(1, "1"), (2, "2")]
        assert peer.quiet()
        peer.say(Ack(1, 2 * size))
        assert arrive(peer, 1) == [(3, "3")]
        peer.say(Ack(3, 2 * size))
        producer.flush()
        assert producer.stats.credit == 2 * size


def test_a_rejected_packet_is_reported_once_and_not_sent_again(peer: Peer) -> None:
    rejected = []
    with Producer(
        peer.address, name="a", packet_samples=1, on_rejected=rejected.append
    ) as producer:
        peer.welcome()
        send(producer, "1", "2", "3")
        arrive(peer, 3)
        peer.say(Nack(2, "malformed", "no such shape", permanent=True))
        peer.say(Nack(2, "malformed", "no such shape", permanent=True))
        peer.say(Ack(3, MANY))
        producer.flush()
        stats = producer.stats
    assert [(r.reason, r.detail, r.ids) for r in rejected] == [
        ("malformed", "no such shape", ("2",))
    ]
    assert (stats.acked.samples, stats.rejected.samples) == (2, 1)


def test_a_flush_ends_when_the_last_packet_is_rejected(peer: Peer, producer: Producer) -> None:
    send(producer, "1")
    arrive(peer, 1)
    peer.say(Nack(1, "codec", "not webp", permanent=True))
    producer.flush()
    send(producer, "2")
    assert arrive(peer, 1) == [(2, "2")]


def test_on_rejected_cannot_flush_and_may_raise_an_error(peer: Peer) -> None:
    seen = []

    def complain(rejection: object) -> None:
        try:
            producer.flush()
        except Exception as error:
            seen.append(str(error))
            raise

    producer = Producer(peer.address, name="a", packet_samples=1, on_rejected=complain)
    with producer:
        peer.welcome()
        send(producer, "1", "2")
        arrive(peer, 2)
        peer.say(Nack(1, "codec", "", permanent=True))
        until(lambda: bool(seen))
        peer.say(Ack(2, MANY))
        producer.flush()
    assert "wait for itself" in seen[0]


def test_the_producer_gives_up_a_packet_that_was_damaged_three_times(
    peer: Peer, producer: Producer
) -> None:
    send(producer, "1", "2")
    arrive(peer, 2)
    for _ in range(2):
        peer.say(Nack(1, "checksum", "damaged", permanent=False))
        peer.say(Nack(1, "gap", "expected 1", permanent=False))
        assert arrive(peer, 2) == [(1, "1"), (2, "2")]
    peer.say(Nack(1, "checksum", "damaged", permanent=False))
    with pytest.raises(DamagedError, match="3 times in a row"):
        producer.flush()


@pytest.mark.parametrize(
    ("reason", "error", "match"),
    [
        ("superseded", SupersededError, "another producer named 'a' has taken over: since"),
        ("unauthorised", UnauthorisedError, "may not speak for 'a'"),
        ("version", VersionRefusedError, "same release"),
        ("malformed", RefusedError, "malformed: since"),
    ],
)
def test_a_permanent_refusal_raises_its_error_in_flush_send_and_connect(
    peer: Peer, producer: Producer, reason: str, error: type[RefusedError], match: str
) -> None:
    send(producer, "1")
    arrive(peer, 1)
    with background(producer.flush) as flushed:
        peer.say(Nack(0, reason, "since then", permanent=True))
        with pytest.raises(error, match=match):
            flushed()
    with pytest.raises(error, match=match):
        producer.send(image())
    with pytest.raises(error, match=match):
        producer.connect()


def test_a_receiver_of_another_version_is_refused(peer: Peer) -> None:
    producer = Producer(peer.address, name="a")
    peer.expect(Hello)
    peer.socket.send_multipart([peer.who, b"SS\x02\x05", b"\x80"])
    with pytest.raises(VersionRefusedError, match="version 2; this side speaks 1"):
        producer.connect()
    producer.close()


def test_the_producer_ignores_unreadable_frames(peer: Peer, producer: Producer) -> None:
    for frames in ([b"SS\x01\x04", b"\xc1"], [b""], [b"GET / HTTP/1.1"], [b"SS\x01\x01", b"\x80"]):
        peer.socket.send_multipart([peer.who, *frames])
    peer.say(Hello("b", 1, 1))
    send(producer, "1")
    assert arrive(peer, 1) == [(1, "1")]


def test_the_producer_detects_another_producer_of_the_same_name(
    peer: Peer, producer: Producer
) -> None:
    send(producer, "1")
    arrive(peer, 1)
    peer.restart()
    peer.welcome(resume=9, epoch=2)
    with pytest.raises(SupersededError, match="sequence 9, the last sent is 1"):
        producer.flush()


def test_the_producer_retries_after_a_temporary_refusal(peer: Peer, producer: Producer) -> None:
    send(producer, "1")
    arrive(peer, 1)
    peer.say(Nack(1, "unauthorised", "being rotated", permanent=False))
    peer.welcome()
    assert arrive(peer, 1) == [(1, "1")]


def test_a_bad_answer_does_not_end_the_producers_thread(peer: Peer) -> None:
    """Sequences behind such a `resume` would not fit their 64 bits."""
    with Producer(peer.address, name="a") as producer:
        peer.expect(Hello)
        peer.say(Welcome(2**64 - 1, None, MANY, MANY, 64, ("raw",), 1))
        peer.socket.send_multipart([peer.who, b"\x00", b"GET / HTTP/1.1"])
        peer.welcome()
        producer.connect()
        send(producer, "1")
        assert arrive(peer, 1) == [(1, "1")]
        peer.say(Ack(1, MANY))


def test_an_error_while_a_message_is_handled_costs_only_the_connection(
    peer: Peer, producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    handled = producer._protocol.received

    def broken(message: Message, now: float) -> None:
        monkeypatch.setattr(producer._protocol, "received", handled)
        raise ZeroDivisionError

    monkeypatch.setattr(producer._protocol, "received", broken)
    send(producer, "1")
    arrive(peer, 1)
    peer.say(Ack(1, MANY))
    peer.welcome()
    assert arrive(peer, 1) == [(1, "1")]
    peer.say(Ack(1, MANY))
    producer.flush()


def test_a_flood_of_messages_from_the_receiver_does_not_block_packets(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    receive = Connection.receive

    def flood(connection: Connection) -> list[Frame]:
        return receive(connection) or list(encode(Ack(0, 1 << 20)))

    monkeypatch.setattr(Connection, "receive", flood)
    with peer.serving() as journal, Producer(peer.address, "a") as producer:
        producer.send(image(), id="x")
        producer.flush()
    assert arrived(journal) == ["x"]
