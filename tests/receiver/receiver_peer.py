"""A receiver in a thread, and a peer that speaks raw frames to it."""

import json
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import zmq

from stream_ssl.journal.consumer_offsets import ConsumerOffsets
from stream_ssl.journal.journal import Journal
from stream_ssl.journal.reader import JournalReader
from stream_ssl.receiver.receiver import Receiver
from stream_ssl.wire import Ack, Data, Hello, Nack, Sample, Welcome, decode, encode

DEADLINE = 120.0
SCRIPT = Path(__file__).with_name("receiver_process.py")
KIB = 1 << 10
MIB = 1 << 20
_READY = b"\x05READY\x0bSocket-Type" + (6).to_bytes(4, "big") + b"DEALER"
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
GREETING += b"\x04" + bytes((len(_READY),)) + _READY


def packet(sequence, samples=2, side=4, position=None):
    """Return DATA of raw grey images whose pixels contain the sequence."""
    rows = [
        Sample(f"{sequence}-{n}", bytes([sequence % 256]) * side**2, "raw", (side, side, 1), 1.0)
        for n in range(samples)
    ]
    return Data.pack(sequence, rows, position)


def allow(path, **keys):
    """Write an allow-list of key pairs by name, and return its path."""
    path.write_text(json.dumps({name: pair.public for name, pair in keys.items()}))
    return path


class Peer:
    """A DEALER that sends the messages of a test."""

    def __init__(self, endpoint, keys=None, server=None, route=None):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        if route is not None:
            self.socket.setsockopt(zmq.ROUTING_ID, route)
        if keys is not None:
            self.socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public.encode())
            self.socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
            self.socket.setsockopt(zmq.CURVE_SERVERKEY, server.public.encode())
        self.socket.connect(endpoint)
        self.through = self.credit = 0

    def say(self, message):
        self.socket.send_multipart(encode(message))

    def frames(self, *frames):
        self.socket.send_multipart(list(frames))

    def hear(self, kind, seconds=DEADLINE):
        """Return the next message of a kind, and note each ACK before it."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if not self.socket.poll(int(left * 1000) + 1):
                break
            message = decode(self.socket.recv_multipart())
            if isinstance(message, Ack | Welcome):
                self.credit = message.credit
            if isinstance(message, Ack):
                self.through = message.through
            if isinstance(message, kind):
                return message
        raise AssertionError(f"no {kind} in time")

    def silent(self, seconds):
        return not self.socket.poll(int(seconds * 1000))

    def hello(self, name="robot", epoch=1, first=1):
        self.say(Hello(name, epoch, first))
        return self.hear(Welcome)

    def acked(self, sequence):
        """Wait until a sequence is acknowledged."""
        end = time.monotonic() + DEADLINE
        while self.through < sequence:
            assert time.monotonic() < end, f"{sequence} is not acknowledged in time"
            self.hear(Ack)

    def nacked(self):
        nack = self.hear(Nack)
        return nack.reason, nack.sequence, nack.permanent

    def with_credit(self):
        while not self.credit:
            self.hear(Ack)

    def close(self):
        self.socket.close()
        self.context.term()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def begun(endpoint):
    """Return a TCP socket that has greeted the receiver, and may send frames of ZMTP."""
    host, port = endpoint.removeprefix("tcp://").split(":")
    peer = socket.create_connection((host, int(port)), timeout=60.0)
    peer.sendall(GREETING)
    return peer


@contextmanager
def receiver(folder, bind="tcp://127.0.0.1:0"):
    """Yield a receiver in a process of its own, and its endpoint."""
    command = [sys.executable, str(SCRIPT), str(folder), bind]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        endpoint = process.stdout.readline().strip()
        assert endpoint, "the receiver did not start"
        yield process, endpoint
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


class Running:
    """A receiver at work in a thread, with the sums of its records."""

    def __init__(self, folder, budget=256 * MIB, bind="tcp://127.0.0.1:0", **settings):
        self.folder = folder
        self.journal = Journal(folder / "journal", budget=budget)
        self.offsets = ConsumerOffsets(folder)
        try:
            self.receiver = Receiver(self.journal, self.offsets, bind, **settings)
        except BaseException:
            self.journal.close()
            raise
        self.stop = threading.Event()
        self.records = []
        self.error = None
        self.thread = threading.Thread(target=self._run)
        self.endpoint = self.receiver.endpoint

    def _run(self):
        try:
            for record in self.receiver.run(self.stop):
                self.records.append(record)
        except BaseException as error:
            self.error = error

    def total(self, name):
        return sum(getattr(record, name) for record in list(self.records))

    def counted(self, name):
        return sum((Counter(getattr(record, name)) for record in list(self.records)), Counter())

    @property
    def last(self):
        return self.records[-1]

    def journalled(self):
        """Return (producer, sequence) of all records, in order."""
        reader, position, found = JournalReader(self.journal.path), 1, []
        while records := reader.read(position):
            found += [(r.producer, r.sequence) for r in records]
            position = records[-1].position + 1
        reader.close()
        return found

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.stop.set()
        self.thread.join(DEADLINE)
        assert not self.thread.is_alive()
        self.journal.close()
        if self.error is not None:
            raise self.error
