"""The samples of a source that `produce` sends, and the lines that it logs."""

import logging
import threading

import pytest
from client_peer import Peer, arrived

from stream_ssl.app.commands import produce
from stream_ssl.process.failures import Failure
from stream_ssl.producers import Producer, Sample
from stream_ssl.producers.shaping import Shaped
from stream_ssl.producers.sources.live import Live


class Listed:
    """A source of grey squares with given sides."""

    name = "listed"

    def __init__(self, *sides):
        self._sides = sides

    def samples(self, position=None):
        for number, side in enumerate(self._sides[position or 0 :], start=(position or 0) + 1):
            pixels, shape = bytes(side * side), (side, side, 1)
            yield Sample(str(number), pixels, shape=shape, source=self.name), number


def test_a_sample_that_is_too_large_is_counted_and_the_rest_is_sent(caplog):
    caplog.set_level(logging.WARNING)
    source = Shaped(Listed(4, 500, 5, 600, 6))
    with Peer() as peer, peer.serving(max_packet=65_536) as journal:
        with Producer(peer.address, "robot") as producer:
            produce.send_all(source, producer, 10.0, threading.Event())
        assert arrived(journal) == ["1", "3", "5"]
    assert "left out sample '2'" in caplog.text
    assert "left out: 2 too large" in caplog.text


def test_a_position_that_exceeds_a_packet_ends_produce_with_one_line():
    class Wordy(Listed):
        def samples(self, position=None):
            yield from ((sample, "x" * 4000) for sample, _ in super().samples(position))

    says = "source 'listed': at sample '1': position: 4118 bytes packed, at most 4096"
    with (
        Peer() as peer,
        peer.serving(),
        Producer(peer.address, "robot") as producer,
        pytest.raises(Failure, match=says),
    ):
        produce.send_all(Shaped(Wordy(4)), producer, 10.0, threading.Event())


def test_produce_says_nothing_to_send_when_the_receiver_has_the_whole_source(caplog):
    """Otherwise a second run would say only "0 samples on the receiver's disk"."""
    caplog.set_level(logging.INFO)
    with Peer() as peer:
        for new in (True, False):
            position = None if new else peer.journal[-1].position
            with peer.serving(position=position), Producer(peer.address, "robot") as producer:
                produce.send_all(Shaped(Listed(4, 5)), producer, 10.0, threading.Event())
            assert ("nothing to send" in caplog.text) is not new
        assert len(peer.journal) == 1


def test_produce_warns_about_a_waiting_source_that_cannot_be_stopped(monkeypatch):
    """A first signal has no effect on this source, and the user must learn about a second one."""
    monkeypatch.setattr(produce, "SOURCE_SECONDS", 0.1)
    stop, told = threading.Event(), threading.Event()
    monkeypatch.setattr(produce.log, "warning", lambda text, *_: told.set())

    class Waiting(Listed):
        def samples(self, position=None):
            stop.set()
            assert told.wait(20)
            yield from super().samples(position)

    with Peer() as peer, peer.serving(), Producer(peer.address, "robot") as producer:
        produce.send_all(Shaped(Waiting(4)), producer, 10.0, stop)
    assert told.is_set()


class Snapshots(Live[int]):
    """A camera that shows three pictures, and then waits until it is stopped."""

    def __init__(self):
        super().__init__("snapshots", 5.0, 5.0, None, 8)

    def received(self):
        yield from ((side, 1) for side in (4, 5, 6))
        self._stopped.wait(20)

    def sample(self, item):
        return Sample(str(item), bytes(item * item), shape=(item, item, 1), source=self.name)

    def failures(self):
        return ()


def test_a_camera_with_a_spool_starts_without_the_receiver(tmp_path, monkeypatch, caplog):
    """A robot that boots without a network would otherwise lose what its camera sees."""
    monkeypatch.setattr(produce, "SPOOL_PATIENCE", 0.1)
    stop, spool = threading.Event(), str(tmp_path / "spool")
    monkeypatch.setattr(produce, "stop_on_signals", lambda: stop)
    monkeypatch.setattr(produce.Report, "write_if_due", lambda report: stop.set())
    with Peer() as peer, peer.serving():
        address = peer.address
    command = ["test_produce.Snapshots", "--to", address, "--name", "robot"]
    command += ["--connect_seconds", "20", "--producer.on_full", "spool", "--producer.spool", spool]
    assert produce.main(command) == 0, caplog.text
    assert "the samples wait in the spool" in caplog.text
    with Peer() as peer, peer.serving() as journal:
        with Producer(peer.address, "robot", on_full="spool", spool=spool) as producer:
            producer.connect()
            producer.flush()
        assert arrived(journal) == ["4"]
