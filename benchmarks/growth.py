"""Growth of the cost of an eviction with the size of the memory and of the batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.eviction import SHARP, filled, rate
from benchmarks.unit_rows import BATCH
from stream_ssl.memory.eviction import MostDuplicated, Policy
from stream_ssl.memory.scores import Linear

MAKERS = {
    "linear, exact": lambda: MostDuplicated(Linear()),
    "vMF 0.1, exact": lambda: MostDuplicated(SHARP),
    "vMF 0.1, ivf": lambda: MostDuplicated(SHARP, index="ivf"),
}
LARGEST = {"linear, exact": 1 << 20, "vMF 0.1, exact": 1 << 15, "vMF 0.1, ivf": 1 << 18}
"""Largest capacity per policy. Exact counts under vMF compute K^2 scores once, at the start."""

BATCHES = (16, 64, 256, 1024, 4096)


@dataclass(frozen=True, slots=True)
class GrowthRow:
    """The median microseconds per sample over batches of clustered data."""

    policy: str
    capacity: int
    batch: int
    microseconds: float


def run() -> Iterator[GrowthRow]:
    """Yield the points over the memory's size, then the points over the batch size."""
    for name, maker in MAKERS.items():
        capacity = 1 << 10
        while capacity <= LARGEST[name]:
            yield from measured(name, maker(), capacity, (BATCH,))
            capacity *= 4
    for name, maker in MAKERS.items():
        yield from measured(name, maker(), 1 << 14, BATCHES)


def measured(name: str, policy: Policy, capacity: int, sizes: Sequence[int]) -> Iterator[GrowthRow]:
    """Yield the points of one policy and memory, one for each batch size."""
    memory, stream = filled(policy, capacity, "clustered")
    for batch in sizes:
        batches = max(6, min(30, 8192 // batch))
        yield GrowthRow(name, capacity, batch, 1e6 / rate(memory, stream, batches, batch))


def plot(found: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw both curves, log-log, as a PNG."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    by_size, by_batch = figure.subplots(1, 2)
    for name in MAKERS:
        those = [row for row in found if row["policy"] == name]
        sizes = sorted({(row["capacity"], row["microseconds"]) for row in those[: -len(BATCHES)]})
        by_size.plot(*zip(*sizes, strict=True), marker="o", label=name)
        batches = [(row["batch"], row["microseconds"]) for row in those[-len(BATCHES) :]]
        by_batch.plot(*zip(*batches, strict=True), marker="o", label=name)
    by_size.set_xlabel(f"slots K, batches of {BATCH}")
    by_batch.set_xlabel("batch B, 16,384 slots")
    for axes in (by_size, by_batch):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_ylabel("microseconds a sample")
        axes.grid(alpha=0.3)
    by_size.legend(fontsize=8)
    figure.savefig(path, dpi=110)
