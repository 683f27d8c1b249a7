"""The type of a catalogue entry, which describes one metric."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PREFIX = "stream_ssl_"
Role = Literal["receiver", "learner", "both"]
ROLES: tuple[Role, ...] = ("receiver", "learner")
"""The roles of a run's processes. A metric or a condition can be of both."""
Kind = Literal["counter", "gauge", "histogram", "info"]


def role_of(name: str) -> str:
    """Return the role of a process from its name, such as "receiver" from "receiver-1"."""
    return name.partition("-")[0]


@dataclass(frozen=True, slots=True)
class Spec:
    """The description of one metric.

    Attributes:
        name: the name without prefix. It ends in `_total` for a counter, in `_info` for an info.
        unit: the unit of the value. OpenMetrics shows it if the name ends in the unit.
        help: one sentence that is exported with the metric.
        look: what an operator should look for.
        buckets: the upper bounds of a histogram.
        field: the attribute that fills the metric, such as "StepRecord.batch". The receiver
            has ReceiverRecord. The learner has StepRecord, CheckpointRecord, HeldOutRecord and
            MemoryStats; fields of MemoryStats have the label "memory". A mapping holds one value
            for each value of the label. A counter adds the value of each record. A gauge is set,
            and a histogram observes the value. None, NaN and infinity leave the metric unchanged.
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
        """The exported name, with prefix."""
        return PREFIX + self.name
