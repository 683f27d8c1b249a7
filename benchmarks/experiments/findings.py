"""Statistics of finished runs: spreads over seeds, and paired differences between arms."""

from __future__ import annotations

import math
import operator
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.stats import t as student

from benchmarks.experiments.results import Cell, RunResult


@dataclass(frozen=True)
class Spread:
    """The values of one number over seeds."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values) if self.values else math.nan

    def text(self, scale: float = 100.0, decimals: int = 1, sign: bool = False) -> str:
        """Return "45.6 ± 0.3" with the standard deviation. One value has none; no value gives "".

        >>> Spread((0.45, 0.46)).text()
        '45.5 ± 0.7'
        """
        if not self.values:
            return ""
        mean = f"{scale * self.mean:{'+' if sign else ''}.{decimals}f}"
        if len(self.values) < 2:
            return mean
        return f"{mean} ± {scale * statistics.stdev(self.values):.{decimals}f}"

    def difference(self, deviation: Deviation | None) -> str:
        """Return "+1.2 ± 0.4 (3)": the mean in points, its standard error, the number of seeds.

        Args:
            deviation: the pooled deviation of one difference, see `pooled_deviation`. It gives one
                pair an error too. None: the text has no error.

        >>> Spread((0.02, 0.04)).difference(Deviation(0.008, 20))
        '+3.0 ± 0.6 (2)'
        """
        if not self.values:
            return ""
        count = len(self.values)
        error = "" if deviation is None else f" ± {100 * deviation.error(count):.1f}"
        return f"{100 * self.mean:+.1f}{error} ({count})"


class Deviation(NamedTuple):
    """The standard deviation of one paired difference, and its degrees of freedom."""

    value: float
    freedom: float

    def error(self, count: int) -> float:
        """Return the standard error of the mean of some differences."""
        return self.value / math.sqrt(count)

    def p(self, values: Sequence[float]) -> float:
        """Return the p-value of a two-sided t-test that the mean of some differences is 0."""
        mean, error = statistics.fmean(values), self.error(len(values))
        if not error:
            return 1.0 if mean == 0 else 0.0
        return float(2 * student.sf(abs(mean) / error, self.freedom))


def holm(values: Mapping[int, float]) -> dict[int, float]:
    """Return p-values corrected for their number by Holm's step-down method.

    >>> holm({0: 0.01, 1: 0.04, 2: 0.03})
    {0: 0.03, 2: 0.06, 1: 0.06}
    """
    corrected, largest = {}, 0.0
    for rank, (key, value) in enumerate(sorted(values.items(), key=lambda item: item[1])):
        largest = max(largest, min(1.0, (len(values) - rank) * value))
        corrected[key] = largest
    return corrected


def pooled_deviation(
    families: Iterable[FinishedRuns], number: str, condition: str | None = None
) -> Deviation | None:
    """Return the standard deviation of a paired difference of two arms, pooled over conditions.

    The runs of one family under one condition are fitted by the sum of an effect of the arm and an
    effect of the seed on its device. A difference of two runs has twice the variance of what is
    left. The deviation of two or three differences is a poor estimate of their spread, while the
    pooled one has many degrees of freedom. None: no two arms have two seeds in common.

    Args:
        families: the runs, by settings that differences do not cross.
        condition: the only condition to use; None: all.
    """
    squares = freedom = 0.0
    for found in families:
        for place in {where for _, where in found.results if condition in (None, where)}:
            left, free = _left_of_effects(found, place, number)
            squares, freedom = squares + left, freedom + free
    return Deviation(math.sqrt(2 * squares / freedom), freedom) if freedom else None


def _left_of_effects(found: FinishedRuns, condition: str, number: str) -> tuple[float, int]:
    """Return the squares that the effects of arms and seeds leave, and their degrees of freedom."""
    values, keys = [], []
    for (arm, where), runs in found.results.items():
        for seed, run in runs.items() if where == condition else ():
            if (value := run.number(number)) is not None:
                values.append(value)
                keys.append((("arm", arm), ("seed", seed, run.device)))
    if not values:
        return 0.0, 0
    effects = {effect: column for column, effect in enumerate({e for key in keys for e in key})}
    design = np.zeros((len(keys), len(effects)))
    for row, key in enumerate(keys):
        design[row, [effects[effect] for effect in key]] = 1
    fitted, _, rank, _ = np.linalg.lstsq(design, np.array(values), rcond=None)
    return float(((design @ fitted - values) ** 2).sum()), len(values) - int(rank)


@dataclass(frozen=True)
class FinishedRuns:
    """Finished runs by cell and seed."""

    results: Mapping[Cell, Mapping[int, RunResult]]

    @classmethod
    def of(cls, runs: Iterable[tuple[Cell, int, RunResult]]) -> FinishedRuns:
        """Gather the runs of each cell, with the cells in the order of their first run."""
        cells: dict[Cell, dict[int, RunResult]] = {}
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
        """Combine the numbers of some cells for each seed that all cells have on one device."""
        found = [self.results.get(cell, {}) for cell in cells]
        values = []
        for seed in sorted(set.intersection(*map(set, found))):
            numbers = [one[seed].number(number) for one in found]
            if None not in numbers and len({one[seed].device for one in found}) == 1:
                values.append(combine(*numbers))
        return Spread(tuple(values))
