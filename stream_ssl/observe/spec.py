"""What one metric is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PREFIX = "stream_ssl_"
Role = Literal["receiver", "learner", "both"]
Kind = Literal["counter", "gauge", "histogram", "info"]


@dataclass(frozen=True, slots=True)
class Spec:
    """One metric.

    Attributes:
        name: without prefix; a counter's ends in `_total`, an info's in `_info`.
        help: one sentence, exported with the metric.
        look: what an operator should look for.
        labels: label names.
        unit: what the value counts; shown in OpenMetrics where the name carries it.
        buckets: upper bounds, of a histogram.
    """

    role: Role
    kind: Kind
    name: str
    unit: str
    help: str
    look: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def full_name(self) -> str:
        """The name as it is exported."""
        return PREFIX + self.name
