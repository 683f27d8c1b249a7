"""Statistics of finished runs: spreads over seeds, and paired differences between arms."""

from __future__ import annotations

import math
import operator
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.experiments.results import Cell, Result


@dataclass(frozen=True)
class Spread:
    """The values of one number over seeds."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values) if self.values else math.nan

    @property
    def error(self) -> float:
        """The standard error of the mean; it needs two or more values."""
        return statistics.stdev(self.values) / math.sqrt(len(self.values))

    def text(
        self, scale: float = 100.0, decimals: int = 1, sign: bool = False, error: bool = False
    ) -> str:
        """Return "45.6 ± 0.3" with the standard deviation, or with the standard error.

        One value has neither, and no value gives "".

        >>> Spread((0.45, 0.46)).text()
        '45.5 ± 0.7'
        >>> Spread((0.02, 0.04)).text(sign=True, error=True)
        '+3.0 ± 1.0'
        """
        if not self.values:
            return ""
        mean = f"{scale * self.mean:{'+' if sign else ''}.{decimals}f}"
        if len(self.values) < 2:
            return mean
        deviation = self.error if error else statistics.stdev(self.values)
        return f"{mean} ± {scale * deviation:.{decimals}f}"


@dataclass(frozen=True)
class Found:
    """Finished runs by cell and seed."""

    results: Mapping[Cell, Mapping[int, Result]]

    @classmethod
    def of(cls, runs: Iterable[tuple[Cell, int, Result]]) -> Found:
        """Gather the runs of each cell, with the cells in the order of their first run."""
        cells: dict[Cell, dict[int, Result]] = {}
        for cell, seed, result in runs:
            cells.setdefault(cell, {})[seed] = result
        return cls(cells)

    def seeds(self, cell: Cell) -> int:
        """Return how many runs of a cell are finished."""
        return len(self.results.get(cell, {}))

    def spread(self, cell: Cell, number: str) -> Spread:
        """Return the values of a number over the seeds that have it."""
        return self.paired([cell], number, lambda value: value)

    def gain(self, cell: Cell, base: Cell, number: str) -> Spread:
        """Return the differences of two cells, seed by seed."""
        return self.paired([cell, base], number, operator.sub)

    def share(self, cell: Cell, base: Cell, number: str) -> Spread:
        """Return the ratios of two cells, seed by seed."""
        return self.paired([cell, base], number, operator.truediv)

    def paired(self, cells: Sequence[Cell], number: str, combine: Callable[..., float]) -> Spread:
        """Combine the numbers of some cells for each seed that all cells have."""
        found = [self.results.get(cell, {}) for cell in cells]
        values = []
        for seed in sorted(set.intersection(*map(set, found))):
            numbers = [one[seed].number(number) for one in found]
            if None not in numbers:
                values.append(combine(*numbers))
        return Spread(tuple(values))
