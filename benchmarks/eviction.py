"""How fast the most duplicated is evicted, against DUEL's Algorithm 2 as it is printed.

python -m benchmarks.eviction [--large]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from memory import WorkingMemory
from memory.eviction import MostDuplicated
from memory.scores import Linear, Score, VonMisesFisher

DIM, BATCH = 128, 256


@dataclass(frozen=True, slots=True)
class Row:
    """One measured line. Rates are samples a second, medians over batches."""

    score: str
    capacity: int
    stream: str
    samples_per_second: float
    printed_samples_per_second: float | None
    times_faster: float | None
    times_faster_than_product: float | None
    same_sequence: bool | None
    target: str
    met: bool | None


class Stream:
    """Seeded unit rows: 20 clusters whose sizes fall as 1/rank, or uniform on the sphere."""

    def __init__(self, kind: str, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)
        self._kind = kind
        self._centre_CD = self._rng.standard_normal((20, DIM), dtype=np.float32)
        self._centre_CD /= np.linalg.norm(self._centre_CD, axis=1, keepdims=True)

    def draw(self, count: int) -> NDArray[np.float32]:
        z_ND = self._rng.standard_normal((count, DIM), dtype=np.float32)
        if self._kind == "clustered":
            share = 1 / np.arange(1, 21)
            cluster = self._rng.choice(20, size=count, p=share / share.sum())
            z_ND = self._centre_CD[cluster] + np.float32(0.6 / DIM**0.5) * z_ND
        z_ND /= np.linalg.norm(z_ND, axis=1, keepdims=True)
        return z_ND


def printed_step(score: Score, z_KD: torch.Tensor, x_D: torch.Tensor) -> int:
    """One sample of Algorithm 2 as printed: N(J) by eq. 5 for each J in turn, O(K^2 D)."""
    most, slot = -1.0, 0
    for candidate, z_D in enumerate(z_KD):
        h_K = score(z_KD @ z_D)
        count = float(h_K.sum() - h_K[candidate])
        if count > most:
            most, slot = count, candidate
    z_KD[slot] = x_D
    return slot


def product_step(score: Score, z_KD: torch.Tensor) -> int:
    """The same with all pairs in one matrix product: the naive way at its best, K x K memory."""
    h_KK = score(z_KD @ z_KD.T)
    h_KK.fill_diagonal_(0)
    return int(h_KK.sum(dim=1).argmax())


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def against_printed(
    score: Score, capacity: int, times: int, batches: int = 20, naive_steps: int = 2
) -> Row:
    """Both on the same rows in one run, alternating: a batch of ours, then the first samples of
    that batch by the printed algorithm from the same memory."""
    stream = Stream("clustered")
    memory = WorkingMemory(capacity, DIM, MostDuplicated(score))
    memory.add(np.arange(capacity), stream.draw(capacity))
    ours, naive, product, same = [], [], [], True
    for batch in range(batches):
        x_BD = torch.from_numpy(stream.draw(BATCH))
        ids = np.arange(BATCH) + capacity + batch * BATCH
        before_KD, held = memory.embeddings.clone(), memory.ids.tolist()
        outcome = []
        ours.append(timed(lambda: outcome.append(memory.add(ids, x_BD))) / BATCH)  # noqa: B023
        for step in range(naive_steps):
            found: list[int] = []
            product.append(timed(lambda: product_step(score, before_KD)))  # noqa: B023
            naive.append(timed(lambda: found.append(printed_step(score, before_KD, x_BD[step]))))  # noqa: B023
            same &= held[found[0]] == int(outcome[0].evicted[step])
            held[found[0]] = int(ids[step])
    rate, naive_rate = 1 / statistics.median(ours), 1 / statistics.median(naive)
    ratio = rate / naive_rate
    return Row(
        score=repr(score),
        capacity=capacity,
        stream="clustered",
        samples_per_second=rate,
        printed_samples_per_second=naive_rate,
        times_faster=ratio,
        times_faster_than_product=rate * statistics.median(product),
        same_sequence=same,
        target=f">= {times:,} times the printed, same sequence",
        met=ratio >= times and same,
    )


def alone(score: Score, capacity: int, kind: str, batches: int, least: int | None = None) -> Row:
    """Ours only, where the printed algorithm would take hours."""
    stream = Stream(kind)
    memory = WorkingMemory(capacity, DIM, MostDuplicated(score))
    memory.add(np.arange(capacity), stream.draw(capacity))
    seconds = []
    for batch in range(batches):
        x_BD, ids = stream.draw(BATCH), np.arange(BATCH) + capacity + batch * BATCH
        seconds.append(timed(lambda: memory.add(ids, x_BD)))  # noqa: B023
    rate = BATCH / statistics.median(seconds)
    return Row(
        score=repr(score),
        capacity=capacity,
        stream=kind,
        samples_per_second=rate,
        printed_samples_per_second=None,
        times_faster=None,
        times_faster_than_product=None,
        same_sequence=None,
        target=f">= {least:,} samples/s" if least else "",
        met=rate >= least if least else None,
    )


def run(large: bool = False) -> list[Row]:
    """The table. `large` adds the sizes that take minutes."""
    rows = [
        against_printed(Linear(), 2048, times=1000),
        alone(Linear(), 2048, "clustered", batches=60, least=40_000),
        alone(Linear(), 2048, "uniform", batches=20),
        alone(Linear(), 65_536, "clustered", batches=20, least=25_000),
        against_printed(VonMisesFisher(0.1), 2048, times=100, batches=5),
    ]
    if large:
        rows.append(alone(Linear(), 262_144, "clustered", batches=20, least=15_000))
        rows.append(alone(Linear(), 1 << 20, "clustered", batches=20, least=4_000))
        rows.append(alone(VonMisesFisher(0.1), 16_384, "clustered", batches=2))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--large", action="store_true", help="add memories of 262k and 1M slots")
    for row in run(parser.parse_args().large):
        facts = asdict(row)
        print("  ".join(f"{name} {shown(value)}" for name, value in facts.items()))


def shown(value: object) -> str:
    return f"{value:,.0f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
