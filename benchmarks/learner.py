"""The learner's steps: seconds by phase, speed of the stream against RAM, and memory growth.

`python -m benchmarks learner`. Small settings for a CPU: ResNet of width 16 with four blocks, 28 x
28 grey images, batch 128, 2,048 slots.
"""

from __future__ import annotations

import ctypes
import gc
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from benchmarks.full_learner import Repeated, fill
from stream_ssl.encoder.network import Projector, ResNet
from stream_ssl.feed.batches import Batches
from stream_ssl.feed.decode import Decoder
from stream_ssl.feed.quarantine import Quarantine
from stream_ssl.journal.journal import Journal
from stream_ssl.journal.reader import JournalReader
from stream_ssl.journal.segment import JournalEntry
from stream_ssl.learning.learner import Learner, Stream
from stream_ssl.learning.randomness import seed_everything
from stream_ssl.learning.records import PHASES, StepRecord
from stream_ssl.learning.views import Views
from stream_ssl.losses import InfoNCE
from stream_ssl.memory import WorkingMemory
from stream_ssl.memory.descriptors import Descriptor, Embedding, Thumbnail, Weighted
from stream_ssl.memory.eviction import MostDuplicated, Policy
from stream_ssl.memory.process_group import SINGLE_PROCESS, RankGroup
from stream_ssl.memory.scores import Score, VonMisesFisher
from stream_ssl.methods import MoCo
from stream_ssl.wire import Data, Sample

BATCH, SIZE, SLOTS, DIM = 128, 28, 2048, 128
PACKET = 64
WARM_UP = 20  # steps until the memory is full and allocations are stable
ROUNDS, ROUND = 6, 10  # alternating rounds, and steps per round
FLAT_STEPS = 300
MIN_SHARE = 0.95
MAX_GROWTH_MB = 4.0
LARGE = 65_536
MOST_SHARE = {SLOTS: 10.0, LARGE: 30.0}
"""Allowed share of the memory in a step, in percent, by number of slots."""


def in_ram() -> Repeated:
    """Return a stream that repeats batches made beforehand."""
    shape = 16, BATCH, 1, SIZE, SIZE
    images_NBCHW = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    return Repeated(images_NBCHW, classes=10)


def run() -> list[dict[str, Any]]:
    """Return rows of step seconds by phase, stream against RAM, and growth of resident memory."""
    ram = steps_of(learner(in_ram()))
    warm(ram)
    rows = [phases(ram, "default"), *fed_by_the_stream()]
    rows.append(growth(ram))
    del ram
    for slots in (SLOTS, LARGE):
        for name, score in (("linear", None), ("vMF 0.1", VonMisesFisher(0.1))):
            records = steps_of(filled(slots, score))
            for _ in range(3):
                next(records)
            rows.append(phases(records, f"{name}, {slots:,} slots", MOST_SHARE[slots]))
    return rows


def filled(slots: int, score: Score | None) -> Learner:
    """Return a learner with the daemon's descriptor, whose memory is full."""
    subject = learner(in_ram(), slots, MostDuplicated(score, index="auto"))
    fill(subject.memory)
    return subject


def learner(
    stream: Stream,
    slots: int = SLOTS,
    policy: Policy | None = None,
    descriptor: Descriptor | None = None,
    group: RankGroup = SINGLE_PROCESS,
) -> Learner:
    """Return a MoCo learner on a stream, whose descriptor has both parts if none is given."""
    seed_everything(0)
    encoder = ResNet(width=16, depths=(1, 1, 1, 1), channels=1)
    method = MoCo(encoder, Projector(encoder.dim, DIM), InfoNCE(0.2))
    memory = WorkingMemory(
        slots,
        DIM,
        policy,
        image_shape=(1, SIZE, SIZE),
        descriptor=descriptor or Weighted([Embedding(), Thumbnail(side=8)]),
        group=group,
    )
    return Learner(method, memory, Views(SIZE, channels=1), stream)


def steps_of(subject: Learner) -> Iterator[StepRecord]:
    """Yield the step records of a learner."""
    for record in subject.run(threading.Event()):
        if isinstance(record, StepRecord):
            yield record


def warm(records: Iterator[StepRecord]) -> None:
    """Make the steps of the warm-up."""
    for _ in range(WARM_UP):
        next(records)


def phases(records: Iterator[StepRecord], name: str, most: float | None = None) -> dict[str, Any]:
    """Return the median milliseconds of a step by phase, and the memory's share of the step."""
    seen = [next(records).seconds for _ in range(2 * ROUND)]
    found = {phase: statistics.median(1000 * s[phase] for s in seen) for phase in PHASES}
    total = statistics.median(1000 * sum(s.values()) for s in seen)
    share = statistics.median(100 * s["memory"] / sum(s.values()) for s in seen)
    row = {
        "what": f"ms a step, batch {BATCH}, {torch.get_num_threads()} threads, {name}",
        "value": total,
        **{f"{phase} ms": value for phase, value in found.items()},
        "memory %": share,
    }
    if most is not None:
        row |= {"target": f"memory <= {most:.0f} %", "met": share <= most}
    return row


def fed_by_the_stream() -> Iterator[dict[str, Any]]:
    """Yield samples per second fed from the journal and from RAM, measured in turns."""
    with journalled(BATCH * (WARM_UP + ROUNDS * ROUND + 8)) as batches:
        sources = {"RAM": steps_of(learner(in_ram())), "journal": steps_of(learner(batches))}
        rates: dict[str, list[float]] = {name: [] for name in sources}
        for records in sources.values():
            warm(records)
        for _ in range(ROUNDS):
            for name, records in sources.items():
                started = time.perf_counter()
                for _ in range(ROUND):
                    next(records)
                rates[name].append(BATCH * ROUND / (time.perf_counter() - started))
    medians = {name: statistics.median(values) for name, values in rates.items()}
    for name, rate in medians.items():
        yield {"what": f"samples/s fed from {name}", "value": rate}
    # Compare neighbouring rounds, because the load of the machine affects them equally.
    share = statistics.median(
        journal / ram for ram, journal in zip(rates["RAM"], rates["journal"], strict=True)
    )
    yield {
        "what": "journal / RAM, median of neighbouring rounds",
        "value": share,
        "target": f">= {MIN_SHARE}",
        "met": share >= MIN_SHARE,
    }


@contextmanager
def journalled(samples: int) -> Iterator[Batches]:
    """Write a real journal of `samples` samples, and return its batches."""
    draw = np.random.default_rng(1)
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(Path(folder) / "journal", budget=1 << 30)
        for sequence in range(1, samples // PACKET + 1):
            image_PHWC = draw.integers(0, 256, (PACKET, SIZE, SIZE, 1), dtype=np.uint8)
            packet = [
                Sample.from_array(image, f"{sequence}-{n}", source="bench", label=n % 10)
                for n, image in enumerate(image_PHWC)
            ]
            data = Data.pack(sequence, packet)
            entry = JournalEntry("bench", sequence, None, time.time(), data.header, data.payload)
            journal.append([entry])
        journal.close()
        reader = JournalReader(Path(folder) / "journal")
        quarantine = Quarantine(Path(folder) / "quarantine")
        with Batches(reader, Decoder(SIZE, 1), quarantine, BATCH) as batches:
            yield batches
        reader.close()


def growth(records: Iterator[StepRecord]) -> dict[str, Any]:
    """Return the growth of resident memory over many steps.

    The allocator keeps freed memory and reuses it, which changes the plain figure by tens of MB
    within a hundred steps. Therefore freed memory is returned to the system before each reading.
    The plain figure is reported, too.
    """
    plain_before, before = rss_mb(trim=False), rss_mb(trim=True)
    for _ in range(FLAT_STEPS):
        next(records)
    plain, gained = rss_mb(trim=False) - plain_before, rss_mb(trim=True) - before
    return {
        "what": f"MB of RSS gained in {FLAT_STEPS} steps, trimmed",
        "value": gained,
        "untrimmed MB": plain,
        "target": f"<= {MAX_GROWTH_MB:g}",
        "met": gained <= MAX_GROWTH_MB,
    }


def rss_mb(trim: bool) -> float:
    """Return this process's resident memory in MB; `trim` first returns malloc's reserve."""
    if trim:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
    return float(psutil.Process().memory_info().rss / 2**20)
