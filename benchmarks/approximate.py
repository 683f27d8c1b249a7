"""Speed of eviction by approximate counts, and its distance from the largest count.

python -m benchmarks.approximate [--capacity 262144 ...] [--batches 80] [--judge cuda]
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import Tensor

from benchmarks.unit_rows import BATCH, DIM, UnitVectors
from stream_ssl.memory.columns import Columns
from stream_ssl.memory.duel.approximate import ApproximateCounts
from stream_ssl.memory.scores import BLOCK_ELEMENTS, Score, VonMisesFisher

LEAST_RATE = {262_144: 3000, 1 << 20: 2000}
MOST_REGRET = 0.02
WATCHED = 4096
"""Largest number of slots with the highest counts whose counts are kept exactly on a CPU.

As many random slots are watched, too. Very large memories watch fewer slots, because the exact
counts would take minutes. A GPU keeps the counts of all slots.
"""


@dataclass(frozen=True, slots=True)
class Line:
    """The measurements of one memory size.

    Attributes:
        build_seconds: seconds to fit the cells and count every slot once.
        rate: samples per second over the whole run, in wall-clock time.
        cpu_rate: samples per second of processor time, which other programs do not slow down.
        median_rate: median of the batches' rates. The median ignores the few slow batches that draw
            a pool.
        regret: mean of (largest - evicted's) / largest exact count over judged evictions.
        watched: number of slots among which the largest count was searched.
        error: mean relative error of the counts at the end.
        bias: mean signed relative error of the counts at the end.
        met: whether `cpu_rate` and `regret` meet the targets; None without a target or judged
            evictions.
    """

    capacity: int
    build_seconds: float
    rate: float
    cpu_rate: float
    median_rate: float
    regret: float
    worst_regret: float
    judged: int
    watched: int
    error: float
    bias: float
    met: bool | None


class Judge:
    """Exact counts of the watched slots, updated with each eviction.

    Args:
        watched: distinct slots; None: all slots.
    """

    def __init__(
        self, score: Score, z_KD: Tensor, watched: Tensor | None, device: torch.device
    ) -> None:
        self._score = score
        self._z_KD = z_KD.to(device, copy=True)
        chosen = torch.arange(len(z_KD)) if watched is None else watched
        self._place_K = torch.full((len(z_KD),), -1)
        self._place_K[chosen] = torch.arange(len(chosen))
        self._row_WD = self._z_KD if watched is None else self._z_KD[chosen.to(device)]
        step = max(1, BLOCK_ELEMENTS * (16 if device.type == "cuda" else 1) // len(z_KD))
        self.count_W = torch.cat([self._exact(rows) for rows in torch.split(self._row_WD, step)])

    def _exact(self, row_ND: Tensor) -> Tensor:
        own_N = self._score.apply_((row_ND * row_ND).sum(dim=1))
        h_NK = self._score.between(row_ND, self._z_KD)
        return h_NK.sum(dim=1, dtype=torch.float64) - own_N

    def evict(self, slot: int, x_D: Tensor) -> float:
        """Return the regret of evicting this slot, and replace the slot by the newcomer."""
        place = int(self._place_K[slot])
        gone_D, x_D = self._z_KD[slot].clone(), x_D.to(self._z_KD.device)
        own = float(self.count_W[place] if place >= 0 else self._exact(gone_D[None])[0])
        most = max(float(self.count_W.max()), own)
        self.count_W -= self._score.apply_(self._row_WD @ gone_D)
        self._z_KD[slot] = x_D
        if place >= 0:
            self._row_WD[place] = x_D
        self.count_W += self._score.apply_(self._row_WD @ x_D)
        if place >= 0:
            self.count_W[place] = self._exact(x_D[None])[0]
        return (most - own) / most


class TimedMemory:
    """A full memory with approximate counts, timed batch by batch."""

    def __init__(self, capacity: int, score: Score) -> None:
        self.stream = UnitVectors("clustered")
        self.columns = Columns(capacity, DIM)
        self.columns.embeddings.copy_(torch.from_numpy(self.stream.draw(capacity)))
        self.columns.occupied = capacity
        self.counts = ApproximateCounts(self.columns, score)
        start = time.perf_counter()
        self.counts.recount()
        self.build_seconds = time.perf_counter() - start
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def batch(self, judge: Judge | None) -> list[float]:
        """Add one batch; return the regret of each eviction if there is a judge."""
        x_BD = torch.from_numpy(self.stream.draw(BATCH))
        wall, cpu, regret = 0.0, 0.0, []
        while len(x_BD):
            start, start_cpu = time.perf_counter(), time.process_time()
            plan = self.counts.choose(x_BD).tolist()
            newest = {slot: turn for turn, slot in enumerate(plan)}
            turns = torch.tensor(list(newest.values()))
            self.columns.embeddings[list(newest)] = x_BD[turns]
            wall, cpu = wall + time.perf_counter() - start, cpu + time.process_time() - start_cpu
            if judge is not None:
                regret += [judge.evict(s, x) for s, x in zip(plan, x_BD[: len(plan)], strict=True)]
            x_BD = x_BD[len(plan) :]
        self.wall.append(wall)
        self.cpu.append(cpu)
        return regret


def watch(run: TimedMemory, everything: bool) -> Tensor | None:
    """Return the slots with the highest counts and as many random slots, or None for all slots."""
    if everything or run.columns.capacity <= 4 * WATCHED:
        return None
    count = max(512, min(WATCHED, (1 << 30) // run.columns.capacity))
    top = run.counts.counts().topk(count).indices
    some = torch.randperm(run.columns.capacity, generator=torch.Generator().manual_seed(0))
    both: Tensor = torch.unique(torch.cat([top, some[:count]]))
    return both


def measure(
    capacity: int,
    batches: int = 80,
    judged: int = 4,
    device: str | None = "cpu",
    score: Score | None = None,
) -> Line:
    """Run `batches` batches and judge the last ones.

    Args:
        judged: number of batches at the end whose evictions are judged.
        device: device of the judge. On "cuda" the judge keeps the exact counts of all slots, on
            other devices those that `watch` returns. None, or no judged batch: no judge.
        score: the score h; None: VonMisesFisher(0.1).
    """
    score = VonMisesFisher(0.1) if score is None else score
    run = TimedMemory(capacity, score)
    for _ in range(batches - judged):
        run.batch(None)
    judge, regret = None, []
    if device is not None and judged:
        chosen = watch(run, device.startswith("cuda"))
        judge = Judge(score, run.columns.embeddings, chosen, torch.device(device))
    for _ in range(judged):
        regret += run.batch(judge)
    error = run.counts.error(128)
    cpu_rate, mean = BATCH * batches / sum(run.cpu), float(np.mean(regret or [np.nan]))
    least = LEAST_RATE.get(capacity)
    return Line(
        capacity=capacity,
        build_seconds=run.build_seconds,
        rate=BATCH * batches / sum(run.wall),
        cpu_rate=cpu_rate,
        median_rate=BATCH / float(np.median(run.wall)),
        regret=mean,
        worst_regret=max(regret, default=float("nan")),
        judged=len(regret),
        watched=0 if judge is None else len(judge.count_W),
        error=error.mean,
        bias=error.bias,
        met=None if least is None or not regret else cpu_rate >= least and mean <= MOST_REGRET,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--capacity", type=int, nargs="+", default=[16_384, 65_536, 262_144])
    parser.add_argument("--batches", type=int, default=80)
    parser.add_argument("--judged", type=int, default=4, help="batches whose evictions are judged")
    parser.add_argument("--judge", default="cpu", help="device that counts exactly")
    arguments = parser.parse_args()
    for capacity in arguments.capacity:
        line = measure(capacity, arguments.batches, arguments.judged, arguments.judge)
        print("  ".join(f"{name} {shown(value)}" for name, value in asdict(line).items()))


def shown(value: object) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
