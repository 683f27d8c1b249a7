"""Gate 4: a power cut at any moment loses nothing that was acknowledged, and no checkpoint."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
from learning_world import build, differing, steps

from chaos import powercut
from chaos.samples import held
from stream_ssl.journal.journal import Journal
from stream_ssl.learning.checkpoint import Checkpointer
from stream_ssl.producers import Producer

HERE = Path(__file__).parent
NAMES = ("left", "right")
IMAGE = np.random.default_rng(1).integers(0, 256, (32, 32, 3), np.uint8)


def receiver(scratch: Path, count: int, samples: int = 1200, seed: int = 0) -> dict[str, int]:
    """Cut the power of a receiver that two producers send to.

    Returns:
        cuts, samples looked for in all of them together, how many were lost, and how many twice.
    """
    root, log = scratch / "run", scratch / "log"
    root.mkdir()
    command = [sys.executable, str(HERE / "chaos_receiver.py"), str(root), "tcp://127.0.0.1:0"]
    env = powercut.environment(powercut.compiled(scratch), root, log)
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        endpoint = process.stdout.readline().strip()
        told = {name: [(0, 0)] for name in NAMES}
        threads = [
            threading.Thread(target=_send, args=(endpoint, name, samples, log, told[name]))
            for name in NAMES
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
            assert not thread.is_alive()
    finally:
        process.terminate()
        process.wait(60)
        process.stdout.close()
    changes, draw = powercut.changes(log), random.Random(seed)
    looked_for = lost = twice = 0
    for number, at in enumerate(powercut.cuts(changes, count, draw)):
        folder = scratch / f"cut-{number}"
        powercut.Disk(root, changes[:at]).left_by_a_cut(folder, draw)
        end = changes[at - 1].end if at else 0
        due = [
            (name, f"{name}-{n}")
            for name in NAMES
            for n in range(max(acked for size, acked in told[name] if size <= end))
        ]
        there = _held(folder)
        looked_for += len(due)
        lost += len(set(due) - set(there))
        shutil.rmtree(folder)
        twice += len(there) - len(set(there))
    return {"cuts": count, "samples": looked_for, "lost": lost, "twice": twice}


def _send(endpoint: str, name: str, samples: int, log: Path, told: list[tuple[int, int]]) -> None:
    """Send samples, and record the size of the log at each count of acknowledged samples."""
    with Producer(endpoint, name, packet_samples=4, linger=0.002) as producer:
        for number in range(samples):
            producer.send(IMAGE, f"{name}-{number}")
            if number % 4 == 0:
                told.append(_seen(producer, log))
                time.sleep(0.001)
        while producer.stats.acked.samples < samples:
            told.append(_seen(producer, log))
            time.sleep(0.001)


def _seen(producer: Producer, log: Path) -> tuple[int, int]:
    acked = producer.stats.acked.samples
    return log.stat().st_size, acked


def _held(folder: Path) -> list[tuple[str, str]]:
    """Return the samples of the journal that a receiver would open after the cut."""
    folder.mkdir(exist_ok=True)
    journal = Journal(folder / "journal", budget=64 << 20, segment_bytes=256 << 10)
    journal.take_checked(wait=True)
    journal.close()
    return held(folder)


def learner(scratch: Path, count: int, last: int = 30, seed: int = 0) -> dict[str, int]:
    """Cut the power of a learner that saves.

    Returns:
        cuts, checkpoints that were gone although `save` had returned, and restored learners that
        were not bit-equal to one that was never cut.
    """
    root, log = scratch / "run", scratch / "log"
    root.mkdir()
    env = powercut.environment(powercut.compiled(scratch), root, log)
    command = [sys.executable, str(HERE / "chaos_learner.py"), str(root), str(last)]
    subprocess.run(command, env=env, check=True, timeout=300)
    whole, reached = build(), {}
    while whole.step < last:
        steps(whole, 1)
        reached[whole.step] = {
            name: {key: tensor.clone() for key, tensor in tensors.items()}
            for name, tensors in whole.capture().tensors.items()
        }
    changes, draw = powercut.changes(log), random.Random(seed)
    gone = unequal = 0
    for number, at in enumerate(powercut.cuts(changes, count, draw)):
        folder = scratch / f"cut-{number}"
        powercut.Disk(root, changes[:at]).left_by_a_cut(folder, draw)
        steps_told = [c.data for c in changes[:at] if c.path.endswith("/told") and c.kind == "w"]
        due = int(steps_told[-1]) if steps_told else 0
        found = Checkpointer(folder / "checkpoints").newest()
        if (found.step if found else 0) < due:
            gone += 1
        elif found is not None:
            restored = build(found.offset)
            found.restore(restored)
            tensors = restored.capture().tensors
            unequal += any(
                not (tensor == reached[found.step][name][key]).all()
                for name in tensors
                for key, tensor in tensors[name].items()
            )
            if number % 20 == 0:
                steps(restored, last - restored.step)
                unequal += differing(whole, restored) != []
    return {"cuts": count, "gone": gone, "unequal": unequal}
