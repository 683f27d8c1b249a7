"""Two producers of one name at a real receiver: one continues, and one is refused."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from client_peer import Peer, image
from waiting import until

from stream_ssl.journal.consumer_offsets import ConsumerOffsets
from stream_ssl.journal.journal import Journal
from stream_ssl.producers import CannotConnectError, Producer, SupersededError, _protocol
from stream_ssl.receiver.receiver import Receiver
from stream_ssl.wire import Ack, Data, Hello, Nack


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """The address of a receiver."""
    journal = Journal(tmp_path / "journal", budget=1 << 26)
    receiver = Receiver(journal, ConsumerOffsets(tmp_path), "tcp://127.0.0.1:0")
    stop = threading.Event()

    def run() -> None:
        for _ in receiver.run(stop):
            pass

    thread = threading.Thread(target=run)
    thread.start()
    yield receiver.endpoint
    stop.set()
    thread.join()
    journal.close()


def test_a_second_producer_with_the_name_of_a_running_one_is_refused(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_protocol, "SUPERSEDED_SECONDS", 1.5)
    with Producer(address, "robot", linger=0.01) as first:
        first.connect()
        first.send(image())
        with Producer(address, "robot") as second:
            with pytest.raises(SupersededError, match=r"named 'robot' is connected.*takeover=True"):
                second.connect()
            with pytest.raises(SupersededError):
                second.send(image())
        first.send(image())
        first.flush()
        assert (first.stats.acked.samples, first.stats.reconnects) == (2, 0)


def test_takeover_displaces_the_running_producer(address: str) -> None:
    first = Producer(address, "robot")
    first.connect()
    with Producer(address, "robot", takeover=True, linger=0.01) as second:
        second.connect()
        second.send(image())
        second.flush()
        until(lambda: first.stats.state == "refused")
        with pytest.raises(SupersededError, match="named 'robot' has taken over"):
            first.send(image())
    first.close()


def test_a_clock_that_stepped_back_does_not_stop_a_robot(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    future = time.time_ns() + 10**18
    with monkeypatch.context() as patch:
        patch.setattr(time, "time_ns", lambda: future)
        before = Producer(address, "robot")  # the receiver still believes in this connection
    before.connect()
    with Producer(address, "robot", linger=0.01) as after:
        with pytest.raises(CannotConnectError, match="named 'robot' is connected"):
            after.connect(0.5)
        before.close()
        after.connect()
        after.send(image())
        after.flush()


def test_a_producer_asks_for_its_name_before_claiming_the_name() -> None:
    with Peer() as peer, Producer(peer.address, "a", linger=0.01) as producer:
        asked = peer.welcome()
        assert asked.epoch == 0
        claimed = peer.hear()
        assert isinstance(claimed, Hello)
        assert claimed.epoch == producer._protocol.hello.epoch > 1e18
        with peer.serving():
            producer.send(image())
            producer.flush()
        peer.restart()
        again = peer.hear()
        assert isinstance(again, Hello)
        assert (again.epoch, again.first) == (producer._protocol.hello.epoch, 2)
        peer.welcome(resume=1, epoch=2)
    with Peer() as peer, Producer(peer.address, "a", takeover=True) as producer:
        assert peer.welcome().epoch == producer._protocol.hello.epoch


def test_a_producer_sends_data_only_after_it_has_claimed_its_name() -> None:
    with Peer() as peer, Producer(peer.address, "a", packet_samples=1) as producer:
        producer.send(image(), id="x")
        peer.welcome()
        kinds = [type(peer.hear()) for _ in range(2)]
        assert kinds == [Hello, Data]
        peer.say(Ack(1, 1 << 20))
        producer.flush()


def test_a_connected_producer_that_is_superseded_ends_as_refused() -> None:
    with Peer() as peer:
        producer = Producer(peer.address, "a")
        peer.welcome()
        producer.connect()
        peer.say(Nack(0, "superseded", "a newer one", permanent=True))
        until(lambda: producer.stats.state == "refused")
        producer.close()
