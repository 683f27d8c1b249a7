"""A batch of samples, from the journal to the memory, and the journal offset behind it.

Shapes: B samples, C channels, H height, W width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, NamedTuple, TypeVar

Array = TypeVar("Array")

COLUMNS = ("ids_B", "hashes_B", "labels_B", "images_BCHW", "received_B")


@dataclass(frozen=True, slots=True, order=True)
class Offset:
    """The next sample to read: `sample` counts from 0 within journal record `record`, from 1.

    Raises:
        ValueError: a number below these.
    """

    record: int
    sample: int

    def __post_init__(self) -> None:
        if self.record < 1 or self.sample < 0:
            raise ValueError(
                f"offset ({self.record}, {self.sample}): records count from 1, samples from 0; "
                "the journal begins at (1, 0)"
            )


START = Offset(1, 0)


class Origin(NamedTuple):
    """Who sent a sample, and as what: for people, who cannot read 63-bit ids."""

    producer: str
    source: str
    id: str
    time: float  # of capture, seconds since the Unix epoch


@dataclass(frozen=True, slots=True, eq=False)
class Batch(Generic[Array]):
    """Samples, one in each row of every column.

    The columns are numpy arrays from decoding to the learner, which makes them tensors of its
    device; methods read these, and they go into the memory (`memory.WorkingMemory.add`).

    Attributes:
        ids_B: int64, a 63-bit number of source and id, >= 0: equal for two sendings of one sample.
        hashes_B: int64, a 63-bit number of the pixels, > 0: equal for equal pixels; 0: unknown.
        labels_B: int64, the class; -1 where the stream carries none.
        images_BCHW: uint8 pixels.
        received_B: float64, when the receiver took it, seconds since the Unix epoch.
        origins_B: where each came from; None for samples that the memory gave.
        slots_B: int64, the slots of the memory that the samples were drawn from; None: none were.
        offset: the first sample after this batch; Batches(start=offset) goes on from there.
        rejected: samples left out since the batch before, by reason.
    """

    ids_B: Array = field(repr=False)
    hashes_B: Array | None = field(default=None, repr=False)
    labels_B: Array | None = field(default=None, repr=False)
    images_BCHW: Array | None = field(default=None, repr=False)
    received_B: Array | None = field(default=None, repr=False)
    origins_B: Sequence[Origin | None] | None = field(default=None, repr=False)
    slots_B: Array | None = field(default=None, repr=False)
    offset: Offset = START
    rejected: Mapping[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        """B"""
        ids_B: Any = self.ids_B
        return len(ids_B)

    def __getitem__(self, rows: Any) -> Batch[Array]:
        """The chosen samples: a slice, or a tensor of indices on the host, for to read those of a
        device would wait for it; offset and rejected stay."""
        columns: dict[str, Any] = self.columns()
        if self.slots_B is not None:
            columns["slots_B"] = self.slots_B
        origins_B = self.origins_B
        if isinstance(rows, slice):
            origins_B = origins_B and origins_B[rows]
        else:
            origins_B = origins_B and [origins_B[row] for row in rows.tolist()]
            rows = rows.to(columns["ids_B"].device, non_blocking=True)
        chosen = {name: column[rows] for name, column in columns.items()}
        return replace(self, origins_B=origins_B, **chosen)

    def columns(self) -> dict[str, Array]:
        """The columns of samples that the batch has, by name; neither slots nor origins."""
        found = {name: getattr(self, name) for name in COLUMNS}
        return {name: column for name, column in found.items() if column is not None}
