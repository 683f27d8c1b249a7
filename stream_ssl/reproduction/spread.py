"""One number over the seeds of an arm."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """Values of one number over seeds."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values) if self.values else math.nan

    def text(self, scale: float = 100.0, decimals: int = 1, sign: bool = False) -> str:
        """ "45.6 ± 0.3" with the standard deviation from two values on; "" without values.

        >>> Spread((0.45, 0.46)).text()
        '45.5 ± 0.7'
        """
        if not self.values:
            return ""
        mean = f"{scale * self.mean:{'+' if sign else ''}.{decimals}f}"
        if len(self.values) < 2:
            return mean
        return f"{mean} ± {scale * statistics.stdev(self.values):.{decimals}f}"
