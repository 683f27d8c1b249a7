"""Live robots: servers that misbehave."""

import json
import socket
import struct
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest
from robot_files import BEGAN, IMAGE, ROS2
from ros_reading import DEADLINE, raw, reading, wait_for
from table import table
from video_files import number_of
from websockets.frames import Frame, Opcode
from websockets.sync.server import serve

from stream_ssl.producers.sources import Ros
from stream_ssl.producers.sources.base import SourceError


def test_a_robot_that_falls_silent_gets_a_ping_before_the_source_leaves():
    pings = []

    def fall_silent(peer):
        shake_hands(peer)
        while not pings and (data := peer.recv(4096)):
            pings.extend([data] if data[0] == 0x80 | Opcode.PING else [])

    with bare_server(fall_silent) as url:
        source = Ros(url, timeout=1.0, give_up_seconds=0.1, retry_seconds=0.05)
        with pytest.raises(SourceError, match=r"nothing came for 1 s|no topic of images"):
            next(source.samples())
        patient = Ros(url, timeout=1.0, retry_seconds=0.05)
        with reading(patient):
            wait_for(lambda: pings)


@contextmanager
def server_that(script):
    """A WebSocket server that runs `script(connection)` for each client."""

    def handle(connection):
        try:
            script(connection)
            connection.recv(timeout=DEADLINE)
            for _ in connection:
                pass
        except (OSError, TimeoutError, EOFError):
            pass

    with serve(
        handle, "127.0.0.1", 0, subprotocols=["foxglove.websocket.v1"], compression=None
    ) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"ws://127.0.0.1:{server.socket.getsockname()[1]}"
        server.shutdown()
        thread.join(DEADLINE)


SCHEMA, _ = ROS2.generate_msgdef(IMAGE, ros_version=2)


def advertised(*topics, first=1, **more):
    """The message "advertise" of channels of images."""
    facts = {"encoding": "cdr", "schemaName": IMAGE, "schema": SCHEMA} | more
    channels = [{"id": first + n, "topic": topic} | facts for n, topic in enumerate(topics)]
    return json.dumps({"op": "advertise", "channels": channels})


def data_of(subscription, content, log_time=BEGAN):
    return struct.pack("<BIQ", 1, subscription, log_time) + content


def subscriptions(connection):
    """Wait for the message "subscribe"; return its pairs."""
    asked = json.loads(connection.recv(timeout=DEADLINE))
    assert asked["op"] == "subscribe"
    return {entry["channelId"]: entry["id"] for entry in asked["subscriptions"]}


DEEP = '{"op":' + "[" * 5000 + "]" * 5000 + "}"
GARBAGE = {
    "no JSON": ["{"],
    "another JSON": ["[]", "3", "null", '"advertise"'],
    "deep JSON": [DEEP],
    "an endless number": ['{"op": "advertise", "channels": [' + "9" * 10_000 + "]}"],
    "no list": ['{"op": "advertise"}', '{"op": "unadvertise", "channelIds": 3}'],
    "wrong channels": [
        '{"op": "advertise", "channels": [1, null, {}, {"id": -1}, {"id": "x"}, {"id": 1e3}]}',
        advertised("/x", encoding=7),
        advertised("/x", schema={"a": 1}),
        advertised("/x", schemaEncoding=["ros2msg"]),
        advertised("/x" * 1000),
        advertised("/x", schema="a" * (2**20 + 1)),
        advertised("/x", schemaEncoding="protobuf", encoding="protobuf", schema="?"),
    ],
    "bytes without a header": [b"\1", b"\1\0\0", b"\1" * 12],
    "damaged schemas": [
        advertised("/x", schema="uint8[] other", schemaEncoding="ros2msg"),
        advertised("/y", encoding="protobuf", schema="AAAA", schemaName="foxglove.RawImage"),
        advertised("/z", encoding="smoke"),
    ],
}


@table("kind", GARBAGE)
def test_garbage_is_counted_and_the_images_after_it_are_sent(kind, caplog):
    def script(connection):
        for part in GARBAGE[kind]:
            connection.send(part)
        connection.send(advertised("/good", first=500))
        (subscription,) = subscriptions(connection).values()
        connection.send(data_of(subscription, raw(8)))

    with server_that(script) as url:
        source = Ros(f"{url}/?token=hidden", codec="raw")
        sample, _ = next(source.samples())
        source.stop()
    assert number_of(sample) == 8
    assert "/?token=~" in caplog.text or kind == "damaged schemas"
    assert "hidden" not in caplog.text
    assert sum(source.skipped.by_reason.values()) >= len(GARBAGE[kind])
    assert set(source.skipped.by_reason) <= {"unreadable", "undecodable"}


def test_the_source_ignores_messages_outside_its_subscriptions():
    noise = np.random.default_rng(0)

    def script(connection):
        connection.send('{"op": "serverInfo", "name": "x", "capabilities": []}')
        connection.send('{"op": "newKind"}')
        connection.send(advertised("/good"))
        (subscription,) = subscriptions(connection).values()
        connection.send(b"")
        for _ in range(200):  # other opcodes, and other subscriptions
            connection.send(bytes([2 + noise.integers(250)]) + noise.bytes(noise.integers(40)))
        connection.send(data_of(subscription + 1, raw(7)))
        connection.send(data_of(subscription, raw(8)))

    with server_that(script) as url:
        source = Ros(url, codec="raw")
        sample, _ = next(source.samples())
        source.stop()
    assert number_of(sample) == 8
    assert not source.skipped.by_reason


def test_the_log_repeats_a_warning_of_the_server_at_most_three_times(caplog):
    full = {"op": "status", "level": 1, "message": "the send buffer is full,\nmessages are dropped"}
    others = [full | {"level": 0, "message": "a client came"}, full | {"message": 3}]

    def script(connection):
        connection.send(advertised("/good"))
        (subscription,) = subscriptions(connection).values()
        for status in [*others, *[full] * 50]:
            connection.send(json.dumps(status))
        connection.send(data_of(subscription, raw(8)))

    with server_that(script) as url:
        source = Ros(url, codec="raw")
        next(source.samples())
        source.stop()
    lines = [line.message for line in caplog.records if " says: " in line.message]
    line = f"source ros: {url} says: the send buffer is full,?messages are dropped"
    assert lines == [line] * 3
    assert not source.skipped.by_reason


def test_damaged_images_are_counted_and_left_out():
    noise = np.random.default_rng(1)
    whole = raw(3)

    def script(connection):
        connection.send(advertised("/good"))
        (subscription,) = subscriptions(connection).values()
        for cut in range(0, 120, 3):
            connection.send(data_of(subscription, whole[:cut]))
        for _ in range(40):
            connection.send(data_of(subscription, noise.bytes(200), log_time=2**64 - 1))
        connection.send(data_of(subscription, raw(8)))

    with server_that(script) as url:
        source = Ros(url, codec="raw", waiting=100)
        sample, _ = next(source.samples())
        source.stop()
    assert number_of(sample) == 8
    assert source.skipped.by_reason.total() == 80
    assert set(source.skipped.by_reason) <= {"undecodable", "no image"}


def test_the_source_limits_and_counts_the_topics_of_a_hostile_server(monkeypatch):
    monkeypatch.setattr("stream_ssl.producers.sources.live_robot.MAX_TOPICS", 10)
    counts = []

    def script(connection):
        for first in range(0, 3000, 100):
            connection.send(
                advertised(*(f"/camera{n}" for n in range(first, first + 100)), first=first)
            )
        asked = subscriptions(connection)
        counts.append(len(asked))
        connection.send(json.dumps({"op": "unadvertise", "channelIds": [*asked, 77, "x", None]}))
        connection.send(advertised("/another", first=9000))
        (subscription,) = subscriptions(connection).values()
        connection.send(data_of(subscription, raw(8)))

    with server_that(script) as url:
        source = Ros(url, codec="raw")
        sample, _ = next(source.samples())
        source.stop()
    assert counts == [10]
    assert sample.meta["topic"] == "/another"
    assert source.skipped.by_reason["channels"] == 2990


def shake_hands(peer):
    """Answer a client's handshake on a bare socket."""
    from websockets.utils import accept_key

    asked = b""
    while b"\r\n\r\n" not in asked:
        asked += peer.recv(4096)
    key = asked.partition(b"Sec-WebSocket-Key: ")[2].partition(b"\r\n")[0].decode()
    peer.sendall(
        b"HTTP/1.1 101 Switching\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Protocol: foxglove.websocket.v1\r\n"
        + f"Sec-WebSocket-Accept: {accept_key(key)}\r\n\r\n".encode()
    )


@contextmanager
def bare_server(script):
    """A server that sends bare bytes: `script(peer)` runs for each client."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def talk():
            while True:
                try:
                    peer, _ = listening.accept()
                except OSError:
                    return
                with peer:
                    peer.settimeout(DEADLINE)
                    try:
                        script(peer)
                        while peer.recv(65_536):
                            pass
                    except OSError:
                        pass

        thread = threading.Thread(target=talk)
        thread.start()
        yield f"ws://127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)
        thread.join(DEADLINE)


def frame(opcode, data, fin=True):
    return Frame(opcode, data, fin).serialize(mask=False)


def huge(peer):
    shake_hands(peer)
    peer.sendall(b"\x82\x7f" + (2**40).to_bytes(8, "big") + bytes(1000))


def fragments(peer):
    """A message of more than the limit, in fragments."""
    shake_hands(peer)
    part = bytes(2**14)
    peer.sendall(frame(Opcode.BINARY, part, False))
    for _ in range(80):
        peer.sendall(frame(Opcode.CONT, part, False))


def wrong_frame(peer):
    shake_hands(peer)
    peer.sendall(b"\xff\xff\xff\xff")


def closing(peer):
    shake_hands(peer)
    peer.sendall(frame(Opcode.CLOSE, struct.pack("!H", 1013) + b"try\x1b later"))


def closing_at_once(peer):
    """A close that arrives together with a message that the client answers."""
    shake_hands(peer)
    close = frame(Opcode.CLOSE, struct.pack("!H", 1001) + b"restarts")
    peer.sendall(frame(Opcode.TEXT, advertised("/front").encode()) + close)


def ending(peer):
    shake_hands(peer)
    peer.close()


def dripping(peer):
    """A handshake that never ends, a byte at a time."""
    for sign in b"HTTP/1.1 101 Switching\r\n" + b"a: b\r\n" * 100:
        peer.sendall(bytes([sign]))
        time.sleep(0.05)


HOSTILE = {
    "another protocol": (lambda peer: peer.sendall(b"SSH-2.0-OpenSSH\r\n\r\n"), "no WebSocket"),
    "endless headers": (
        lambda peer: peer.sendall(b"HTTP/1.1 101 x\r\n" + b"a: b\r\n" * 100_000),
        "no WebSocket|[Bb]roken pipe|reset",
    ),
    "a web server": (
        lambda peer: peer.sendall(b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n"),
        "HTTP 404",
    ),
    "a redirect": (
        lambda peer: peer.sendall(
            b"HTTP/1.1 302 No\r\nLocation: ws://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n"
        ),
        "HTTP 302",
    ),
    "a handshake that never ends": (dripping, "no WebSocket handshake within 0.4 s"),
    "a huge frame": (huge, "has more than 1048576 bytes"),
    "endless fragments": (fragments, "has more than 1048576 bytes"),
    "a wrong frame": (wrong_frame, "the server broke the protocol"),
    "a close": (closing, r"the server closed the connection: 1013 .*try\? later"),
    "a close at once": (closing_at_once, "the server closed the connection: 1001 .*restarts"),
    "an end": (ending, "the connection broke"),
}


@table("kind", HOSTILE)
def test_the_source_gives_up_a_hostile_server_and_names_the_cause(kind, monkeypatch, caplog):
    monkeypatch.setattr("stream_ssl.producers.sources.web_socket.MAX_MESSAGE", 2**20)
    script, why = HOSTILE[kind]
    with bare_server(script) as url:
        source = Ros(url, timeout=0.4, retry_seconds=0.01, give_up_seconds=0.05)
        with pytest.raises(SourceError, match=rf"source 'ros': no frame for \d+ s: .*({why})"):
            next(source.samples())


def test_many_tiny_fragments_form_one_message():
    content = data_of(0, raw(8))

    def script(peer):
        shake_hands(peer)
        peer.sendall(frame(Opcode.TEXT, advertised("/good").encode()))
        peer.recv(65_536)
        parts = [frame(Opcode.BINARY, b"", False)] + [frame(Opcode.CONT, b"", False)] * 20_000
        parts += [frame(Opcode.CONT, content[n : n + 7], False) for n in range(0, len(content), 7)]
        parts.insert(10_000, frame(Opcode.PING, b"are you there"))
        peer.sendall(b"".join(parts) + frame(Opcode.CONT, b""))

    with bare_server(script) as url:
        source = Ros(url, codec="raw")
        sample, _ = next(source.samples())
        source.stop()
    assert number_of(sample) == 8
