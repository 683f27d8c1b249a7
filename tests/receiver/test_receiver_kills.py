"""SIGKILL of a receiver process in mid-stream, with real producers: nothing lost or doubled."""

import random
import threading
import time
from collections import Counter

import numpy as np
from receiver_peer import receiver
from waiting import until

from stream_ssl.journal.journal import Journal
from stream_ssl.journal.reader import JournalReader
from stream_ssl.producers import Producer
from stream_ssl.wire import Data

KILLS = 6


class Sender(threading.Thread):
    """Sends numbered images until `enough` is set; then waits for all to be acknowledged."""

    def __init__(self, endpoint, name):
        super().__init__()
        self.producer = Producer(endpoint, name, packet_samples=8, linger=0.01)
        self.enough = threading.Event()
        self.sent = 0
        self.error = None

    def run(self):
        image = np.zeros((16, 16, 3), np.uint8)
        try:
            with self.producer:
                while not self.enough.is_set():
                    self.producer.send(image, f"{self.producer.name}-{self.sent}", timeout=60)
                    self.sent += 1
                    if self.sent % 50 == 0:
                        self.enough.wait(0.01)
                self.producer.flush(60)
        except BaseException as error:
            self.error = error


def held(folder):
    """Ids of all samples in the journal, in order."""
    reader, position, ids = JournalReader(folder / "journal"), 1, []
    while records := reader.read(position):
        for record in records:
            data = Data(record.sequence, record.header, record.payload)
            ids += [row["id"] for row, _ in data.rows()]
        position = records[-1].position + 1
    assert reader.corrupt == 0
    reader.close()
    return ids


def test_a_killed_receiver_neither_loses_nor_repeats_acknowledged_samples(tmp_path):
    draw = random.Random(3)
    with receiver(tmp_path) as (process, endpoint):
        senders = [Sender(endpoint, name) for name in ("left", "right")]
        for sender in senders:
            sender.start()
        until(lambda: all(sender.producer.stats.acked.samples for sender in senders))
        time.sleep(draw.uniform(0, 0.3))  # the random moment of the first kill
        process.kill()
    for _ in range(KILLS - 1):
        acked = sum(sender.producer.stats.acked.samples for sender in senders)
        with receiver(tmp_path, endpoint) as (process, _):
            until(lambda n=acked: sum(s.producer.stats.acked.samples for s in senders) > n)
            time.sleep(draw.uniform(0, 0.3))
            process.kill()
            process.wait()
            before = {s.producer.name: s.producer.stats.acked.samples for s in senders}
            counts = Counter(name.rpartition("-")[0] for name in held(tmp_path))
            assert all(counts[name] >= n for name, n in before.items())
    with receiver(tmp_path, endpoint) as (process, _):
        for sender in senders:
            sender.enough.set()
        for sender in senders:
            sender.join(90)
            assert sender.error is None
        process.terminate()
        assert process.wait(20) == 0

    ids = held(tmp_path)
    due = {f"{s.producer.name}-{n}" for s in senders for n in range(s.sent)}
    assert len(due) > 500
    assert len(ids) == len(set(ids))
    assert set(ids) == due
    journal = Journal(tmp_path / "journal")
    assert journal.damaged == 0
    journal.close()


def test_a_terminated_receiver_leaves_each_sent_sample_in_its_journal(tmp_path):
    with receiver(tmp_path) as (process, endpoint):
        producer = Producer(endpoint, "robot", linger=0.0)
        for n in range(100):
            producer.send(np.zeros((8, 8, 1), np.uint8), str(n))
        producer.flush(30)
        process.terminate()
        assert process.wait(20) == 0
        producer.close()
    assert held(tmp_path) == [str(n) for n in range(100)]
