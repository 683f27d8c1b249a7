"""Speed of the memory's eviction for every score, exact and approximate, beside the papers'."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from benchmarks.approximate import MOST_REGRET, measure
from benchmarks.ingest import peak_rss
from benchmarks.minred import published_step, redundancy
from benchmarks.unit_rows import BATCH, DIM, UnitVectors
from stream_ssl.memory import WorkingMemory
from stream_ssl.memory.columns import Columns
from stream_ssl.memory.duel.exact import ExactCounts
from stream_ssl.memory.duel.linear import LinearCounts
from stream_ssl.memory.eviction import MinimumRedundancy, MostDuplicated, Policy
from stream_ssl.memory.scores import Gaussian, Linear, Quadratic, Score, VonMisesFisher

SHARP = VonMisesFisher(0.1)
MILLION = 1 << 20
MOST_EXTRA_MB = 1000


@dataclass(frozen=True, slots=True)
class EvictionRow:
    """One measured line.

    Attributes:
        samples_per_second: median over batches of 256, or over the unit that `work` names.
        slow_tenth: median samples per second of the slowest tenth of the batches.
        times_faster: speed of ours divided by the speed of the other, measured in the same run.
        regret_percent: difference between the largest exact count and the evicted sample's count,
            in percent of the largest.
        extra_mb: largest memory use beyond the slots while batches were placed, in MB.
    """

    work: str
    score: str
    capacity: int
    stream: str
    samples_per_second: float | None = None
    slow_tenth: float | None = None
    times_faster: float | None = None
    regret_percent: float | None = None
    extra_mb: float | None = None
    target: str = ""
    met: bool | None = None


def filled(policy: Policy, capacity: int, kind: str) -> tuple[WorkingMemory, UnitVectors]:
    """Return a full memory, and the stream that continues."""
    stream = UnitVectors(kind)
    memory = WorkingMemory(capacity, DIM, policy)
    memory.add(np.arange(capacity), stream.draw(capacity))
    return memory, stream


def timed(work: Callable[[], object]) -> float:
    """Return the seconds of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def seconds(
    memory: WorkingMemory, stream: UnitVectors, batches: int, batch: int = BATCH
) -> list[float]:
    """Return the seconds of each batch after the first two."""
    found = []
    for _ in range(batches + 2):
        x_BD, ids = stream.draw(batch), np.arange(batch)
        found.append(timed(lambda: memory.add(ids, x_BD)))  # noqa: B023
    return found[2:]


def rate(memory: WorkingMemory, stream: UnitVectors, batches: int, batch: int = BATCH) -> float:
    """Return the samples per second, by the median over batches."""
    return batch / statistics.median(seconds(memory, stream, batches, batch))


def exact(score: Score, capacity: int, kind: str, least: int, batches: int) -> EvictionRow:
    """Measure the speed of exact counts.

    The first batches find the counts that the stream produced. Evictions make the counts more
    equal. For about K samples this makes the largest count harder to find, and later much easier.
    Therefore the run replaces the whole memory twice, if this takes at most a minute.
    """
    memory, stream = filled(MostDuplicated(score), capacity, kind)
    took = sorted(seconds(memory, stream, batches))
    found = BATCH / statistics.median(took)
    return EvictionRow(
        work="exact",
        score=repr(score),
        capacity=capacity,
        stream=kind,
        samples_per_second=found,
        slow_tenth=BATCH / statistics.median(took[-max(1, batches // 10) :]),
        target=f">= {least:,} samples/s" if least else "",
        met=found >= least if least else None,
    )


def approximate(capacity: int, least: int, batches: int, judged: int) -> EvictionRow:
    """Measure the speed and the regret of approximate counts."""
    line = measure(capacity, batches, judged)
    return EvictionRow(
        work="approximate (ivf)",
        score=repr(SHARP),
        capacity=capacity,
        stream="clustered",
        samples_per_second=line.rate,
        regret_percent=100 * line.regret,
        target=f">= {least:,} samples/s, regret <= {100 * MOST_REGRET:.0f} %",
        met=line.rate >= least and line.regret <= MOST_REGRET,
    )


def printed_step(score: Score, z_KD: torch.Tensor, x_D: torch.Tensor) -> int:
    """Evict by Algorithm 2 as printed: compute N(J) by eq. 5 for each J in turn, O(K^2 D)."""
    most, slot = -1.0, 0
    for candidate, z_D in enumerate(z_KD):
        h_K = score(z_KD @ z_D)
        count = float(h_K.sum() - h_K[candidate])
        if count > most:
            most, slot = count, candidate
    z_KD[slot] = x_D
    return slot


def product_step(score: Score, z_KD: torch.Tensor) -> int:
    """Evict by one matrix product of all pairs, the fastest naive way, with K x K memory."""
    h_KK = score(z_KD @ z_KD.T)
    h_KK.fill_diagonal_(0)
    return int(h_KK.sum(dim=1).argmax())


def plain_loop(score: Score, count_K: torch.Tensor, z_KD: torch.Tensor, x_BD: torch.Tensor) -> None:
    """Evict by Algorithm 2 in its simplest fast form: two products per newcomer."""
    for x_D in x_BD:
        slot = int(count_K.argmax())
        count_K -= score.apply_(z_KD @ z_KD[slot])
        z_KD[slot] = x_D
        h_K = score.apply_(z_KD @ x_D)
        h_K[slot] = 0.0
        count_K += h_K
        count_K[slot] = h_K.sum()


def against_plain(score: Score, capacity: int, kind: str, batches: int) -> EvictionRow:
    """Compare with the plain loop on the same rows from the same memory, one batch each in turn."""
    memory, stream = filled(MostDuplicated(score), capacity, kind)
    z_KD, count_K = memory.embeddings.clone(), memory.counts()
    ours, plain = [], []
    for _ in range(batches):
        x_BD, ids = torch.from_numpy(stream.draw(BATCH)), np.arange(BATCH)
        ours.append(timed(lambda: memory.add(ids, x_BD)))  # noqa: B023
        plain.append(timed(lambda: plain_loop(score, count_K, z_KD, x_BD)))  # noqa: B023
    return EvictionRow(
        work="the plainest loop: two products a newcomer",
        score=repr(score),
        capacity=capacity,
        stream=kind,
        samples_per_second=BATCH / statistics.median(plain),
        times_faster=statistics.median(plain) / statistics.median(ours),
    )


def against_printed(
    score: Score, capacity: int, times: int, batches: int = 40
) -> Iterator[EvictionRow]:
    """Compare with the printed algorithm on the same rows, in turn.

    Each turn adds one batch with ours, and then the first two samples of that batch with the
    printed algorithm, from the same memory. Two turnovers of the memory and two batches are left
    out.
    """
    memory, stream = filled(MostDuplicated(score), capacity, "clustered")
    seconds(memory, stream, 2 * capacity // BATCH)
    ours, naive, product, same = [], [], [], True
    for batch in range(batches):
        x_BD = torch.from_numpy(stream.draw(BATCH))
        ids = np.arange(BATCH) + capacity + batch * BATCH
        before_KD, held = memory.embeddings.clone(), memory.ids.tolist()
        outcome = []
        ours.append(timed(lambda: outcome.append(memory.add(ids, x_BD))) / BATCH)  # noqa: B023
        for step in range(2):
            found: list[int] = []
            product.append(timed(lambda: product_step(score, before_KD)))  # noqa: B023
            naive.append(timed(lambda: found.append(printed_step(score, before_KD, x_BD[step]))))  # noqa: B023
            same &= held[found[0]] == int(outcome[0].evicted[step])
            held[found[0]] = int(ids[step])
    own = statistics.median(ours[2:])
    ratios = statistics.median(naive) / own, statistics.median(product) / own
    sequence = "same sequence" if same else "ANOTHER SEQUENCE"
    common: dict[str, Any] = {"score": repr(score), "capacity": capacity, "stream": "clustered"}
    yield EvictionRow(
        work=f"against Algorithm 2 as printed, {sequence}",
        samples_per_second=1 / own,
        times_faster=ratios[0],
        target=f">= {times:,} times, same sequence",
        met=ratios[0] >= times and same,
        **common,
    )
    yield EvictionRow(work="against one K x K product a sample", times_faster=ratios[1], **common)


def against_minred(capacity: int, times: int, batches: int) -> EvictionRow:
    """Compare with MinRed as published.

    The published form is timed for its matrix and four of its B removals.
    """
    memory, stream = filled(MinimumRedundancy(), capacity, "clustered")
    ours = BATCH / rate(memory, stream, batches)
    x_BD = torch.from_numpy(stream.draw(BATCH))
    few = [timed(lambda: published_step(memory.embeddings, x_BD[:n])) for n in (1, 5)]  # noqa: B023
    removal = (few[1] - few[0]) / 4
    published = few[0] + (BATCH - 1) * removal
    return EvictionRow(
        work=f"MinRed against MinRed as published ({removal:.2f} s a removal)",
        score="",
        capacity=capacity,
        stream="clustered",
        samples_per_second=BATCH / ours,
        times_faster=published / ours,
        target=f">= {times:,} times",
        met=published / ours >= times,
    )


def minred_left() -> EvictionRow:
    """Compare the redundancy that remains in both memories after the same rows."""
    capacity, batch = 1024, 64
    memory, stream = filled(MinimumRedundancy(), capacity, "clustered")
    published_KD = memory.embeddings.clone()
    for _ in range(8):
        x_BD = torch.from_numpy(stream.draw(batch))
        memory.add(np.arange(batch), x_BD)
        published_KD = published_step(published_KD, x_BD)
    ours, theirs = redundancy(memory.embeddings), redundancy(published_KD)
    return EvictionRow(
        work=f"MinRed's redundancy left: {ours:.1f}, as published {theirs:.1f}",
        score="",
        capacity=capacity,
        stream="clustered",
        target="no more than published",
        met=ours <= theirs,
    )


def extra_memory(score: Score) -> EvictionRow:
    """Measure by how much the process grows beyond the slots while two batches are placed.

    The exact counts are random numbers, because counting a million slots takes an hour and does not
    change the memory use.
    """
    stream = UnitVectors("clustered")
    columns = Columns(MILLION, DIM)
    counts = LinearCounts(columns) if isinstance(score, Linear) else ExactCounts(columns, score)
    for start in range(0, MILLION, 1 << 16):
        columns.embeddings[start : start + (1 << 16)] = torch.from_numpy(stream.draw(1 << 16))
    columns.occupied = MILLION
    if isinstance(counts, LinearCounts):
        counts.recount()
    else:
        counts.count_K.uniform_(generator=torch.Generator().manual_seed(0))
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = psutil.Process().memory_info().rss / 2**20
    for _ in range(2):
        x_BD = torch.from_numpy(stream.draw(BATCH))
        while len(x_BD):
            plan = counts.choose(x_BD)
            columns.embeddings[plan[-1:]] = x_BD[len(plan) - 1 : len(plan)]
            x_BD = x_BD[len(plan) :]
    grown = peak_rss() / 2**20 - before
    return EvictionRow(
        work="memory over the slots",
        score=repr(score),
        capacity=MILLION,
        stream="clustered",
        extra_mb=grown,
        target=f"< {MOST_EXTRA_MB:,} MB",
        met=grown < MOST_EXTRA_MB,
    )


def run() -> Iterator[EvictionRow]:
    """Yield the lines one by one. The largest memories come last."""
    yield extra_memory(Linear())  # first, while the process is still small
    yield extra_memory(SHARP)
    yield from against_printed(Linear(), 2048, times=4000)
    yield from against_printed(SHARP, 2048, times=1000, batches=12)
    for score in (Linear(), SHARP):
        yield against_plain(score, 2048, "clustered", batches=40)
    yield exact(Linear(), 2048, "clustered", 25_000, batches=100)
    yield exact(Linear(), 65_536, "clustered", 15_000, batches=512)
    for capacity, least, batches in ((2048, 0, 100), (16_384, 0, 128), (65_536, 10_000, 256)):
        yield exact(Linear(), capacity, "uniform", least, batches)
    for sharp in (SHARP, Quadratic(), Gaussian()):
        for kind in ("clustered", "uniform"):
            yield exact(sharp, 2048, kind, 10_000, batches=100)
            yield exact(sharp, 16_384, kind, 3_000, batches=128)
    yield exact(Linear(), 262_144, "clustered", 15_000, batches=2048)
    yield exact(Linear(), MILLION, "clustered", 4_000, batches=2000)
    yield exact(SHARP, 65_536, "clustered", 800, batches=128)
    yield exact(Quadratic(), 65_536, "uniform", 800, batches=128)
    yield approximate(262_144, 3_000, batches=80, judged=3)
    yield approximate(MILLION, 2_000, batches=160, judged=1)
    yield minred_left()
    yield against_minred(16_384, 1_000, batches=8)
    for score in (Linear(), SHARP):
        for capacity, batches in ((16_384, 12), (65_536, 4)):
            yield against_plain(score, capacity, "clustered", batches)
