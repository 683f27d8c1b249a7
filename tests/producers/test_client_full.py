"""A full buffer under each `on_full`, and the outcome of each sample."""

from __future__ import annotations

import asyncio
import copy
import queue
import sys
import threading

import pytest
from client_peer import Peer, arrived, background, image
from waiting import until

from stream_ssl.producers import (
    BufferFullError,
    Count,
    DeadlineError,
    Delivery,
    DeliveryError,
    Producer,
    _io_thread,
)
from stream_ssl.producers._connection import Connection
from stream_ssl.wire import Ack, Data, Nack
from stream_ssl.wire.messages import Frames


def test_drop_oldest_keeps_the_newest_samples(peer: Peer) -> None:
    told: list[Delivery] = []
    peer.drop()
    with Producer(peer.address, "a", buffer_bytes=8000, on_full="drop_oldest") as producer:
        for number in range(50):
            assert producer.send(image(side=20), id=str(number), on_delivery=told.append)
        stats = producer.stats
        dropped = stats.dropped_by_reason["oldest"].samples
        assert stats.accepted.samples == 50
        assert stats.dropped.samples == dropped == 50 - stats.buffered.samples > 30
        assert stats.buffered.bytes <= 8000
        assert stats.buffered.samples >= 10  # of 15 that fit: few are dropped at a time
        peer.open()
        with peer.serving() as journal:
            producer.flush()
    assert arrived(journal) == [str(n) for n in range(dropped, 50)]
    assert [it.id for it in told if it.outcome == "dropped"] == [str(n) for n in range(dropped)]
    assert "it made room for a newer sample" in told[0].detail
    assert [it.id for it in told if it.outcome == "acknowledged"] == arrived(journal)


def test_drop_oldest_never_drops_a_sent_sample(peer: Peer) -> None:
    with Producer(
        peer.address, "a", packet_samples=1, buffer_bytes=2000, on_full="drop_oldest"
    ) as producer:
        peer.welcome(credit=1600)
        producer.connect()
        for number in range(4):
            producer.send(image(side=20), id=str(number))
        until(lambda: producer.stats.sent.samples == 3)  # what the credit allows
        for number in range(4, 30):
            producer.send(image(side=20), id=str(number))
        peer.restart()
        with peer.serving() as journal:
            producer.flush()
        stats = producer.stats
    assert arrived(journal) == ["0", "1", "2", "29"]
    assert stats.accepted.samples == 30
    assert stats.dropped.samples == stats.dropped_by_reason["oldest"].samples == 26


def test_a_flush_waits_for_its_own_samples_and_not_for_newer_ones(peer: Peer) -> None:
    with Producer(
        peer.address, "a", packet_samples=1, buffer_bytes=3000, on_full="drop_oldest"
    ) as producer:
        peer.welcome(credit=700)
        producer.connect()
        producer.send(image(side=20), id="sent")
        assert peer.expect(Data).sequence == 1
        with background(lambda: producer.flush(8)) as flushed:
            until(lambda: producer._protocol.outbox.flush_to == 1)
            for number in range(20):
                producer.send(image(side=20), id=str(number))
            # newer samples were dropped; "sent" is not done
            assert producer._protocol.outbox.done == 0
            peer.say(Ack(1, 1 << 24))
            flushed()
        peer.restart()
        with peer.serving(resume=1):
            producer.flush()


def test_drop_oldest_keeps_a_packet_that_is_being_sent(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Delivery] = []
    leaving, dropped = threading.Event(), threading.Event()
    send = Connection.send

    def slowly(connection: Connection, frames: Frames) -> bool:
        sent = send(connection, frames)
        if len(frames) > 2 and not dropped.is_set():
            leaving.set()
            assert dropped.wait(10)
        return sent

    monkeypatch.setattr(Connection, "send", slowly)
    with (
        Producer(
            peer.address, "a", packet_samples=1, buffer_bytes=3000, on_full="drop_oldest"
        ) as producer,
        peer.serving() as journal,
    ):
        producer.connect()
        producer.send(image(side=20), id="0", on_delivery=told.append)
        assert leaving.wait(10)
        for number in range(1, 20):
            producer.send(image(side=20), id=str(number), on_delivery=told.append)
        dropped.set()
        producer.flush()
    acknowledged = [it.id for it in told if it.outcome == "acknowledged"]
    assert acknowledged == arrived(journal)
    assert acknowledged[0] == "0"
    assert acknowledged[-1] == "19"
    assert len(acknowledged) < 10


def test_on_full_raise_raises_an_error_about_the_full_buffer(peer: Peer) -> None:
    with Producer(peer.address, "a", buffer_bytes=1000, on_full="raise") as producer:
        peer.welcome(credit=0)
        producer.connect()
        producer.send(image(side=28))
        with pytest.raises(BufferFullError, match="1000 bytes is full"):
            producer.send(image(side=28))
        assert producer.stats.accepted.samples == 1
        peer.restart()
        with peer.serving():
            producer.flush()


def test_drop_newest_drops_and_counts_the_newest_samples(peer: Peer) -> None:
    peer.drop()
    with Producer(peer.address, "a", buffer_bytes=1000, on_full="drop_newest") as producer:
        assert [producer.send(image(side=28)) for _ in range(3)] == [True, False, False]
        future = producer.submit(image(side=28), id="late")
        with pytest.raises(DeliveryError, match="sample 'late' was dropped: the buffer is full"):
            future.result(1)
        dropped = producer.stats.dropped_by_reason["buffer_full"]
        assert producer.stats.dropped == dropped == Count(3, 3 * 784)
        peer.open()
        with peer.serving() as journal:
            producer.flush()
    assert len(arrived(journal)) == 1


def test_callbacks_and_futures_report_the_outcome_of_each_sample(peer: Peer) -> None:
    told: list[Delivery] = []
    with Producer(peer.address, "a", packet_samples=2) as producer:
        peer.welcome()
        for name in "1234":
            producer.send(image(), id=name, on_delivery=told.append)
        good, bad = producer.submit(image(), id="5"), producer.submit(image(), id="6")
        for _ in range(3):
            peer.expect(Data)
        assert not told
        peer.say(Ack(1, 1 << 20))
        until(lambda: len(told) == 2)
        peer.say(Nack(2, "malformed", "no such shape", permanent=True))
        peer.say(Ack(2, 1 << 20))
        until(lambda: len(told) == 4)
        assert not good.done()
        peer.say(Ack(3, 1 << 20))
        assert good.result(5) == Delivery("5", "acknowledged")
        assert bad.result(5) == Delivery("6", "acknowledged")
    assert told[:2] == [Delivery("1", "acknowledged"), Delivery("2", "acknowledged")]
    assert [it.outcome for it in told[2:]] == ["rejected", "rejected"]
    assert told[2].detail == "malformed: no such shape"


def test_a_copied_delivery_error_keeps_its_text_and_its_delivery() -> None:
    error = DeliveryError("sample 'x' was dropped", Delivery("x", "dropped", "why"))
    came = copy.copy(error)  # copy uses the method of pickle, which sends errors between processes
    assert (type(came), str(came), came.delivery) == (DeliveryError, str(error), error.delivery)


def test_close_fails_the_futures_of_lost_samples() -> None:
    producer = Producer("tcp://127.0.0.1:1", "a")
    future = producer.submit(image(), id="x")
    with pytest.raises(DeadlineError):
        producer.close(0.05)
    with pytest.raises(DeliveryError, match="'x' was dropped: closed") as caught:
        future.result(1)
    assert caught.value.delivery.id == "x"


def test_a_failing_callback_and_a_cancelled_future_stop_no_sample(
    peer: Peer, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: Delivery) -> None:
        raise KeyError("mine")

    with peer.serving() as journal, Producer(peer.address, "a") as producer:
        producer.send(image(), on_delivery=fail)
        producer.submit(image()).cancel()
        producer.send(image())
        producer.flush()
    assert len(arrived(journal)) == 3
    assert "a callback failed" in caplog.text


def test_sys_exit_in_a_callback_does_not_end_the_producers_thread(
    peer: Peer, caplog: pytest.LogCaptureFixture
) -> None:
    def leave(_: object) -> None:
        sys.exit(3)

    with peer.serving() as journal, Producer(peer.address, "a", on_state=leave) as producer:
        producer.send(image(), on_delivery=leave)
        producer.submit(image()).add_done_callback(leave)
        producer.flush()
        until(lambda: caplog.text.count("SystemExit: 3") >= 3)
        producer.send(image())
    assert len(arrived(journal)) == 3


def test_close_does_not_wait_for_a_stuck_callback(
    peer: Peer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_io_thread, "CALLBACK_SECONDS", 0.2)
    full = queue.Queue[Delivery](1)
    full.put(Delivery("", "dropped"))
    with peer.serving(), Producer(peer.address, "a") as producer:
        producer.send(image(), on_delivery=full.put)
        producer.flush()
        with background(producer.close) as closed:
            until(lambda: "does not return" in caplog.text)
            closed()
            full.get()  # now the callback returns
    assert "Queue.put" in caplog.text
    until(lambda: producer.stats.state == "closed")


def test_a_callback_cannot_close_its_producer(peer: Peer, caplog: pytest.LogCaptureFixture) -> None:
    with peer.serving(), Producer(peer.address, "a") as producer:
        producer.send(image(), on_delivery=lambda _: producer.close())
        until(lambda: "callback" in caplog.text)
        assert producer.stats.state == "connected"
    assert "ProducerError: a callback would wait for itself" in caplog.text


def test_send_async_awaits_room_and_its_future_awaits_delivery(peer: Peer) -> None:
    async def work(producer: Producer) -> list[Delivery]:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        other = asyncio.create_task(tick())
        futures = [await producer.send_async(image(side=20), id=str(n)) for n in range(40)]
        deliveries = await asyncio.gather(*futures)
        other.cancel()
        assert ticks > 100  # the loop was never blocked
        return deliveries

    with (
        peer.serving() as journal,
        Producer(peer.address, "a", buffer_bytes=2000, packet_samples=2) as producer,
    ):
        deliveries = asyncio.run(work(producer))
    assert arrived(journal) == [str(n) for n in range(40)]
    assert deliveries == [Delivery(str(n), "acknowledged") for n in range(40)]


def test_send_async_times_out_and_can_be_cancelled() -> None:
    async def work(producer: Producer) -> None:
        why = r"full after 0\.2 s: .*(nobody listens|still connecting)"
        with pytest.raises(DeadlineError, match=why):
            await producer.send_async(image(side=20), timeout=0.2)
        task = asyncio.create_task(producer.send_async(image(side=20)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    producer = Producer("tcp://127.0.0.1:1", "a", buffer_bytes=500)
    producer.send(image(side=20))
    asyncio.run(work(producer))
    assert producer.stats.accepted.samples == 1
    with pytest.raises(DeadlineError):
        producer.close(0)
