"""The description of one metric: an entry of the catalogue."""

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
        unit: what the value counts; shown in OpenMetrics where the name carries it.
        help: one sentence, exported with the metric.
        look: what an operator should look for.
        labels: label names.
        buckets: upper bounds, of a histogram.
        field: what fills it, "StepRecord.near_copies": an attribute of ReceiverRecord in the
            receiver; of StepRecord, CheckpointRecord or MemoryStats in the learner. A mapping gives
            one value for each value of the label. A counter is raised by it with every record, so
            it holds what came since the one before. None, NaN and infinity leave it as it was. A
            field of MemoryStats has the label "memory".
    """

    role: Role
    kind: Kind
    name: str
    unit: str
    help: str
    look: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    field: str = ""

    @property
    def full_name(self) -> str:
        """The name as it is exported."""
        return PREFIX + self.name
