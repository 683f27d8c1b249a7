"""Gate 9: SIGSTOP of either side, and a connection that is cut, delayed and half-opened."""

from __future__ import annotations

import contextlib
import random
import signal
import socket
import threading
import time
from pathlib import Path

import numpy as np
from harness import TINY, processes, stop, until

from chaos.samples import held
from stream_ssl.producers import Producer
from stream_ssl.receiver.listener import HEARTBEAT_TIMEOUT_MS

IMAGE = np.random.default_rng(0).integers(0, 256, (16, 16, 3), np.uint8)
RECOVERY_SECONDS = 3 * HEARTBEAT_TIMEOUT_MS / 1000


def stopped(folder: Path, seconds: float) -> dict[str, float]:
    """Stop a receiver, then a producer, for these seconds. Measure until each continues."""
    with processes(folder, whole=True) as run:
        receiver = run.role("receiver")
        with Producer(run.address, "watched", linger=0.0) as producer:
            sent = _send(producer, 20)
            producer.flush(60)
            receiver.send_signal(signal.SIGSTOP)
            sent += _send(producer, 20, sent)
            time.sleep(seconds)
            receiver.send_signal(signal.SIGCONT)
            began = time.monotonic()
            producer.flush(60)
            by_receiver = time.monotonic() - began
        other = run.produce(100_000, "--shape.rate", "200", name="stopped")
        until(lambda: len(held(folder)) > sent + 50, lambda: run.log("stopped"))
        other.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        before = len(held(folder))
        other.send_signal(signal.SIGCONT)
        began = time.monotonic()
        until(lambda: len(held(folder)) > before, lambda: run.log("stopped"))
        by_producer = time.monotonic() - began
        assert stop(other) == 0, run.log("stopped")
        assert stop(receiver) == 0
        missing = run.log("receiver").count("not in this journal")
    ids = held(folder)
    return {
        "seconds": seconds,
        "receiver_back": by_receiver,
        "producer_back": by_producer,
        "lost": sent - len({name for producer, name in ids if producer == "watched"}),
        "twice": len(ids) - len(set(ids)),
        "told_lost": missing,
    }


def relayed(folder: Path, samples: int, harms: int, seed: int = 0) -> dict[str, int]:
    """Send through a relay that repeatedly cuts, delays and half-opens the connection."""
    with processes(folder, TINY, whole=True) as run:
        receiver = run.role("receiver")
        with Relay(run.address, harms, seed) as relay, Producer(relay.address, "robot") as producer:
            for number in range(samples):
                producer.send(IMAGE, f"robot-{number}", timeout=120)
                if number % 10 == 0:
                    time.sleep(0.05)
            producer.flush(120)
        assert stop(receiver) == 0
    ids = held(folder)
    return {
        "harms": relay.harms,
        "samples": samples,
        "lost": samples - len(set(ids)),
        "twice": len(ids) - len(set(ids)),
    }


def _send(producer: Producer, count: int, first: int = 0) -> int:
    for number in range(first, first + count):
        producer.send(IMAGE, f"watched-{number}")
    return count


class Relay:
    """A TCP relay to an address that harms its connections: each is cut after a while, stands still
    for a while, or hears nothing more while its other end goes on."""

    def __init__(self, address: str, most: int, seed: int) -> None:
        host, port = address.removeprefix("tcp://").split(":")
        self._to, self._draw = (host, int(port)), random.Random(seed)
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"
        self.harms, self._most = 0, most
        self._end = threading.Event()
        self._threads = [threading.Thread(target=self._accept)]

    def _accept(self) -> None:
        while not self._end.is_set():
            with contextlib.suppress(OSError):
                near, _ = self._server.accept()
                far = socket.create_connection(self._to)
                seed = self._draw.getrandbits(32)  # both directions are harmed at one time
                for ends in ((near, far), (far, near)):
                    thread = threading.Thread(target=self._pump, args=(*ends, random.Random(seed)))
                    self._threads.append(thread)
                    thread.start()

    def _pump(self, source: socket.socket, sink: socket.socket, draw: random.Random) -> None:
        harm_at = time.monotonic() + draw.uniform(0.2, 2.0)
        source.settimeout(0.05)
        with contextlib.suppress(OSError), source, sink:
            while not self._end.is_set():
                if time.monotonic() > harm_at and self.harms < self._most:
                    how, self.harms = draw.choice(("cut", "delay", "half")), self.harms + 1
                    if how == "cut":
                        sink.shutdown(socket.SHUT_RDWR)
                        return
                    if how == "half":
                        self._swallow(source, 4.0)  # beyond the heartbeats' time-out
                        return
                    self._end.wait(draw.uniform(0.1, 1.0))
                    harm_at = time.monotonic() + draw.uniform(0.2, 2.0)
                try:
                    data = source.recv(1 << 16)
                except TimeoutError:
                    continue
                if not data:
                    return
                sink.sendall(data)

    def _swallow(self, source: socket.socket, seconds: float) -> None:
        """Receive all bytes, and forward none."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self._end.is_set():
            with contextlib.suppress(TimeoutError):
                if not source.recv(1 << 16):
                    return

    def __enter__(self) -> Relay:
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        for thread in self._threads:
            thread.join(10)
