"""How acknowledgements reach the source of a broker."""

import asyncio
import itertools
import logging
import socket
import threading
import time

import pytest
from broker_files import image_files
from client_peer import Peer
from table import table

from stream_ssl.app.cli import main
from stream_ssl.app.commands import produce
from stream_ssl.producers import Delivery, Producer
from stream_ssl.producers.shaping import Shaped
from stream_ssl.producers.sources import Nats
from stream_ssl.producers.sources.acknowledged import Deliveries, sample_of
from stream_ssl.producers.sources.base import Skipped
from stream_ssl.producers.sources.nats_consumer import ConsumerSettings, DurableConsumer

(PNG,) = image_files(1)


class Told:
    """A source that notes each acknowledged position."""

    def __init__(self):
        self.heard = []

    def acknowledged(self, position):
        self.heard.append(position)


def test_a_source_learns_the_last_position_up_to_which_all_samples_are_safe():
    for order in itertools.permutations(range(4)):
        source, safe = Told(), set()
        deliveries = Deliveries(source)
        expected = [deliveries.expect(position) for position in range(4)]
        for one in order:
            if one == 2:
                expected[one].passed_over()
            else:
                expected[one](Delivery("x", "rejected" if one == 1 else "acknowledged"))
            safe.add(one)
            reached = next(n for n in range(5) if n not in safe) - 1
            assert (source.heard or [-1])[-1] == reached
        assert source.heard == sorted(set(source.heard))


def test_a_dropped_sample_stops_the_acknowledgement_of_all_later_ones():
    source = Told()
    deliveries = Deliveries(source)
    expected = [deliveries.expect(position) for position in range(3)]
    for callback, outcome in zip(
        expected, ("acknowledged", "dropped", "acknowledged"), strict=True
    ):
        callback(Delivery("x", outcome))
    assert source.heard == [0]


@pytest.mark.parametrize("data", [b"", b"<html>"])
def test_a_message_without_an_image_is_counted_and_left_out(data, caplog):
    skipped = Skipped("kafka")
    assert sample_of(data, {}, "frames-0-1", 5.0, skipped) is None
    assert skipped.by_reason == {"no image": 1}
    assert "left out message frames-0-1 (no image)" in caplog.text


@table(
    "headers",
    [
        {"id": "\ud800"},
        {"gain": "\ud800", "": "1", "note" * 9999: "x", "x": "y" * 9999},
        {"id": "x" * 9999},
    ],
)
def test_headers_that_exceed_the_wires_limits_are_cut_or_left_out(headers):
    sample = sample_of(PNG, headers, "frames-0-1", 5.0, Skipped("kafka"), key="\ud800")
    assert sample.data == PNG
    assert sample.meta in (None, {"": "1"})


@table(
    ("headers", "time", "label", "counted"),
    [
        ({"time": "7.5", "Label": " 3 "}, 7.5, 3, {}),
        ({"label": "3.0"}, 5.0, 3, {}),
        ({"label": "-1"}, 5.0, None, {}),
        ({"label": "", "time": " "}, 5.0, None, {}),
        ({"time": "noon"}, 5.0, None, {"bad time": 1}),
        ({"time": "nan", "label": "3"}, 5.0, 3, {"bad time": 1}),
        ({"time": "1e400"}, 5.0, None, {"bad time": 1}),
        ({"time": "1700000000000"}, 5.0, None, {"bad time": 1}),  # milliseconds
        ({"LABEL": "1.5"}, 5.0, None, {"bad label": 1}),
        ({"label": "9" * 5000}, 5.0, None, {"bad label": 1}),
        ({"label": "-2", "time": "noon"}, 5.0, None, {"bad label": 1, "bad time": 1}),
    ],
)
def test_a_bad_time_or_label_in_the_headers_costs_no_sample(headers, time, label, counted, caplog):
    skipped = Skipped("kafka")
    sample = sample_of(PNG, headers, "frames-0-1", 5.0, skipped)
    assert (sample.data, sample.time, sample.label) == (PNG, time, label)
    assert skipped.by_reason == counted
    for reason in counted:
        assert f"of message frames-0-1 ({reason})" in caplog.text


def test_an_impossible_time_of_the_broker_gives_way_to_the_time_of_arrival():
    """A Kafka client that counts in microseconds sends such timestamps."""
    skipped, began = Skipped("kafka"), time.time()
    sample = sample_of(PNG, {"time": "noon"}, "frames-0-1", 1.764e12, skipped)
    assert began <= sample.time <= time.time()
    assert skipped.by_reason == {"bad time": 2}


def test_stop_does_not_wait_for_a_silent_broker(caplog):
    stop, held = threading.Event(), []
    with socket.create_server(("127.0.0.1", 0)) as silent, Peer() as peer, peer.serving():
        source = Nats("FRAMES", "ssl", f"nats://127.0.0.1:{silent.getsockname()[1]}")

        def stop_once_it_connects():
            held.append(silent.accept()[0])  # a client that waits for the server's greeting
            stop.set()

        threading.Thread(target=stop_once_it_connects).start()
        with Producer(peer.address, "robot") as producer:
            produce.send_all(
                Shaped(source), producer, 10.0, stop, source
            )  # raises an error without the stop
        produce.close_broker(source, stop)
        assert not source._thread.is_alive()
        held[0].close()
    assert not caplog.records


def test_stop_does_not_wait_for_the_close_of_a_broker_that_is_gone(caplog, monkeypatch):
    monkeypatch.setattr(produce, "BROKER_SECONDS", 0.01)
    stop, answers = threading.Event(), threading.Event()

    class Gone:
        name = "gone"

        def close(self):
            stop.set()
            answers.wait(20)

    with caplog.at_level(logging.WARNING):
        produce.close_broker(Gone(), stop)
    answers.set()
    assert "source gone: the broker does not answer" in caplog.text


@table(
    ("options", "why"),
    [
        (
            ["--shape.duplicates", "0.5"],
            "only the shaping options --shape.rate and --shape.limit apply",
        ),
        (
            ["--parked.share", "0.9"],
            "only the shaping options --shape.rate and --shape.limit apply",
        ),
        (["--producer.on_full", "drop_oldest"], "the broker of source 'kafka' keeps messages"),
    ],
)
def test_produce_refuses_options_that_part_messages_from_their_acknowledgements(
    options, why, caplog
):
    source = ["kafka", "--source.topic", "frames", "--source.group", "g"]
    command = ["produce", *source, "--to", "tcp://127.0.0.1:1", "--name", "robot", *options]
    assert main(command) == 2
    assert why in caplog.text


def options_after_errors(count, monkeypatch):
    """Lose the connection `count` times, and return the client's options."""
    callbacks = {}

    class Client:
        def __init__(self):
            self.options = {"user": "robot", "password": "old"}

        def jetstream(self):
            return None

        async def connect(self, **settings):
            callbacks.update(settings)

    async def come_and_go():
        await consumer._connect([])
        for _ in range(count):
            await callbacks["error_cb"](ConnectionError("unexpected EOF"))
            await callbacks["reconnected_cb"]()

    monkeypatch.setattr("nats.aio.client.Client", Client)
    settings = ConsumerSettings("FRAMES", "ssl", None, 1, 1.0)
    consumer = DurableConsumer("robot", {}, lambda: {"token": "new"}, settings)
    asyncio.run(come_and_go())
    return consumer.client.options


def test_a_nats_source_replaces_all_secrets_after_an_error(monkeypatch):
    options = options_after_errors(1, monkeypatch)
    assert options == {"user": None, "password": None, "token": "new"}


def test_the_log_limits_its_lines_about_a_nats_server_that_comes_and_goes(monkeypatch, caplog):
    with caplog.at_level(logging.INFO):
        options_after_errors(200, monkeypatch)
    assert [record.getMessage() for record in caplog.records] == [
        "source robot: unexpected EOF",
        "source robot: connected again",
    ]
