"""A producer written from docs/wire.md, with a fault for each of its rules."""

import itertools
import threading
import time

import zmq

from stream_ssl.wire import Ack, Bye, Data, Hello, Nack, Sample, Welcome, WireError, decode, encode

FAULTS = {
    "bad checksum": "framing",
    "no second hello": "greeting",
    "starts at 1": "numbering",
    "forgets the position": "restart",
    "skips what was sent": "reconnect",
    "changes packets": "reconnect",
    "deaf to gap": "rewind",
    "rewinds each time": "rewind",
    "deaf to hello-required": "hello-required",
    "never asks": "silence",
    "deaf to bye": "bye",
    "overdraws": "credit",
    "gives up": "credit",
    "insists": "refused",
    "never stops": "stop",
    "large packets": "limits",
    "strict about keys": "unknown-keys",
    "goes by acks": "repeated-ack",
    "first is 1": "lost-journal",
}
PER_PACKET = 4


class MiniProducer(threading.Thread):
    """A producer that sends numbered samples until `end` is called."""

    def __init__(self, address, fault=None):
        super().__init__(daemon=True)
        self.address, self.fault = address, fault
        self.ended = threading.Event()
        self.packets, self.sent, self.first, self.through = {}, 0, 1, None
        self.last_rewind = (0, 0.0)
        self.copies = itertools.count()
        self.start()

    def end(self):
        self.ended.set()
        self.join(10)

    def run(self):
        self.context = zmq.Context()
        while not self.ended.is_set():
            self.socket = self.context.socket(zmq.DEALER)
            self.socket.linger = 0
            self.monitor = self.socket.get_monitor_socket()
            self.socket.connect(self.address)
            self.serve()
            self.socket.disable_monitor()
            self.monitor.close(0)
            self.socket.close(0)
        self.context.destroy(0)

    def serve(self):
        self.active, self.hello_at, self.heard = False, 0.0, time.monotonic()
        while not self.ended.is_set():
            if self.monitor.poll(0):
                event = int.from_bytes(self.monitor.recv_multipart()[0][:2], "little")
                if event == zmq.EVENT_DISCONNECTED:
                    return
            now = time.monotonic()
            unacked = self.through is not None and self.sent > self.through
            if self.active and unacked and now - self.heard > 5 and self.fault != "never asks":
                self.active, self.hello_at = False, 0.0
            if not self.active and now >= self.hello_at:
                self.hello_at = now + (99 if self.fault == "no second hello" else 1.0)
                first = 1 if self.fault == "first is 1" else self.first
                self.socket.send_multipart(encode(Hello("mini", 1, first)))
            if self.active:
                self.send()
            if self.socket.poll(5) and not self.hear(self.socket.recv_multipart()):
                self.ended.set()

    def packet(self, sequence):
        if sequence not in self.packets or self.fault == "changes packets":
            item = self.item + sequence - self.base
            extra = str(next(self.copies)) if self.fault == "changes packets" else ""
            count = min(PER_PACKET, self.limits.max_samples)
            if self.fault == "large packets":
                count = PER_PACKET
            rows = [
                Sample(f"{item}-{n}{extra}", bytes(16), "raw", (4, 4, 1), 1.0) for n in range(count)
            ]
            self.packets[sequence] = Data.pack(sequence, rows, item)
        return self.packets[sequence]

    def send(self):
        packet = self.packet(self.sent + 1)
        waiting = sum(p.size for s, p in self.packets.items() if self.through < s <= self.sent)
        room = self.credit - waiting - packet.size
        if room < 0 and self.fault != "overdraws":
            if self.fault == "gives up" and self.credit == 0:
                self.socket.send_multipart(encode(Bye("no credit")))
                self.ended.set()
            return
        frames = packet.encode()
        if self.fault == "bad checksum":
            frames[1] = frames[1][:8] + bytes(4)
        self.socket.send_multipart(frames)
        self.sent += 1
        time.sleep(0.01)

    def hear(self, frames):
        self.heard = time.monotonic()
        try:
            message = decode(frames)
        except WireError as error:
            return error.reason != "version" or self.fault == "never stops"
        known = Welcome.__slots__ if isinstance(message, Welcome) else Ack.__slots__
        if self.fault == "strict about keys" and isinstance(message, Welcome | Ack):
            import msgpack

            if set(msgpack.unpackb(frames[1])) != set(known):
                return False
        match message:
            case Welcome():
                self.welcomed(message)
            case Ack():
                again = message.through <= self.through
                self.through, self.credit = max(self.through, message.through), message.credit
                if self.fault == "goes by acks" and again:
                    self.sent += 1
                self.first = self.through + 1
            case Bye() if self.fault != "deaf to bye":
                self.active, self.hello_at = False, time.monotonic() + 1.0
            case Nack(reason="gap") if self.active and self.fault != "deaf to gap":
                seen, until = self.last_rewind
                if seen != message.sequence or self.heard > until:
                    self.sent = message.sequence - 1
                    self.last_rewind = (message.sequence, self.heard + 1.0)
                if self.fault == "rewinds each time":
                    self.last_rewind = (0, 0.0)
                    self.send()
            case Nack(reason="hello-required") if self.fault != "deaf to hello-required":
                self.active, self.hello_at = False, 0.0
            case Nack(permanent=True, reason="malformed"):
                if self.fault == "insists":
                    self.sent = message.sequence - 1
            case Nack(permanent=True):
                return self.fault == "never stops"
        return True

    def welcomed(self, welcome):
        if self.through is None:
            resume = 0 if self.fault == "starts at 1" else welcome.resume
            self.base, self.through, self.sent = resume, resume, resume
            self.item = welcome.position or 0
            if self.fault == "forgets the position":
                self.item = 0
        else:
            self.through = max(self.through, welcome.resume)
            self.sent = max(self.through, self.sent if self.fault == "skips what was sent" else 0)
        self.first = self.through + 1
        self.limits, self.credit = welcome, welcome.credit
        self.active = True
