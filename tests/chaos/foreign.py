"""Gate 19: raw TCP of other protocols, on every port of a run, beside a producer that goes on."""

from __future__ import annotations

import contextlib
import random
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import psutil
from harness import TINY, processes, until

from stream_ssl.daemon.endpoints import load
from stream_ssl.producers import Producer
from stream_ssl.wire import Hello, encode

CONNECTIONS = 40  # of ours, open at once
SPARE_DESCRIPTORS = 120  # beside those: the processes' own, and those about to be closed
MAX_GROWN_MB = 300  # as for a fuzzer of messages
PAUSE = 0.005  # between two connections
QUIET = 3.0  # seconds after the last connection in which the producer has to go on


def run(
    folder: Path,
    seconds: float,
    plain: bool,
    roles: Sequence[str] = ("receiver", "learner"),
    seed: int = 0,
    least: int = 60,
) -> dict[str, Any]:
    """Send foreign bytes to the data port and the HTTP ports of a run.

    It lasts for some seconds, or until `least` connections were made.

    Returns:
        connections made, the growth of each process, the most descriptors of one, samples of a good
        producer that were acknowledged meanwhile and afterwards, and whether the processes live.
    """
    settings = {**TINY, "access": "plain" if plain else None}
    with processes(folder, settings) as run, contextlib.ExitStack() as stack:
        started = {name: run.role(name) for name in roles}
        good = stack.enter_context(Good(folder))
        watched = {name: psutil.Process(process.pid) for name, process in started.items()}
        began = {name: process.memory_info().rss for name, process in watched.items()}
        attack = Attack(ports(folder), seed)
        rss, descriptors = dict(began), dict.fromkeys(roles, 0)
        end = time.monotonic() + seconds
        while (time.monotonic() < end or attack.made < least) and all(
            one.poll() is None for one in started.values()
        ):
            for _ in range(20):
                attack.connect()
            for name, process in watched.items():
                with contextlib.suppress(psutil.NoSuchProcess):
                    rss[name] = max(rss[name], process.memory_info().rss)
                    descriptors[name] = max(descriptors[name], process.num_fds())
        meanwhile = good.acked
        attack.close()
        with contextlib.suppress(AssertionError):
            until(lambda: good.acked > meanwhile, lambda: "", 20 * QUIET)
        return {
            "wire": "plain" if plain else "CURVE",
            "connections": attack.made,
            "grown_mb": {name: (rss[name] - began[name]) / 1e6 for name in started},
            "descriptors": max(descriptors.values()),
            "acked_meanwhile": meanwhile,
            "acked_after": good.acked - meanwhile,
            "alive": all(process.poll() is None for process in started.values()),
        }


def holds(found: dict[str, Any]) -> bool:
    """Return whether the processes live, continue, and need little memory and few descriptors."""
    return bool(
        found["alive"]
        and found["acked_meanwhile"]
        and found["acked_after"]
        and max(found["grown_mb"].values()) < MAX_GROWN_MB
        and found["descriptors"] < CONNECTIONS + SPARE_DESCRIPTORS
    )


def ports(folder: Path) -> list[int]:
    """Return the data port and the HTTP ports of a run."""
    entries = load(folder)
    addresses = [entries["receiver"]["data"], *(entry["http"] for entry in entries.values())]
    found = [urlsplit(address).port for address in addresses]
    return [port for port in found if port]


class Good(threading.Thread):
    """A producer that keeps to the rules, with what its receiver has acknowledged."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self._producer = Producer(run=folder, name="good", linger=0.0)
        self._enough = threading.Event()

    @property
    def acked(self) -> int:
        return self._producer.stats.acked.samples

    def run(self) -> None:
        draw = np.random.default_rng(0)
        while not self._enough.wait(0.02):
            pixels = draw.integers(0, 256, (16, 16), np.uint8)
            with contextlib.suppress(TimeoutError):
                self._producer.send(pixels, timeout=1.0)

    def __enter__(self) -> Good:
        self._producer.connect(60.0)
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._enough.set()
        self.join()
        with contextlib.suppress(Exception):
            self._producer.close(5.0)


class Attack:
    """Connections with the bytes of other protocols, the latest of them kept open."""

    def __init__(self, ports: list[int], seed: int) -> None:
        self._ports, self._draw = ports, random.Random(seed)
        self._open: list[socket.socket] = []
        self.made = 0

    def connect(self) -> None:
        """Open one connection and send a few pieces of one protocol."""
        draw = self._draw
        with contextlib.suppress(OSError):
            peer = socket.create_connection(("127.0.0.1", draw.choice(self._ports)), timeout=2.0)
            self._open.append(peer)
            self.made += 1
            peer.settimeout(0.2)
            for piece in foreign(draw):
                peer.sendall(piece)
        while len(self._open) > CONNECTIONS:
            peer = self._open.pop(draw.randrange(len(self._open)))
            if draw.random() < 0.5:  # by RST
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            peer.close()
        time.sleep(PAUSE)

    def close(self) -> None:
        for peer in self._open:
            peer.close()


def foreign(draw: random.Random) -> Iterator[bytes]:
    """Return the pieces of one connection, in a random protocol or in none."""
    data = draw.choice((zmtp_1, zmtp_2, zmtp_3, http, tls, ssh, noise))(draw)
    if draw.random() < 0.3 and data:  # almost true
        harmed = bytearray(data)
        for _ in range(draw.randint(1, 4)):
            harmed[draw.randrange(len(harmed))] = draw.randrange(256)
        data = bytes(harmed)
    while data:
        size = draw.choice((1, 10, 64, len(data)))
        yield data[:size]
        data = data[size:]


def frame(body: bytes, flags: int = 0, size: int | None = None) -> bytes:
    """Return a ZMTP 2 or 3 frame, whose size may be false."""
    size = len(body) if size is None else size
    if size < 256 and not flags & 2:
        return bytes((flags, size)) + body
    return bytes((flags | 2,)) + size.to_bytes(8, "big") + body


def messages(draw: random.Random) -> bytes:
    """Frames of our own messages, of none, and of sizes that never come."""
    hello = encode(Hello("mallory", 1, 1))
    return b"".join(
        draw.choice(
            (
                frame(bytes(hello[0]), 1) + frame(bytes(hello[1])),
                frame(b""),
                frame(draw.randbytes(draw.randint(0, 300)), draw.randint(0, 7)),
                frame(b"x", 2, draw.choice((1 << 20, 1 << 40, (1 << 63) - 1, (1 << 64) - 1))),
                frame(b"\x04PING\x00\x1e", 4),
                frame(b"\x09SUBSCRIBE" + b"x", 4),
                frame(b"\x05ERROR\x05oops!", 4),
            )
        )
        for _ in range(draw.randint(1, 6))
    )


def zmtp_1(draw: random.Random) -> bytes:
    sizes = [draw.randint(0, 40) for _ in range(draw.randint(0, 5))]
    identity = draw.choice((b"\x01\x00", b"\x03\x00id", b"\xff" + (1 << 62).to_bytes(8, "big")))
    return identity + b"".join(bytes((n + 1, draw.randint(0, 1))) + bytes(n) for n in sizes)


def zmtp_2(draw: random.Random) -> bytes:
    identity = frame(draw.randbytes(draw.choice((0, 5, 255))))
    kind = draw.choice((5, 6, 0, 200))
    return b"\xff" + bytes(8) + b"\x7f\x01" + bytes((kind,)) + identity + messages(draw)


def zmtp_3(draw: random.Random) -> bytes:
    mechanism = draw.choice((b"NULL", b"PLAIN", b"CURVE", b"GSSAPI", b"\xff" * 20)).ljust(20, b"\0")
    version, server = (
        draw.choice((b"\x03\x00", b"\x03\x01", b"\x09\x00")),
        draw.choice((b"\0", b"\1")),
    )
    greeting = b"\xff" + draw.randbytes(8) + b"\x7f" + version + mechanism + server + bytes(31)
    properties = (
        (b"Socket-Type", draw.choice((b"DEALER", b"PUB", b"", b"\xff" * 200))),
        (b"Identity", draw.randbytes(draw.choice((0, 5, 255)))),
        (draw.randbytes(draw.randint(0, 20)), draw.randbytes(draw.randint(0, 90))),
    )
    body = b"".join(bytes((len(k),)) + k + len(v).to_bytes(4, "big") + v for k, v in properties)
    handshake = draw.choice(
        (
            b"\x05READY" + body,
            b"\x05READY" + body[:-1],
            b"\x05HELLO\x01\x00" + draw.randbytes(192),
            b"\x05HELLO" + draw.randbytes(draw.randint(0, 40)),
            b"\x08INITIATE" + draw.randbytes(257),
            b"\x05ERROR\xff",
        )
    )
    return greeting + frame(handshake, 4) + messages(draw)


def http(draw: random.Random) -> bytes:
    """Return an HTTP request, as a browser sends it from another origin, or an invalid one."""
    host = b"Host: 127.0.0.1:5557\r\nOrigin: http://evil.example\r\n"
    body = draw.randbytes(draw.randint(0, 300))
    path = b"/" + b"h" * draw.randint(0, 60)
    length = b"Content-Length: %d\r\n" % draw.choice((len(body), 0, 1 << 40, -5 & 0xFF))
    return draw.choice(
        (
            b"POST " + path + b" HTTP/1.1\r\n" + host + length + b"\r\n" + body,
            b"GET " + path + b" HTTP/1.1\r\n" + host + b"\r\n",
            b"OPTIONS " + path + b" HTTP/1.1\r\n" + host + b"\r\n",
            b"GET / HTTP/1.1\r\n"
            + host
            + b"Upgrade: websocket\r\nConnection: Upgrade\r\n\r\n"
            + body,
            b"POST / HTTP/1.1\r\n"
            + host
            + b"Transfer-Encoding: chunked\r\n\r\nffffffff\r\n"
            + body,
            b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * draw.randint(0, 3000),
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + body,
            b"GET /%ff%00/../../etc/passwd?" + b"a=1&" * 50 + b" HTTP/9.9\r\n\r\n",
        )
    )


def tls(draw: random.Random) -> bytes:
    """Return a valid ClientHello with more bytes behind it."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = ssl.create_default_context().wrap_bio(incoming, outgoing, server_hostname="x.example")
    with contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read() + draw.randbytes(draw.randint(0, 50))


def ssh(draw: random.Random) -> bytes:
    return b"SSH-2.0-OpenSSH_9.6\r\n" + draw.randbytes(draw.randint(0, 900))


def noise(draw: random.Random) -> bytes:
    return draw.randbytes(draw.choice((1, 11, 64, 5000)))
