"""Samples that take long to decode: their costs, and the shares that producers get."""

import contextlib
import math
import struct
import threading
import time
import zlib
from collections import Counter
from io import BytesIO

import numpy as np
import pytest
from PIL import Image
from receiver_peer import KIB, MIB, Peer, Running
from waiting import until

from stream_ssl.decode_cost import (
    WORK_PER_CHARGED_BYTE,
    decode_cost,
    extra_cost,
    scans_of,
)
from stream_ssl.feed.decode import BadSample, Decoder
from stream_ssl.journal.reader import JournalReader
from stream_ssl.producers import DeadlineError, Producer
from stream_ssl.wire import Ack, Data, Nack, Sample

SIDES = ((1, 1), (17, 4), (640, 3), (1024, 1000))
MODES = {"jpeg": ("L", "RGB", "CMYK"), "png": ("1", "L", "I;16", "P", "RGBA"), "webp": ("RGB",)}


def encoded(image, codec, **options):
    file = BytesIO()
    image.save(file, codec.upper(), **options)
    return file.getvalue()


def interlaced(width, height):
    """Return a blank grey PNG in seven passes. Pillow reads this form but cannot write it."""
    starts = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2))
    rows = b""
    for x, y, across, down in (*starts, (0, 1, 1, 2)):
        wide, high = -(-(width - x) // across), -(-(height - y) // down)
        rows += bytes(1 + wide) * high if wide > 0 and high > 0 else b""
    return png(chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 1)), rows)


def png(head, rows):
    data = chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + head + data


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def blank(side=1024):
    """Return a picture of few bytes and many pixels."""
    return encoded(Image.new("RGB", (side, side), (9, 9, 9)), "webp", lossless=True)


def noise(side=128):
    """Return a picture with many bytes for each pixel, like a photo."""
    pixels = np.random.default_rng(0).integers(0, 256, (side, side, 3), np.uint8)
    return encoded(Image.fromarray(pixels), "jpeg", quality=75)


def examples():
    for size in SIDES:
        for codec, modes in MODES.items():
            for mode in modes:
                yield codec, encoded(Image.new(mode, size), codec)
        yield "jpeg", encoded(Image.new("RGB", size), "jpeg", progressive=True)
        yield "jpeg", encoded(Image.new("CMYK", size), "jpeg", progressive=True)
        yield "webp", encoded(Image.new("RGB", size), "webp", lossless=True)
        yield "webp", encoded(Image.new("RGBA", size, (0, 0, 0, 9)), "webp")
        yield "webp", encoded(Image.new("RGBA", size, (0, 0, 0, 9)), "webp", lossless=True)
        frames = [Image.new("RGB", size, (n, n, n)) for n in (0, 200)]
        yield "webp", encoded(frames[0], "webp", save_all=True, append_images=frames[1:])
        yield "png", interlaced(*size)


def test_an_image_costs_the_pixels_that_pillow_reads_or_its_bytes() -> None:
    dear = 0
    for codec, data in examples():
        with Image.open(BytesIO(data)) as image:
            pixels, mode = image.width * image.height, image.mode
        work = pixels
        if codec == "jpeg":
            work = pixels * scans_of(data) // 16
            work = max(work, pixels) if mode == "CMYK" else work
        expected = max(len(data), work // WORK_PER_CHARGED_BYTE)
        for payload in (data, memoryview(data)):
            assert decode_cost(codec, payload) == expected, (codec, mode, pixels)
        dear += expected > len(data)
    assert dear >= 8


def test_photos_and_small_pictures_cost_their_bytes() -> None:
    photo = noise()
    assert decode_cost("jpeg", photo) == len(photo)
    for codec in MODES:
        small = encoded(Image.open(BytesIO(noise(32))), codec)
        assert decode_cost(codec, small) == len(small)
    for codec in ("raw", "vector"):
        assert decode_cost(codec, bytes(5000)) == 5000


def test_broken_headers_cost_no_more_than_an_image_can() -> None:
    """Headers with a cut or a wrong byte; an image under a wrong codec costs its bytes."""
    draw = np.random.default_rng(0)
    for codec, data in examples():
        most = max(len(data), max(1 << 20, 512 * len(data)) // WORK_PER_CHARGED_BYTE)
        for n in range(min(len(data), 64)):
            flipped = bytearray(data)
            flipped[n] = draw.integers(256)
            assert len(data) <= decode_cost(codec, bytes(flipped)) <= most
            assert decode_cost(codec, data[:n]) >= n
        for other in MODES.keys() - {codec}:
            assert decode_cost(other, data) == len(data)
        assert decode_cost(codec, b"") == 0


def test_a_hidden_size_in_a_header_is_found_or_counts_as_the_largest() -> None:
    """Pillow skips other parts before the size, and uses the last IHDR."""
    jpeg = encoded(Image.new("RGB", (1024, 1024)), "jpeg", progressive=True)
    long, short = b"\xff\xfe\x00\x42" + b"a" * 64, b"\xff\xfe\x00\x04ab"
    for parts, read in (
        (long, True),
        (long * 900, True),
        (long * 1100, False),
        (short * 900, False),
    ):
        hidden = jpeg[:2] + parts + jpeg[2:]
        work = 1024 * 1024 * scans_of(jpeg) // 16 if read else max(1 << 20, 512 * len(hidden))
        assert decode_cost("jpeg", hidden) == max(len(hidden), work // 16)
    head = [
        chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)) for side in (1, 1024)
    ]
    twice = png(head[0] + chunk(b"tEXt", b"a\0b") + head[1], bytes(1025 * 1024))
    assert Image.open(BytesIO(twice)).size == (1024, 1024)
    assert decode_cost("png", twice) == (1 << 20) // 16


def test_an_image_that_the_learner_refuses_by_its_header_costs_its_bytes() -> None:
    bomb = bytearray(blank(1024))
    bits = int.from_bytes(bomb[21:25], "little") | 0xFFFFFFF  # 16,384 x 16,384
    bomb[21:25] = bits.to_bytes(4, "little")
    with pytest.raises(BadSample):
        Decoder().decode(Sample("bomb", bytes(bomb), "webp"))
    assert decode_cost("webp", bytes(bomb)) == len(bomb)


@pytest.mark.parametrize(
    ("codec", "data"),
    [
        ("jpeg", b"\xff\xd8" + b"\xff" * (4 << 20) + b"\x00" + b"\xff\xda" * 99),
        ("jpeg", b"\xff\xd8" + b"\xff\xd0" * (2 << 20)),
        ("jpeg", b"\xff\xd8" + b"\xff\xfe\x00\x02" * (1 << 20)),
        ("png", b"\x89PNG\r\n\x1a\n" + bytes(4 << 20)),
        ("webp", b"RIFF0000WEBPVP8X" + bytes(4 << 20)),
    ],
)
def test_the_cost_of_an_endless_header_is_computed_quickly(codec, data) -> None:
    begun = time.thread_time()
    decode_cost(codec, memoryview(data))
    assert time.thread_time() - begun < 0.5
    if codec == "jpeg" and data[2:4] == b"\xff\xff":
        begun = time.thread_time()
        scans_of(data)
        assert time.thread_time() - begun < 0.5  # a naive scan takes hours


@pytest.mark.parametrize(
    ("codec", "head", "part"),
    [
        ("jpeg", b"\xff\xd8", b"\xff\xd0"),
        ("jpeg", b"\xff\xd8", b"\xff\xe0\x00\x02"),
        ("png", b"\x89PNG\r\n\x1a\n", b"\0\0\0\0tEXt\0\0\0\0"),
    ],
)
def test_the_cost_of_a_packet_of_headers_with_many_parts_is_computed_quickly(
    codec, head, part
) -> None:
    """The receiver reads headers between the commits of all producers."""
    data = head + part * 1000
    count = (8 << 20) // len(data)
    rows = [{"codec": codec, "size": len(data)}] * count
    whole, ratios = memoryview(data * count), [math.inf]
    while len(ratios) < 12 and min(ratios) >= 6:  # other programs disturb single measurements
        begun = time.thread_time()
        extra_cost(rows, whole)
        ratios.append((time.thread_time() - begun) / seconds_of_a_million_additions())
    assert min(ratios) < 6, ratios


def seconds_of_a_million_additions() -> float:
    """Return how fast this machine is now: 0.04 s on a quiet Intel Xeon."""
    begun, total = time.thread_time(), 0
    for number in range(1_000_000):
        total += number
    return time.thread_time() - begun


def test_a_packet_costs_the_sum_of_its_samples() -> None:
    data = [("raw", bytes(3072)), ("webp", blank()), ("jpeg", b"no image"), ("webp", blank(2048))]
    rows = [{"codec": codec, "size": len(payload)} for codec, payload in data]
    payload = b"".join(payload for _, payload in data)
    extra = sum(decode_cost(*one) - len(one[1]) for one in data)
    assert extra_cost(rows, memoryview(payload)) == extra > 60_000


# -- shares

LIMITS = {"max_packet": 64 * KIB, "credit": 256 * KIB, "total_credit": 256 * KIB}


class Reader:
    """Reads the journal as a learner of a given speed does, and adds up the costs by producer."""

    def __init__(self, running, speed):
        self.running, self.speed = running, speed
        self.read, self.cost, self.most = 1, Counter(), 0
        self.journal = JournalReader(running.journal.path)

    def step(self):
        """Read the records that decode in 20 ms, and note the largest waiting cost."""
        records = self.journal.read(self.read)
        costs = [self.costs(record) for record in records]
        self.most = max(self.most, sum(costs))
        done = 0
        for record, cost in zip(records, costs, strict=True):
            if done >= self.speed:
                break
            done += cost
            self.cost[record.producer] += cost
            self.read = record.position + 1
        self.running.offsets.publish(self.read, self.read)
        time.sleep(0.02)

    @staticmethod
    def costs(record):
        rows = Data(1, record.header, record.payload).fields["samples"]
        return len(record.header) + len(record.payload) + extra_cost(rows, record.payload)


def sending(endpoint, name, data, codec, stop):
    """Return a thread with a producer that always has more to send."""

    def run():
        producer = Producer(endpoint, name, packet_samples=1, buffer_bytes=512 * KIB)
        number = 0
        while not stop.is_set():
            number += 1
            try:
                producer.send(Sample(f"{number}", data, codec, time=1.0), timeout=0.05)
            except DeadlineError:
                continue
        with contextlib.suppress(DeadlineError):
            producer.close(timeout=0)

    return threading.Thread(target=run)


def test_producers_get_equal_shares_of_decoding(tmp_path) -> None:
    """A slow learner gets a million blank pixels in 86 bytes beside photos of 16 KB."""
    stop = threading.Event()
    with Running(tmp_path, max_lag_bytes=512 * KIB, **LIMITS) as running:
        reader = Reader(running, 128 * KIB)
        threads = [
            sending(running.endpoint, "bombs", blank(), "webp", stop),
            sending(running.endpoint, "photos", noise(), "jpeg", stop),
        ]
        for thread in threads:
            thread.start()
        try:
            end = time.monotonic() + 30
            while min(reader.cost["bombs"], reader.cost["photos"]) < MIB and time.monotonic() < end:
                reader.step()
            reader.cost.clear()
            while sum(reader.cost.values()) < 8 << 20 and time.monotonic() < end:
                reader.step()
        finally:
            stop.set()
            for thread in threads:
                thread.join()
            reader.journal.close()
        assert running.receiver._protocol.credit.unread.waiting < 1 << 20
    total = sum(reader.cost.values())
    assert total >= 8 << 20, reader.cost
    assert 0.35 < reader.cost["bombs"] / total < 0.65, reader.cost
    assert reader.most < 1 << 20  # max_lag_bytes, a packet, and packets already under way


def test_a_journal_of_bombs_holds_no_more_decoding_than_a_journal_of_photos(tmp_path) -> None:
    """The receiver requests excess packets again later, and no packet is lost."""
    data = blank()
    with (
        Running(tmp_path, max_lag_bytes=512 * KIB, **LIMITS) as running,
        Peer(running.endpoint) as peer,
    ):
        peer.hello()
        peer.with_credit()
        packets = [Data.pack(n, [Sample(f"{n}", data, "webp", time=1.0)]) for n in range(1, 101)]
        for each in packets:
            peer.say(each)
        reason, sequence, permanent = peer.nacked()
        assert (reason, permanent) == ("gap", False)
        assert 512 // 64 <= sequence - 1 <= 512 // 64 + 1
        until(lambda: running.receiver._protocol.credit.room < 0)

        def go_on():  # after each read of the learner, as many more are accepted
            running.offsets.publish(running.journal.last + 1, 1)
            while peer.socket.poll(100):
                peer.hear(Ack | Nack)
            if peer.credit:
                peer.say(packets[peer.through])
            return peer.through >= 24

        until(go_on)
        sequences = [number for _, number in running.journalled()]
        assert sequences == list(range(1, len(sequences) + 1))
