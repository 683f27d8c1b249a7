"""Clients that break the rules: other clients go on, and memory stays bounded."""

import contextlib
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import zmq
from receiver_peer import GREETING, KIB, MIB, Peer, begun, packet, receiver

from stream_ssl.receiver.backlogs import WIRE_PER_CREDIT, Backlogs
from stream_ssl.wire import Data, Hello, Sample, Welcome, decode, encode
from stream_ssl.wire.messages import prefix

MAX_RSS = 300 * MIB


class Flood(threading.Thread):
    """Sends one message again and again, as fast as the receiver takes it."""

    def __init__(self, endpoint, *frames):
        super().__init__(daemon=True)
        self.endpoint, self.frames = endpoint, frames
        self.enough = threading.Event()
        self.sent = 0

    def run(self):
        with Peer(self.endpoint) as peer:
            peer.socket.setsockopt(zmq.SNDHWM, 4)
            peer.socket.setsockopt(zmq.SNDTIMEO, 100)
            peer.hello("hostile")
            while not self.enough.is_set():
                while peer.socket.poll(0):
                    peer.socket.recv_multipart()
                try:
                    peer.frames(*self.frames)
                    self.sent += 1
                except zmq.Again:
                    pass

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.enough.set()
        self.join()


def rounds(peer, first, count):
    """Send `count` packets, and wait for each ACK before the next packet."""
    for sequence in range(first, first + count):
        peer.say(packet(sequence))
        peer.acked(sequence)


def processor_seconds(process):
    times = psutil.Process(process.pid).cpu_times()
    return times.user + times.system


def peak_rss(process):
    """Return the largest resident memory that the process has had, in bytes."""
    (line,) = re.findall(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())
    return int(line) * KIB


def maps(count):
    """A msgpack list of empty maps."""
    return b"\xdd" + count.to_bytes(4, "big") + b"\x80" * count


@pytest.mark.parametrize(
    "frames",
    [
        (prefix(Hello.kind), b"\x81\xa1a" + maps(8 * MIB - 16)),
        encode(Data(1, b"\x81\xa1a" + maps(8 * MIB - 16), b"")),
    ],
    ids=["hello", "header"],
)
def test_a_flood_of_maps_that_are_costly_to_unpack_delays_nobody(tmp_path, frames):
    with receiver(tmp_path) as (process, endpoint), Peer(endpoint) as good:
        good.hello("good")
        rounds(good, 1, 10)
        before = processor_seconds(process)
        with Flood(endpoint, *frames) as flood:
            rounds(good, 11, 40)
            while flood.sent < 20:
                time.sleep(0.01)
            rss = psutil.Process(process.pid).memory_info().rss
        # To receive 8 MiB takes some milliseconds; to unpack them would take seconds.
        spent = (processor_seconds(process) - before) / flood.sent
        assert spent < 0.1
        assert rss < MAX_RSS
        assert process.poll() is None


def endless(endpoint, kilobytes, frames):
    """Return a socket that has sent many frames of one message without its last frame."""
    transport, _, rest = endpoint.partition("://")
    if transport == "ipc":
        peer = socket.socket(socket.AF_UNIX)
        peer.settimeout(60.0)
        peer.connect(rest)
        peer.sendall(GREETING)
    else:
        peer = begun(endpoint)
    frame = b"\x03" + (kilobytes * KIB).to_bytes(8, "big") + bytes(kilobytes * KIB)
    with contextlib.suppress(OSError):  # cut off
        for _ in range(frames):
            peer.sendall(frame)
    return peer


@pytest.mark.parametrize(
    ("transport", "kilobytes", "frames"),
    [("tcp", 8192, 200), ("tcp", 1, 100_000), ("ipc", 8192, 200), ("ipc", 1, 1_000_000)],
)
def test_a_connection_with_an_endless_message_is_cut_off(tmp_path, transport, kilobytes, frames):
    """libzmq keeps all frames in memory until the last one: here 200 frames of 8 MiB."""
    bind = "tcp://127.0.0.1:0" if transport == "tcp" else f"ipc://{tmp_path}/socket"
    with receiver(tmp_path, bind) as (process, endpoint), Peer(endpoint) as good:
        good.hello("good")
        with endless(endpoint, kilobytes, frames) as peer:
            good.hello("good")  # over ipc:// it may have been cut off too, and connects again
            rounds(good, 1, 10)
            peak = psutil.Process(process.pid).memory_info().rss
            with contextlib.suppress(ConnectionError):
                while peer.recv(4096):
                    pass
        assert peak < MAX_RSS


def test_a_message_of_millions_of_empty_frames_delays_nobody(tmp_path):
    """A frame takes 2 bytes here and some tens in libzmq: 8 MB would become two gigabytes."""
    with receiver(tmp_path) as (process, endpoint), Peer(endpoint) as good:
        good.hello("good")
        with begun(endpoint) as peer:
            time.sleep(0.3)  # for the receiver's part of the handshake
            with contextlib.suppress(OSError):  # cut off
                for _ in range(40):
                    peer.sendall(b"\x01\x00" * 100_000)
                peer.sendall(b"\x00\x00")
            for sequence in range(1, 101):  # it takes libzmq a second to have them all
                rounds(good, sequence, 1)
                time.sleep(0.02)
            assert peak_rss(process) < MAX_RSS


PING = b"\x04\x07\x04PING\x00\x1e"


def test_connections_that_break_with_waiting_messages_do_not_end_the_receiver(tmp_path):
    """After libzmq stopped reading, its heartbeats ended the process by a failed assertion."""
    with receiver(tmp_path) as (process, endpoint), Peer(endpoint) as good:
        good.hello("good")
        peers = [begun(endpoint) for _ in range(8)]
        time.sleep(0.3)
        for peer in peers:
            peer.setblocking(False)
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            with contextlib.suppress(OSError):
                peer.send((b"\0\0" * 500 + PING) * 40)
        time.sleep(0.1)
        for peer in peers:
            peer.close()  # by RST, as the kernel closes what a killed process left unread
        for sequence in range(1, 31):  # beyond three heartbeats
            rounds(good, sequence, 1)
            time.sleep(0.1)
        assert process.poll() is None


def test_a_flooding_connection_is_cut_off_while_nobody_reads():
    script = Path(__file__).with_name("flood_process.py")
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=True, timeout=100
    )
    cut, grown = map(int, done.stdout.split())
    assert cut == 1, done.stderr
    assert grown < 512 * MIB


def test_the_frames_of_a_message_cannot_forge_another_connection(tmp_path):
    with receiver(tmp_path) as (_, endpoint), Peer(endpoint) as good, zmq.Context() as context:
        good.hello("good")
        with context.socket(zmq.DEALER) as peer:
            peer.linger, peer.routing_id = 0, b"forged"
            peer.connect(endpoint)
            hello = encode(Hello("robot", 1, 1))
            peer.send_multipart([b""] * 5 + [b"forged", *hello])
            replies = []
            while peer.poll(500):
                replies.append(type(decode(peer.recv_multipart())))
            assert Welcome not in replies
            peer.send_multipart(hello)
            assert peer.poll(5000)
            assert type(decode(peer.recv_multipart())) is Welcome


def test_unfinished_messages_of_many_connections_are_bounded_together(tmp_path):
    """Each connection alone stays within its limit."""
    with receiver(tmp_path) as (process, endpoint), Peer(endpoint) as good:
        good.hello("good")
        with contextlib.ExitStack() as stack:
            frame = b"\x03" + MIB.to_bytes(8, "big") + bytes(MIB)
            for _ in range(40):
                peer = stack.enter_context(begun(endpoint))
                with contextlib.suppress(OSError):
                    for _ in range(20):
                        peer.sendall(frame)
            good.hello("good")  # it may have been cut off too
            rounds(good, 1, 10)
            assert psutil.Process(process.pid).memory_info().rss < 1.5 * MAX_RSS


def test_tiny_packets_take_no_more_on_the_wire_than_their_credit_allows_for():
    data = Data.pack(1, [Sample("1", b"\0", shape=(1, 1, 1))], None)
    wire = sum(len(frame) + 42 for frame in data.encode())  # 9 of ZMTP and 33 of CURVE
    assert wire <= WIRE_PER_CREDIT * data.size


class Watched:
    """A ROUTER whose backlogs are bounded, and a DEALER connected to it."""

    def __init__(self, limit):
        self.context = zmq.Context()
        self.router = self.context.socket(zmq.ROUTER)
        self.router.linger = 0
        self.backlogs = Backlogs(self.router, limit, memory=1 << 40)
        self.router.bind("tcp://127.0.0.1:0")
        self.peer = self.context.socket(zmq.DEALER)
        self.peer.linger = 0
        self.peer_monitor = self.peer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self.peer.connect(self.router.getsockopt_string(zmq.LAST_ENDPOINT))

    def read(self, count):
        for _ in range(count):
            assert self.router.poll(10_000)
            _, *frames = self.router.recv_multipart(copy=False)
            self.backlogs.read(frames)

    def check(self):
        """Return how many connections a due check cuts off."""
        self.backlogs.follow()
        return self.backlogs.check(time.monotonic() + 1.0)

    def __enter__(self):
        self.peer.send(b"")
        assert self.router.poll(10_000)
        self.check()
        self.read(1)
        return self

    def __exit__(self, *_):
        self.backlogs.close()
        if self.backlogs.cut:  # libzmq aborts if a socket is closed while its connection breaks
            assert self.peer_monitor.poll(10_000)
            time.sleep(0.1)
        self.context.destroy(0)


@pytest.mark.parametrize("frames", [1, 8])
def test_a_connection_with_a_large_backlog_of_whole_messages_is_cut_off(frames):
    with Watched(MIB) as watched:
        for _ in range(8):
            watched.peer.send_multipart([bytes(MIB // 4 // frames)] * frames)
        end = time.monotonic() + 10.0
        while not watched.check() and time.monotonic() < end:
            time.sleep(0.01)
        assert watched.backlogs.cut == 1


@pytest.mark.parametrize("frames", [1, 8])
def test_a_connection_that_is_read_may_send_without_limit(frames):
    with Watched(MIB) as watched:
        for _ in range(40):
            watched.peer.send_multipart([bytes(MIB // 2 // frames)] * frames)
            watched.read(1)
            assert watched.check() == 0


def test_many_small_messages_do_not_raise_the_limit_of_a_backlog():
    """The bytes that are added for each message are an upper bound, and must not accumulate."""
    with Watched(MIB) as watched:
        for _ in range(40):
            for _ in range(1000):
                watched.peer.send(b"")
            watched.read(1000)
            assert watched.check() == 0
        for _ in range(5):
            watched.peer.send(bytes(MIB // 4))
        end = time.monotonic() + 10.0
        while not watched.check() and time.monotonic() < end:
            time.sleep(0.01)
        assert watched.backlogs.cut == 1


def test_a_connection_that_is_cut_off_counts_once_although_later_checks_see_it():
    """libzmq takes a while to close the connection."""
    with Watched(MIB) as watched:
        for _ in range(8):
            watched.peer.send(bytes(MIB // 4))
        now, end = time.monotonic(), time.monotonic() + 10.0
        while not watched.backlogs.cut and time.monotonic() < end:
            now += 1.0  # each look is due, and allows few bytes more
            watched.backlogs.check(now)
        for look in range(1, 4):
            watched.backlogs.check(now + 1.0 * look)
        assert watched.backlogs.cut == 1
