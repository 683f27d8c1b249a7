"""Live robots: images through Foxglove's own server."""

import base64
import contextlib
import json
import logging
import socket
import threading
import time
from contextlib import contextmanager

import foxglove
import numpy as np
import pytest
import trustme
from foxglove.channels import CompressedImageChannel, RawImageChannel
from foxglove.messages import CompressedImage, RawImage, Timestamp
from going_on import check_stop_ends
from robot_files import BEGAN, COMPRESSED, IMAGE, ROS1, ROS2, SECOND, TEXT, image
from ros_reading import DEADLINE, cdr, jpeg, raw, reading, wait_for
from source_files import encoded
from table import table
from video_files import number_of, numbered

from stream_ssl.producers.sources import Ros
from stream_ssl.producers.sources.base import SourceError


@contextmanager
def robot(port=0, **settings):
    """Foxglove's server on loopback, with channels of its own."""
    context = foxglove.Context()
    server = foxglove.start_server(port=port, context=context, **settings)
    try:
        yield server, context
    finally:
        server.stop()


def ros_channel(context, topic, kind, encoding="cdr", types=ROS2):
    version = 1 if types is ROS1 else 2
    text, _ = types.generate_msgdef(kind, ros_version=version)
    name = kind.replace("/msg/", "/") if types is ROS1 else kind
    schema = foxglove.Schema(name=name, encoding=f"ros{version}msg", data=text.encode())
    return foxglove.Channel(topic, message_encoding=encoding, schema=schema, context=context)


def of(server, **settings):
    quick = {"retry_seconds": 0.05, "codec": "raw", "timeout": 20.0}
    return Ros(f"ws://127.0.0.1:{server.port}", **(quick | settings))


def test_images_of_ros_2_keep_their_stamps_topics_and_frames():
    with robot() as (server, context):
        plain = ros_channel(context, "/camera/raw", IMAGE)
        packed = ros_channel(context, "/camera/jpeg", COMPRESSED)
        words = ros_channel(context, "/chatter", TEXT)

        def publish():
            words.log(cdr(ROS2.types[TEXT]("hello"), TEXT))
            plain.log(raw(3, BEGAN + SECOND // 2))
            packed.log(jpeg(5, stamp=0), log_time=BEGAN + 7 * SECOND)

        source = of(server)
        with reading(source) as (samples, _):
            wait_for(lambda: len({sample.codec for sample in samples}) == 2, publish)
    by_codec = {sample.codec: sample for sample in samples}
    plain, packed = by_codec["raw"], by_codec["jpeg"]
    assert number_of(plain) == 3
    assert plain.time == pytest.approx(BEGAN / SECOND + 0.5)
    assert plain.meta == {"topic": "/camera/raw", "frame_id": "front"}
    assert bytes(packed.data) == encoded(numbered(5), "JPEG")  # unchanged
    assert packed.time == pytest.approx(BEGAN / SECOND + 7)  # without a stamp, the server's time
    assert packed.id.startswith("/camera/jpeg@")
    assert len({sample.id for sample in samples}) == len(samples)
    assert {sample.source for sample in samples} == {"ros"}
    assert set(source.skipped.by_reason) <= {"late"}


def test_images_of_ros_1_and_of_foxglove_in_protobuf_and_json_are_read():
    pixel_HWC = numbered(6)
    height, width = pixel_HWC.shape[:2]
    at = Timestamp(BEGAN // SECOND, 250_000_000)
    with robot() as (server, context):
        old = ros_channel(context, "/old", IMAGE, "ros1", ROS1)
        packed = CompressedImageChannel("/packed", context=context)
        plain = RawImageChannel("/plain", context=context)
        schema = foxglove.Schema(name="foxglove.RawImage", encoding="jsonschema", data=b"{}")
        text = foxglove.Channel("/json", message_encoding="json", schema=schema, context=context)

        def publish():
            old.log(
                bytes(ROS1.serialize_ros1(image(ROS1, numbered(4), "rgb8", BEGAN), IMAGE)),
                log_time=BEGAN,
            )
            packed.log(CompressedImage(data=encoded(numbered(5), "WEBP"), format="webp"))
            facts = {"width": width, "height": height, "encoding": "rgb8", "step": width * 3}
            data = pixel_HWC.tobytes()
            plain.log(RawImage(timestamp=at, frame_id="rear", data=data, **facts))
            stamp = {"sec": BEGAN // SECOND, "nsec": 750_000_000}
            fields = {"timestamp": stamp, "data": base64.b64encode(data).decode(), **facts}
            text.log(json.dumps(fields | {"frame_id": "json"}).encode())

        with reading(of(server)) as (samples, _):
            wait_for(lambda: len({one.meta["topic"] for one in samples}) == 4, publish)
    by_topic = {sample.meta["topic"]: sample for sample in samples}
    assert number_of(by_topic["/old"]) == 4
    assert by_topic["/packed"].codec == "webp"
    assert number_of(by_topic["/plain"]) == number_of(by_topic["/json"]) == 6
    assert by_topic["/plain"].meta["frame_id"] == "rear"
    assert by_topic["/plain"].time == pytest.approx(BEGAN / SECOND + 0.25)
    assert by_topic["/json"].time == pytest.approx(BEGAN / SECOND + 0.75)


class Relay:
    """A link to a server that may move to another port, and may be slow.

    It keeps its own port, which no other process can take while the server is away.
    """

    def __init__(self, port, piece=65_536, pause=0.0):
        self.target, self._piece, self._pause = port, piece, pause
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._listening.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(DEADLINE)
        self._listening.close()

    def _accept(self):
        with contextlib.suppress(OSError):  # closed
            while True:
                near, _ = self._listening.accept()
                try:
                    far = socket.create_connection(("127.0.0.1", self.target))
                except OSError:
                    near.close()
                    continue
                for source, target, pause in ((far, near, self._pause), (near, far, 0.0)):
                    pump = threading.Thread(
                        target=self._pump, args=(source, target, pause), daemon=True
                    )
                    self._threads.append(pump)
                    pump.start()

    def _pump(self, source, target, pause):
        with source:
            with contextlib.suppress(OSError):
                while data := source.recv(self._piece):
                    target.sendall(data)
                    time.sleep(pause)
            for one in (source, target):  # also wakes the other pump
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)


def test_images_of_a_restarted_robot_get_new_ids(caplog):
    with robot() as (first, context), Relay(first.port) as relay:
        source = of(relay)
        channel = ros_channel(context, "/camera", IMAGE)
        with reading(source) as (samples, _):
            wait_for(lambda: samples, lambda: channel.log(raw(1)))
            first.stop()
            wait_for(lambda: "trying again in" in caplog.text)
            with robot() as (second, context):
                relay.target = second.port
                channel = ros_channel(context, "/camera", IMAGE)
                wait_for(lambda: number_of(samples[-1]) == 2, lambda: channel.log(raw(2)))
    ids = [sample.id for sample in samples]
    assert len(set(ids)) == len(ids)
    connections = [id_.rpartition("-")[0] for id_ in ids]
    assert len(set(connections)) == 2
    assert connections == sorted(connections)


def test_topics_that_are_advertised_together_are_named_in_one_line(caplog):
    with robot() as (server, context), caplog.at_level(logging.INFO):
        channels = [ros_channel(context, f"/camera{n}", IMAGE) for n in range(10)]
        with reading(of(server)) as (samples, _):
            wait_for(lambda: samples, lambda: [channel.log(raw(1)) for channel in channels])
    lines = [line for line in caplog.messages if "subscribes to" in line]
    assert len(lines) == 1
    assert "/camera0 (sensor_msgs/msg/Image)" in lines[0]


def test_the_source_subscribes_only_to_the_wanted_topics():
    with robot() as (server, context):
        channels = [ros_channel(context, f"/camera{n}", IMAGE) for n in range(200)]
        late = []

        def publish():
            for number, channel in enumerate(channels[:20]):
                channel.log(raw(number))
            if not late:  # a node that starts later
                late.append(ros_channel(context, "/late", COMPRESSED))
            late[0].log(jpeg(31))

        source = of(server, topics=["/camera7", COMPRESSED], waiting=100)
        with reading(source) as (samples, _):
            wait_for(lambda: len({sample.meta["topic"] for sample in samples}) == 2, publish)
            late[0].close()
    assert {sample.meta["topic"] for sample in samples} == {"/camera7", "/late"}
    assert {number_of(s) for s in samples if s.meta["topic"] == "/camera7"} == {7}


def test_the_error_about_a_missing_topic_names_the_existing_ones(caplog):
    with robot() as (server, context):
        ros_channel(context, "/front/image_raw", IMAGE)
        source = of(server, topics=["/front/image"], timeout=1.0, give_up_seconds=3.0)
        with reading(source) as (_, failed):
            wait_for(lambda: failed)
    assert "advertises none of the wanted topics; it has only /front/image_raw" in str(failed[0])
    assert "no frame for 3 s" in str(failed[0])
    assert "no frames yet" in caplog.text


def test_the_newest_images_remain_if_the_sender_is_slow(caplog):
    with robot() as (server, context):
        channel = ros_channel(context, "/camera", IMAGE)
        source = of(server, waiting=4)
        stream = source.samples()
        got = threading.Event()
        first = []
        taker = threading.Thread(target=lambda: (first.append(next(stream)), got.set()))
        taker.start()
        wait_for(got.is_set, lambda: channel.log(raw(0)))
        taker.join()
        for number in range(1, 31):
            channel.log(raw(number))
        wait_for(lambda: source.skipped.by_reason["late"] >= 26)
        wait_for(lambda: number_of_last(source) == 30)
        rest = [number_of(next(stream)[0]) for _ in range(4)]
        source.stop()
        assert list(stream) == []
    assert rest == [27, 28, 29, 30]
    assert caplog.text.count("left out the oldest frame that waits (late)") == 1


def test_the_bytes_of_waiting_images_are_bounded(monkeypatch):
    content = raw(1)
    monkeypatch.setattr("stream_ssl.producers.sources.live.WAITING_BYTES", 3 * len(content))
    with robot() as (server, context):
        channel = ros_channel(context, "/camera", IMAGE)
        source = of(server, waiting=1000)
        stream = source.samples()
        first = []
        taker = threading.Thread(target=lambda: first.append(next(stream)))
        taker.start()
        wait_for(lambda: first, lambda: channel.log(content))
        taker.join()
        for _ in range(20):
            if source._ready:
                next(stream)  # gives its bytes back
            channel.log(content)
        wait_for(lambda: source.skipped.by_reason["late"] >= 2, lambda: channel.log(content))
        with source._ready.changed:
            held = [size for _, size in source._ready._messages]
            assert sum(held) == source._ready_bytes <= 3 * len(content)
            assert len(held) == 2  # each has the header of the protocol as well
        source.stop()
        stream.close()


def number_of_last(source):
    """The number in the newest waiting image."""
    with source._ready.changed:
        ((_, message), _size) = source._ready._messages[-1]
    return number_of(source._images.sample(message, "x", "the test"))


def test_an_image_may_take_longer_than_the_timeout_on_a_slow_link(caplog):
    pixel_HWC = np.random.default_rng(0).integers(0, 256, (400, 500, 3), np.uint8)
    data = cdr(image(ROS2, pixel_HWC, "rgb8", BEGAN), IMAGE)
    with robot() as (server, context), Relay(server.port, 100_000, 0.45) as relay:  # 3 s per image
        channel = ros_channel(context, "/camera", IMAGE)
        source = Ros(f"ws://127.0.0.1:{relay.port}", timeout=1.5, codec="raw", retry_seconds=0.05)
        with reading(source) as (samples, _):
            sent = []

            def publish():
                if source._ready_bytes == 0 and len(sent) < 500:
                    sent.append(channel.log(data))

            wait_for(lambda: samples, publish)
    assert bytes(samples[0].data) == pixel_HWC.tobytes()
    assert "trying again" not in caplog.text


def test_the_source_trusts_a_private_authority_only_with_tls_ca(tmp_path):
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    from cryptography.hazmat.primitives import serialization as form

    key = form.load_pem_private_key(certificate.private_key_pem.bytes(), None)
    pem = key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())
    chain = certificate.cert_chain_pems[0].bytes()
    with robot(tls_cert=chain, tls_key=pem) as (server, context):
        channel = ros_channel(context, "/camera", IMAGE)
        url = f"wss://127.0.0.1:{server.port}"
        source = Ros(url, tls_ca=tmp_path / "ca.pem", codec="raw", retry_seconds=0.05)
        with reading(source) as (samples, _):
            wait_for(lambda: samples, lambda: channel.log(raw(9)))
        stranger = Ros(url, give_up_seconds=0.1, retry_seconds=0.05)
        with pytest.raises(SourceError, match="certificate verify failed"):
            next(stranger.samples())
    assert number_of(samples[0]) == 9


def test_the_source_gives_up_an_absent_robot_after_give_up_seconds():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    source = Ros(f"ws://127.0.0.1:{port}", give_up_seconds=0.2, retry_seconds=0.05)
    with pytest.raises(SourceError, match=rf"no frame for \d+ s: ws://127.0.0.1:{port}: .*refused"):
        next(source.samples())


def test_the_source_gives_up_a_robot_that_never_answers():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"ws://127.0.0.1:{listening.getsockname()[1]}"
        source = Ros(url, timeout=0.5, give_up_seconds=0.1, retry_seconds=0.05)
        with pytest.raises(SourceError, match=r"nothing came for 0.5 s|no WebSocket handshake"):
            next(source.samples())


def test_stop_ends_a_source_whose_robot_is_silent():
    with robot() as (server, _):
        check_stop_ends(of(server, timeout=60))


@table(
    ("settings", "message"),
    [
        ({"url": "robot:8765"}, "url 'robot:8765': must be ws://HOST:PORT"),
        ({"url": "http://robot"}, "must be ws://HOST:PORT"),
        ({"url": "ws://"}, "must be ws://HOST:PORT"),
        ({"url": "ws://robot:x"}, "must be ws://HOST:PORT"),
        ({"url": "ws://a:secret@robot"}, "url: .* show the password"),
        ({"url": "http://robot/?token=hidden"}, r"url 'http://robot/\?token=~[0-9a-f]{16}': must"),
        ({"timeout": 0}, "timeout 0: must be above 0"),
        ({"waiting": 0}, "waiting 0"),
        ({"quality": 101}, "quality 101"),
        ({"tls_ca": "/none"}, "tls_ca /none: has no effect with url"),
        ({"url": "wss://robot", "tls_ca": "/none"}, "tls_ca /none: .*No such file"),
    ],
)
def test_wrong_arguments_are_named(settings, message):
    with pytest.raises(ValueError, match=message) as caught:
        Ros(**({"url": "ws://127.0.0.1:8765"} | settings))
    assert "secret" not in str(caught.value)
