"""Gate 8: a learner 100 times slower than 20 producers; memory stays bounded, all are served alike.

The learner is the offsets that one publishes: it reads so many bytes a second, and checkpoints once
a second. The producers are real, of three speeds, in processes of their own.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
from harness import TINY, Processes, processes, stop, until

from stream_ssl.journal.consumer_offsets import ConsumerOffsets
from stream_ssl.journal.reader import JournalReader

PRODUCERS = 20
PER_PROCESS = 5
SENDERS = Path(__file__).with_name("chaos_senders.py")


def run(
    folder: Path, seconds: float, budget: int = 64 << 20, rate: float = 6e6, warm_up: float = 15.0
) -> dict[str, float]:
    """Return the bytes acknowledged to each producer, and the receiver's memory.

    Args:
        folder: scratch.
        seconds: how long is measured, once the journal has been full.
        budget: of the journal.
        rate: bytes that the learner reads in a second.
    """
    settings = TINY | {"journal": {"budget": budget}}
    senders: list[subprocess.Popen[str]] = []
    with processes(folder, settings, whole=True) as run:
        receiver = run.role("receiver")
        base = psutil.Process(receiver.pid).memory_info()
        done = threading.Event()
        learner = threading.Thread(target=learn, args=(folder, rate, done))
        learner.start()
        try:
            for first in range(0, PRODUCERS, PER_PROCESS):
                command = [sys.executable, str(SENDERS), run.address, str(first), str(PER_PROCESS)]
                senders.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            until((folder / "journal.full").exists, lambda: run.log("receiver"), 120)
            time.sleep(warm_up)
            before = acked(run, folder)
            peak, end = 0, time.monotonic() + seconds
            while time.monotonic() < end:
                memory = psutil.Process(receiver.pid).memory_info()
                peak = max(peak, memory.rss - memory.shared)
                time.sleep(0.5)
            after = acked(run, folder)
        finally:
            for sender in senders:
                sender.kill()
                sender.wait()
            done.set()
            learner.join()
        assert stop(receiver) == 0
    served = [after[name] - before.get(name, 0) for name in sorted(after)]
    return {
        "producers": len(served),
        "least_samples": min(served),
        "most_samples": max(served),
        "fairness": min(served) / max(1, max(served)),
        "peak_mb": peak / 1e6,
        "base_mb": (base.rss - base.shared) / 1e6,
        "journal_mb": sum(f.stat().st_size for f in folder.rglob("data.mdb")) / 1e6,
        "budget_mb": budget / 1e6,
    }


def acked(run: Processes, folder: Path) -> dict[str, int]:
    """Return the durable sequence of each producer."""
    from stream_ssl.journal.segment import Segment, list_segments

    for _, path in reversed(list_segments(folder / "journal")):
        segment = Segment(path)
        try:
            return {name: state.sequence for name, state in segment.states().items()}
        finally:
            segment.close()
    raise AssertionError("no segment")


def learn(folder: Path, rate: float, done: threading.Event) -> None:
    """Reads on at `rate` bytes a second, and checkpoints where it is once a second."""
    reader, offsets, position = JournalReader(folder / "journal"), ConsumerOffsets(folder), 1
    owed = 0.0
    while not done.wait(1.0):
        owed += rate
        while owed > 0 and (records := reader.read(position, 1)):
            owed -= sum(len(r.header) + len(r.payload) for r in records)
            position = records[-1].position + 1
        owed = min(owed, rate)
        offsets.publish(position, position)
    reader.close()
