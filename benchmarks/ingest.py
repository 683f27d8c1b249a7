"""Durable ingest: a producer process and a receiver process with fsync before each acknowledgement.

Each row is one kind of sample, with or without CURVE. The rate counts acknowledged samples while
the producer sends as fast as it can. The latency is the time from send() to the acknowledgement of
single packets on an idle connection. The journal is trimmed as by a learner's checkpoints.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from stream_ssl.journal.consumer_offsets import ConsumerOffsets
from stream_ssl.journal.journal import Journal
from stream_ssl.producers import Producer
from stream_ssl.receiver.access import Access
from stream_ssl.receiver.allow_list import AllowList
from stream_ssl.receiver.receiver import Receiver
from stream_ssl.wire import Keys, Sample

SECONDS = 5.0
WARM_UP_SECONDS = 1.0
LATENCY_PACKETS = 200
BUDGET = 1 << 30
MIN_SAMPLES = 40_000  # samples per second of 32 x 32 x 3
MIN_MEGABYTES = 150.0  # per second, with 100 KB images
MAX_RSS_MB = 300.0


def run(seconds: float = SECONDS) -> list[dict[str, Any]]:
    """Return rows for small raw samples and 100 KB images, without and with CURVE."""
    rows = []
    for curve in (False, True):
        rows.append(measure("32x32x3 raw, packets of 64", small(), 64, curve, seconds))
        rows.append(measure("100 KB images, packets of 1", large(), 1, curve, seconds))
    return rows


def small() -> list[Sample]:
    """Return raw 32 x 32 x 3 images."""
    draw = np.random.default_rng(0)
    images_NHWC = draw.integers(0, 256, (4096, 32, 32, 3), dtype=np.uint8)
    return [Sample.from_array(image, str(n), label=1) for n, image in enumerate(images_NHWC)]


def large() -> list[Sample]:
    """Return samples of 100 KB with the codec "jpeg"; the receiver does not inspect their bytes."""
    draw = np.random.default_rng(0)
    return [Sample(str(n), draw.bytes(100_000), "jpeg") for n in range(64)]


def measure(
    what: str, samples: list[Sample], packet_samples: int, curve: bool, seconds: float
) -> dict[str, Any]:
    """Return the row of one measurement."""
    with tempfile.TemporaryDirectory(prefix="stream-ssl-") as name:
        folder = Path(name)
        with receiver(folder, curve) as (endpoint, facts):
            producer = Producer(
                endpoint,
                "bench",
                keys=folder / "bench.secret.json" if curve else None,
                server_key=folder / "receiver.public.json" if curve else None,
                packet_samples=packet_samples,
            )
            with producer:
                producer.connect()
                rate, rate_bytes = throughput(producer, samples, seconds)
                waits = latencies(producer, samples, packet_samples)
        megabytes = rate_bytes / 1e6
        met = rate >= MIN_SAMPLES if packet_samples > 1 else megabytes >= MIN_MEGABYTES
        return {
            "samples": what,
            "curve": "yes" if curve else "no",
            "samples/s": round(rate),
            "MB/s": round(megabytes, 1),
            "ack p50 ms": round(float(np.percentile(waits, 50)) * 1e3, 2),
            "ack p99 ms": round(float(np.percentile(waits, 99)) * 1e3, 2),
            "fsync p50 ms": round(facts["fsync_p50"] * 1e3, 2),
            "receiver RSS MB": round(facts["rss"] / 1e6, 1),
            "receiver CPU": round(facts["cpu"], 2),
            "target": f">= {MIN_SAMPLES:,} samples/s"
            if packet_samples > 1
            else f">= {MIN_MEGABYTES:.0f} MB/s",
            "met": bool(met) and facts["rss"] / 1e6 < MAX_RSS_MB,
        }


def throughput(producer: Producer, samples: list[Sample], seconds: float) -> tuple[float, float]:
    """Return the acknowledged samples and bytes per second, after a warm-up."""
    begun = mark = time.monotonic()
    base = producer.stats.acked
    number = 0
    while True:
        for sample in samples[number % len(samples) :][:64]:
            producer.send(sample)
        number += 64
        now = time.monotonic()
        if mark == begun and now - begun >= WARM_UP_SECONDS:
            mark, base = now, producer.stats.acked
        if now - mark >= seconds and mark != begun:
            done = producer.stats.acked
            break
    producer.flush(60)
    return (done.samples - base.samples) / (now - mark), (done.bytes - base.bytes) / (now - mark)


def latencies(producer: Producer, samples: list[Sample], count: int) -> list[float]:
    """Return the seconds from send() to the acknowledgement of packets sent one at a time."""
    waits = []
    for n in range(LATENCY_PACKETS):
        start = n * count % (len(samples) - count + 1)
        begun = time.monotonic()
        for sample in samples[start : start + count]:
            producer.send(sample)
        producer.flush(30)
        waits.append(time.monotonic() - begun)
    return waits


@contextmanager
def receiver(folder: Path, curve: bool) -> Iterator[tuple[str, dict[str, float]]]:
    """Run a receiver process; its facts are filled when the block ends."""
    if curve:
        Keys.generate("receiver").save(folder)
        pair = Keys.generate("bench")
        pair.save(folder)
        AllowList.enter(folder / "allow.json", "bench", pair.public)
    command = [sys.executable, "-m", "benchmarks.ingest", str(folder)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent.parent
    )
    facts: dict[str, float] = {}
    try:
        assert process.stdout is not None
        endpoint = process.stdout.readline().strip()
        if not endpoint:
            raise RuntimeError("the receiver did not start")
        yield endpoint, facts
        process.send_signal(signal.SIGTERM)
        facts.update(json.loads(process.stdout.readline()))
        process.wait(30)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def receive(folder: Path) -> None:
    """Run the receiver in this process; print its endpoint, and at the end its resource usage."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    secret = folder / "receiver.secret.json"
    access = Access(secret, folder / "allow.json") if secret.exists() else None
    journal, offsets = Journal(folder / "journal", budget=BUDGET), ConsumerOffsets(folder)
    server = Receiver(journal, offsets, access=access)
    print(server.endpoint, flush=True)
    fsyncs = []
    begun, cpu = time.monotonic(), time.process_time()
    for number, record in enumerate(server.run(stop)):
        if record.fsync_seconds is not None:
            fsyncs.append(record.fsync_seconds)
        if number % 8 == 0:
            offsets.publish(record.journal_last + 1, record.journal_last + 1)
    cpu = (time.process_time() - cpu) / (time.monotonic() - begun)
    journal.close()
    print(json.dumps({"rss": peak_rss(), "cpu": cpu, "fsync_p50": float(np.median(fsyncs))}))


def peak_rss() -> int:
    """Return the peak resident memory (VmHWM) in bytes, which includes mapped files."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    receive(Path(sys.argv[1]))
