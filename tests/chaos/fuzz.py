"""Gate 10: a fuzzer over every kind of message, beside a producer that keeps to the rules.

The other's rate is compared with its own beside a client that sends sound messages: what the
machine gives to two clients is then not held against the receiver.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from pathlib import Path

import msgpack
import psutil
import zmq
from receiver_peer import Peer, packet, receiver

from stream_ssl.wire import Ack, Bye, Data, Hello, Nack, Welcome, encode

ROUNDS = 1.0  # seconds of the good producer between two changes of the other client
PAUSE = 0.002  # between two of the other client's messages: it may ask for a part of the machine


def run(folder: Path, seconds: float, seed: int = 0) -> dict[str, float]:
    """Alternate between a correct and a fuzzing client, second by second.

    Returns:
        messages sent by the fuzzer, the receiver's most resident memory, and the good producer's
        rates beside each client.
    """
    draw = random.Random(seed)
    spent, done, sent = Counter[bool](), Counter[bool](), Counter[bool]()
    peak, sequence = 0, 1
    with receiver(folder) as (process, endpoint), Peer(endpoint) as good:
        good.hello("good")
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for hostile in (False, True):
                with Other(endpoint, hostile, draw.randrange(1 << 30)) as other:
                    began = time.monotonic()
                    while time.monotonic() < began + ROUNDS:
                        good.say(packet(sequence))
                        good.acked(sequence)
                        sequence += 1
                        done[hostile] += 1
                    spent[hostile] += time.monotonic() - began
                sent[hostile] += other.sent
                peak = max(peak, psutil.Process(process.pid).memory_info().rss)
                assert process.poll() is None, "the receiver ended"
    rates = {hostile: done[hostile] / spent[hostile] for hostile in (False, True)}
    return {
        "messages": sent[True],
        "rss_mb": peak / 1e6,
        "rate_beside_sound": rates[False],
        "rate_beside_fuzzer": rates[True],
        "share": rates[True] / rates[False],
    }


class Other(threading.Thread):
    """A client that sends correct messages, or fuzzed messages."""

    def __init__(self, endpoint: str, hostile: bool, seed: int) -> None:
        super().__init__(daemon=True)
        self.endpoint, self.hostile, self.seed = endpoint, hostile, seed
        self.enough, self.sent = threading.Event(), 0

    def run(self) -> None:
        draw = random.Random(self.seed)
        with Peer(self.endpoint) as peer:
            peer.socket.setsockopt(zmq.SNDTIMEO, 100)
            peer.socket.setsockopt(zmq.SNDHWM, 4)
            sequence = peer.hello("other", time.time_ns()).resume + 1
            while not self.enough.is_set():
                while peer.socket.poll(0):
                    peer.socket.recv_multipart()
                frames = mutated(draw) if self.hostile else encode(packet(sequence, samples=8))
                sequence += 1
                try:
                    peer.frames(*frames)
                    self.sent += 1
                except zmq.Again:
                    pass
                time.sleep(PAUSE)

    def __enter__(self) -> Other:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.enough.set()
        self.join()


def mutated(draw: random.Random) -> list[bytes]:
    """Return a message of a random kind with a few changes, or bytes that are no message."""
    number = draw.choice((0, 1, 2, draw.getrandbits(31), (1 << 62) - 1, (1 << 64) - 1))
    text = draw.choice(("robot", "", "x" * 300, "\x1b[2J\n", "a/b", "\u202e"))
    message = draw.choice(
        (
            Hello("robot", number, 1, agent=text),
            Hello("robot", 1, number),
            packet(min(number, 1 << 40), samples=draw.randint(1, 40)),
            Data(min(number, 1 << 62), draw.randbytes(draw.randint(0, 200)), b"x" * 100),
            Ack(number % (1 << 62), number % (1 << 62)),
            Nack(1, "gap", text, permanent=False),
            Welcome(1, None, 1, 1, 1, ("raw",), 1),
            Bye(text),
        )
    )
    frames = [bytes(frame) for frame in encode(message)]
    for _ in range(draw.randint(0, 3)):
        at = draw.randrange(len(frames)) if frames else 0
        how = draw.randint(0, 7)
        if how == 0 and frames and frames[at]:
            flipped = bytearray(frames[at])
            flipped[draw.randrange(len(flipped))] ^= 1 << draw.randint(0, 7)
            frames[at] = bytes(flipped)
        elif how == 1 and frames:
            frames[at] = frames[at][: draw.randint(0, len(frames[at]))]
        elif how == 2 and frames:
            frames[at] += draw.randbytes(draw.randint(1, 5000))
        elif how == 3 and len(frames) > 1:
            del frames[at]
        elif how == 4 and len(frames) < 40:
            frames.insert(at, draw.randbytes(draw.randint(0, 50)))
        elif how == 5 and frames:
            frames[at] = deep(draw)
        elif how == 6 and frames and len(frames[0]) == 4:
            frames[0] = frames[0][:3] + bytes([draw.randint(0, 255)])
        elif frames:
            frames[at] = msgpack.packb({text: number, "producer": [text] * draw.randint(0, 50)})
    return frames or [b""]


def deep(draw: random.Random) -> bytes:
    """Return msgpack that is deeply nested, or that claims to be long."""
    return draw.choice(
        (
            b"\x91" * draw.randint(1, 5000) + b"\x90",
            b"\x81\xa1a" * draw.randint(1, 3000) + b"\xc0",
            b"\xdd\xff\xff\xff\xff" + b"\x80" * draw.randint(0, 60_000),
            b"\xdf\xff\xff\xff\xff",
            b"\xdb\xff\xff\xff\xff" + b"x" * 100,
            b"\xc6\x7f\xff\xff\xff",
        )
    )
