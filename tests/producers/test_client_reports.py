"""The reports of a producer: log lines, on_state, on_stats, and the state in its stats."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
from client_peer import PATIENCE, Peer, background, image
from waiting import until

from stream_ssl.producers import Count, Producer, StateChange, Stats
from stream_ssl.producers import _reporter as reporter_module
from stream_ssl.producers._outbox import Outbox
from stream_ssl.producers._packer import Packer
from stream_ssl.producers._protocol import ProducerProtocol
from stream_ssl.producers._reporter import Reporter
from stream_ssl.wire import Data, Hello, Nack


@pytest.fixture(autouse=True)
def info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "stream_ssl.producers")


def states(changes: list[StateChange]) -> list[str]:
    """Return the states, without repetitions that differ only in the reason."""
    found = [change.state for change in changes]
    return [state for at, state in enumerate(found) if found[at - 1 : at] != [state]]


def test_the_producer_reports_and_logs_each_state_with_its_reason(
    peer: Peer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporter_module, "LOG_SECONDS", 0.0)
    changes: list[StateChange] = []
    with Producer(peer.address, "robot", linger=0.01, on_state=changes.append) as producer:
        assert producer.stats.state == "connecting"
        peer.welcome()
        producer.connect()
        until(lambda: states(changes)[-1:] == ["connected"])
        assert (producer.stats.state, producer.stats.last_error) == ("connected", "")
        peer.drop()
        until(lambda: states(changes)[-1:] == ["disconnected"])
        producer.send(image())
        until(lambda: "nobody listens" in producer.stats.last_error)
        assert producer.stats.state == "disconnected"
        peer.open()
        with peer.serving():
            producer.flush()
        until(lambda: states(changes)[-1:] == ["connected"])
    assert states(changes) == [
        *("connecting", "connected", "disconnected", "connected", "closed"),
    ]
    assert producer.stats.state == "closed"
    reasons = [change.reason for change in changes if change.state == "disconnected"]
    assert any("broke" in reason for reason in reasons)
    assert any("nobody listens" in reason for reason in reasons)
    lines = [
        record.getMessage() for record in caplog.records if record.name == "stream_ssl.producers"
    ]
    for part in ("connected; 0", "disconnected: the connection", "nobody listens", "closed; 1"):
        assert any(part in line and "producer 'robot'" in line for line in lines), part


def test_a_refusal_is_logged_as_an_error_and_stays_in_the_stats(
    peer: Peer, caplog: pytest.LogCaptureFixture
) -> None:
    changes: list[StateChange] = []
    producer = Producer(peer.address, "robot", on_state=changes.append)
    peer.welcome()
    producer.connect()
    peer.say(Nack(0, "unauthorised", "revoked", permanent=True))
    until(lambda: producer.stats.state == "refused")
    until(lambda: states(changes)[-1:] == ["refused"])
    assert "may not speak for 'robot': revoked" in producer.stats.last_error
    producer.close()
    (line,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "refused: this plain-text connection may not speak for 'robot'" in line.getMessage()


def test_the_producer_logs_a_full_buffer_once_with_the_reason(
    peer: Peer, caplog: pytest.LogCaptureFixture
) -> None:
    with Producer(peer.address, "a", buffer_bytes=1000, on_full="drop_newest") as producer:
        peer.welcome(credit=0)
        producer.connect()
        for _ in range(50):
            producer.send(image(side=28))
        until(lambda: "the buffer is full" in caplog.text)
        assert "grants no credit" in caplog.text
        peer.restart()
        with peer.serving():
            producer.flush()
            until(lambda: "has room again" in caplog.text)
    assert caplog.text.count("the buffer is full") == 1


def test_a_log_handler_may_use_the_producer(peer: Peer) -> None:
    """A thread that logs holds its handler's lock, so no line is logged under the producer's."""

    class Counts(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())
            in_handler.set()
            assert refused.wait(PATIENCE)
            until(lambda: producer.stats.rejected.samples == 1)

    lines, in_handler, refused = list[str](), threading.Event(), threading.Event()
    handler, log = Counts(), logging.getLogger("stream_ssl.producers")
    producer = Producer(peer.address, "a")
    peer.welcome()
    producer.connect()
    producer.send(image(), id="bad")
    data = peer.expect(Data)
    log.addHandler(handler)
    try:
        with background(lambda: log.warning("a line of the user's")) as logged:
            assert in_handler.wait(PATIENCE)
            peer.say(Nack(data.sequence, "decode", "no picture", permanent=True))
            refused.set()
            logged()
        until(lambda: any("1 samples rejected: decode: no picture" in one for one in lines))
    finally:
        log.removeHandler(handler)
        producer.close()


def test_on_stats_receives_a_copy_of_the_counters_regularly(peer: Peer) -> None:
    told: list[Stats] = []
    with (
        peer.serving(),
        Producer(peer.address, "a", on_stats=told.append, stats_seconds=0.05) as producer,
    ):
        producer.send(image())
        producer.flush()
        until(lambda: bool(told) and told[-1].acked.samples == 1)
        assert told[-1].state == "connected"
        told[-1].acked.samples = 99  # a copy
        assert producer.stats.acked.samples == 1


class Clock:
    """The reporter alone, driven through seconds."""

    def __init__(self) -> None:
        self.protocol = ProducerProtocol(
            Hello("a", 1, 1), Outbox(Packer(1, 1), 0.2), "still connecting to X"
        )
        self.reporter = Reporter("producer 'a'", None, None, None, 10.0)
        self.reporter._since = 0.0

    def at(self, now: float, full: bool = False, acked: int = 0, **state: Any) -> None:
        for name, value in state.items():
            setattr(self.protocol, name, value)
        stats = Stats(state=self.protocol.public_state, acked=Count(acked, 0))
        self.reporter.report(self.protocol, stats, full, now)


def test_the_report_counts_a_sample_in_memory_and_spool_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock, stats = Clock(), Stats(buffered=Count(20, 0), spooled=Count(30, 0))
    clock.protocol.reason = "nobody listens"
    clock.reporter.report(clock.protocol, stats, False, 0.0)
    assert "nobody listens; 30 samples wait" in caplog.text


def test_a_lasting_reason_is_logged_each_30_s_and_changing_reasons_once_a_second(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()
    for tenth in range(1000):
        clock.at(tenth / 10, reason="nobody listens")
    assert caplog.text.count("nobody listens") == 4  # at 0, 30, 60 and 90 s
    assert "connecting for 90 s: nobody listens; 0 samples wait, 0 were dropped" in caplog.text
    caplog.clear()
    for tenth in range(1000, 1100):  # ten seconds of flapping
        clock.at(tenth / 10, reason=f"reason {tenth}")
    assert 8 <= caplog.text.count("reason") <= 11


def test_a_slow_handshake_is_logged_only_after_five_seconds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()
    for tenth in range(49):
        clock.at(tenth / 10, reason="connected, but the receiver has not said WELCOME yet")
    assert not caplog.text
    clock.at(5.1)
    assert caplog.text.count("has not said WELCOME") == 1


def test_a_buffer_that_stays_full_is_logged_every_30_seconds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()
    for second in range(65):
        clock.at(second, full=True, reason="nobody listens")
    assert caplog.text.count("the buffer is full") == 3  # at 1, 31 and 61 s
    clock.at(66.0, full=False)
    assert "has room again after 66.0 s" in caplog.text


def test_a_full_buffer_is_logged_only_when_acknowledgements_stop(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()
    for tenth in range(200):
        clock.at(tenth / 10, full=True, acked=tenth, state="active")
    assert "the buffer is full" not in caplog.text
    for tenth in range(200, 220):
        clock.at(tenth / 10, full=True, acked=200)
    assert caplog.text.count("the buffer is full") == 1
