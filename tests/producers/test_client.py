"""The messages of a producer while nothing fails: HELLO, packets in order, and BYE."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest
from client_peer import Peer, arrived, background, image, welcome

from stream_ssl.producers import ClosedError, DeadlineError, Producer, Sample, SampleTooLargeError
from stream_ssl.wire import CODECS, Ack, Bye, Data, Hello
from stream_ssl.wire.messages import MAX_HEADER_BYTES


def test_connect_returns_the_stored_position_and_hello_names_the_producer(peer: Peer) -> None:
    with Producer(peer.address, name="camera-1") as producer:
        with background(producer.connect) as connected:
            hello = peer.welcome(resume=7, position={"file": 3})
            assert connected().position == {"file": 3}
        assert (hello.producer, hello.first, hello.codecs) == ("camera-1", 1, CODECS)


@pytest.mark.parametrize("sporadic", [False, True])
def test_hello_says_whether_the_source_may_be_silent_for_long(peer: Peer, sporadic: bool) -> None:
    with Producer(peer.address, name="camera-1", sporadic=sporadic, exit_timeout=0.0):
        assert peer.expect(Hello).sporadic is sporadic


def test_hello_is_repeated_until_welcome_comes(peer: Peer) -> None:
    with Producer(peer.address, name="camera-1") as producer:
        first, second = peer.expect(Hello), peer.expect(Hello)
        assert first == replace(second, clock=first.clock)
        assert time.time() - 60 < first.clock < second.clock < time.time() + 1
        peer.say(welcome())
        producer.connect()


def test_sequences_continue_after_the_last_durable_packet(peer: Peer) -> None:
    with peer.serving(resume=41) as journal, Producer(peer.address, name="a") as producer:
        producer.send(image(5), id="x", label=3, position=[2, 9])
        producer.flush()
    (data,) = journal
    (sample,) = data.samples()
    assert (data.sequence, data.position) == (42, [2, 9])
    assert (sample.id, sample.label, sample.source, sample.shape) == ("x", 3, "a", (4, 4, 1))
    assert bytes(sample.data) == image(5).tobytes()


def test_samples_arrive_once_in_order_in_full_packets(peer: Peer) -> None:
    with peer.serving() as journal, Producer(peer.address, name="a") as producer:
        for number in range(1000):
            assert producer.send(image(), id=str(number), position=number)
        producer.flush()
        stats = producer.stats
    assert arrived(journal) == [str(n) for n in range(1000)]
    assert max(len(data) for data in journal) == 64
    assert all(data.position == int(list(data.samples())[-1].id) for data in journal)
    assert stats.sent.samples == stats.acked.samples == stats.accepted.samples == 1000
    assert stats.resent.samples == stats.buffered.samples == stats.buffered.bytes == 0


def test_a_packet_without_a_position_repeats_the_last_position(peer: Peer) -> None:
    with peer.serving() as journal, Producer(peer.address, "a", packet_samples=1) as producer:
        producer.send(image(), position=8)
        producer.send(image())
        producer.flush()
    assert [data.position for data in journal] == [8, 8]


def test_each_packet_keeps_to_its_byte_limit_and_holds_one_source(peer: Peer) -> None:
    limit = 4096
    with (
        peer.serving() as journal,
        Producer(peer.address, name="a", packet_bytes=limit) as producer,
    ):
        for number in range(40):
            source = "left" if number < 20 else "right"
            producer.send(Sample.from_array(image(side=20), f"é{number}", source=source))
        producer.send(image(side=100), id="large")
        producer.flush()
    assert all(data.size <= limit for data in journal[:-1])
    assert [data.fields["source"] for data in journal[:-1]] == sorted(
        data.fields["source"] for data in journal[:-1]
    )
    assert len(journal[-1]) == 1


def test_a_packet_that_is_not_full_leaves_after_the_linger(peer: Peer) -> None:
    with Producer(peer.address, name="a", linger=0.05) as producer:
        peer.welcome()
        producer.send(image(), id="x")
        assert len(peer.expect(Data)) == 1
        peer.say(Ack(1, 1 << 20))


def test_linger_zero_sends_each_sample_at_once(peer: Peer) -> None:
    with Producer(peer.address, name="a", linger=0) as producer:
        peer.welcome()
        producer.connect()
        producer.send(image(), id="x")
        assert peer.expect(Data).sequence == 1
        producer.send(image(), id="y")
        assert peer.expect(Data).sequence == 2
        peer.say(Ack(2, 1 << 20))


def test_encoded_bytes_get_ids_of_their_own_and_unknown_bytes_are_refused(peer: Peer) -> None:
    with peer.serving() as journal, Producer(peer.address, name="a") as producer:
        producer.send(b"\xff\xd8 not looked at here", codec="jpeg", time=5.0)
        producer.send(memoryview(b"RIFF"), codec="webp", meta={"gain": 1.5})
        producer.flush()
        with pytest.raises(ValueError, match="no JPEG, PNG or WebP"):
            producer.send(b"what am I")
    first, second = journal[0].samples()
    assert (first.codec, first.time, second.codec, second.meta) == (
        "jpeg",
        5.0,
        "webp",
        {"gain": 1.5},
    )
    assert first.id != second.id


def test_a_view_may_be_overwritten_after_send(peer: Peer) -> None:
    pixels = image(1)
    with peer.serving() as journal, Producer(peer.address, name="a") as producer:
        producer.send(Sample("x", memoryview(pixels), shape=(4, 4, 1)))
        pixels[:] = 9
        producer.flush()
    assert bytes(journal[0].payload) == image(1).tobytes()


def test_a_position_may_be_changed_after_send(peer: Peer) -> None:
    place = {"file": "a.tar", "next": [1]}
    with peer.serving() as journal, Producer(peer.address, name="a") as producer:
        producer.send(image(), position=place)
        place["next"][0] = 2  # the source reads on and has not sent the second sample
        producer.flush()
        assert [data.position for data in journal] == [{"file": "a.tar", "next": [1]}]


def test_the_facts_of_a_sample_may_be_changed_after_send(peer: Peer) -> None:
    meta: dict[str, Any] = {"frame": 1}
    with peer.serving() as journal, Producer(peer.address, name="a") as producer:
        producer.send(Sample("1", bytes(16), shape=(4, 4, 1), meta=meta))
        meta["frame"] = 2
        producer.send(Sample("2", bytes(16), shape=(4, 4, 1), meta=meta))
        meta["frame"] = object()  # no packet can hold it
        producer.flush()
        assert [one.meta for data in journal for one in data.samples()] == [
            {"frame": 1},
            {"frame": 2},
        ]


def test_close_flushes_the_buffer_and_refuses_further_samples(peer: Peer) -> None:
    producer = Producer(peer.address, name="a", linger=60)
    with peer.serving() as journal:
        producer.send(image(), id="x")
        producer.close()
        assert len(journal) == 1
    with pytest.raises(ClosedError, match="closed"):
        producer.send(image())
    producer.close()


@pytest.mark.parametrize(("ended", "reason"), [(False, "closed"), (True, Bye.ENDED)])
def test_bye_says_whether_the_source_has_ended(peer: Peer, ended: bool, reason: str) -> None:
    with Producer(peer.address, name="a") as producer:
        peer.welcome()
        producer.connect()
        producer.close(ended=ended)
    assert peer.expect(Bye).reason == reason


def test_send_blocks_on_a_full_buffer_until_the_receiver_acknowledges_a_packet(peer: Peer) -> None:
    with Producer(peer.address, name="a", packet_samples=1, buffer_bytes=1000) as producer:
        peer.welcome()
        producer.send(image(side=28), id="1")
        with pytest.raises(DeadlineError, match=r"1000 bytes is full after 0\.1 s.*not acknowl"):
            producer.send(image(side=28), id="2", timeout=0.1)
        with background(lambda: producer.send(image(side=28), id="3")) as sent:
            assert peer.expect(Data).sequence == 1
            peer.say(Ack(1, 1 << 20))
            assert sent()
        assert peer.expect(Data).sequence == 2
        peer.say(Ack(2, 1 << 20))


def test_a_sample_larger_than_the_limits_is_refused(peer: Peer) -> None:
    with Producer(peer.address, name="a", buffer_bytes=10_000) as producer:
        with pytest.raises(SampleTooLargeError, match="buffer_bytes 10000"):
            producer.send(image(side=200))
        peer.welcome(max_packet=1000, credit=1000)
        producer.connect()
        with pytest.raises(SampleTooLargeError, match="takes at most 1000"):
            producer.send(image(side=40))
        producer.send(image(side=28), id="x")
        assert peer.expect(Data).size <= 1000
        peer.say(Ack(1, 1000))


def test_the_producer_cuts_waiting_packets_to_the_limits_of_welcome(peer: Peer) -> None:
    rejected = []
    with Producer(peer.address, name="a", on_rejected=rejected.append) as producer:
        for number in range(64):
            side = 60 if number == 40 else 20
            producer.send(image(side=side), id=str(number), position=number)
        with peer.serving(max_packet=2000, max_samples=3, credit=4000) as journal:
            producer.flush()
        assert producer.stats.rejected.samples == 1
    assert all(data.size <= 2000 and len(data) <= 3 for data in journal)
    assert arrived(journal) == [str(n) for n in range(64) if n != 40]
    assert all(data.position == int(list(data.samples())[-1].id) for data in journal)
    assert [(r.reason, r.ids) for r in rejected] == [("oversize", ("40",))]


def test_packets_with_long_descriptions_keep_to_the_limit_of_headers(peer: Peer) -> None:
    """Each small image has a long description, so the header is full before the packet."""
    note = {f"key-{n}": "x" * 90 for n in range(38)}
    with Producer(
        peer.address, name="a", packet_bytes=1 << 24, packet_samples=1024, linger=5.0
    ) as producer:
        for number in range(600):
            producer.send(image(side=1), id=str(number), meta=note)
        with peer.serving() as journal:
            producer.flush()
        assert producer.stats.acked.samples == 600
    assert len(journal) > 1
    assert all(len(data.header) <= MAX_HEADER_BYTES for data in journal)


def test_packets_with_large_positions_keep_to_the_limits(peer: Peer) -> None:
    with (
        peer.serving(max_packet=8000, max_samples=64, credit=8000) as journal,
        Producer(peer.address, name="a", linger=0.01) as producer,
    ):
        producer.connect()
        for number in range(60):
            producer.send(image(side=14), id=str(number), position="p" * 4000)
        producer.flush()
    assert all(data.size <= 8000 for data in journal)
    assert arrived(journal) == [str(n) for n in range(60)]


def test_send_refuses_a_codec_that_the_receiver_does_not_accept(peer: Peer) -> None:
    with peer.serving(codecs=("raw", "jpeg")), Producer(peer.address, name="a") as producer:
        producer.connect()
        with pytest.raises(ValueError, match="'webp': the receiver takes raw, jpeg"):
            producer.send(b"RIFF", codec="webp")


@pytest.mark.parametrize("timeout", [1e10, float("inf"), None])
def test_every_wait_accepts_huge_and_infinite_timeouts(peer: Peer, timeout: float | None) -> None:
    producer = Producer(peer.address, name="a", buffer_bytes=150)
    with peer.serving():
        producer.connect(float("inf") if timeout is None else timeout)
        producer.send(image(), timeout=timeout)
        producer.send(image(), timeout=timeout)  # waits for room
        producer.flush(timeout)
        producer.close(timeout)


def test_an_interrupted_send_loses_no_other_sample_and_blocks_no_flush(peer: Peer) -> None:
    """Python looks for Ctrl-C at the beginning and after the end of each function."""
    sent = 0

    def send(place: int) -> bool:
        """Send a sample with an interrupt at a place. Return whether send() has this place."""
        pixels, left = image(), place

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal left
            frame.f_trace_lines = False
            if "/producers/_" in frame.f_code.co_filename and event in ("call", "return"):
                left -= 1
                if not left:
                    raise KeyboardInterrupt
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            producer.send(pixels, id=f"cut {place}", position=place)
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        return False

    with (
        peer.serving() as journal,
        Producer(peer.address, name="a", packet_samples=3, linger=60.0) as producer,
    ):
        place = 1
        while send(place):
            for _ in range(place % 3):
                producer.send(image(), id=f"whole {sent}", position=place)
                sent += 1
            place += 1
        producer.flush()
        assert (producer.stats.buffered.samples, producer._outbox.memory) == (0, 0)
        assert producer.stats.accepted.samples == producer.stats.acked.samples
    assert place > 10
    names = arrived(journal)
    assert len(set(names)) == len(names)
    assert [name for name in names if "whole" in name] == [f"whole {n}" for n in range(sent)]


def test_samples_of_many_threads_arrive_once_and_in_the_order_of_each_thread(peer: Peer) -> None:
    with peer.serving() as journal, Producer(peer.address, name="a") as producer:

        def work(worker: int) -> None:
            for number in range(200):
                producer.send(image(), id=f"{worker}-{number}")

        with background(lambda: work(0)) as a, background(lambda: work(1)) as b:
            work(2)
            a(), b()
        producer.flush()
    ids = arrived(journal)
    assert len(ids) == len(set(ids)) == 600
    for worker in range(3):
        mine = [name for name in ids if name.startswith(f"{worker}-")]
        assert mine == [f"{worker}-{n}" for n in range(200)]
