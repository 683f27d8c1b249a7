"""The batch of samples that every stage from the journal to the memory uses, and its offset.

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
    """The journal offset of the next sample to read.

    Args:
        record: the journal record, counted from 1.
        sample: the sample within the record, counted from 0.

    Raises:
        ValueError: `record` is below 1 or `sample` is below 0.
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
    """The origin of a sample in readable form; the learner itself uses 63-bit ids."""

    producer: str
    source: str
    id: str
    time: float  # of capture, seconds since the Unix epoch
    original: str | None = None  # name of the bytes as they were sent; None: not kept

    def known(self) -> dict[str, Any]:
        """Return the fields by name, without an `original` that is not kept."""
        return {name: value for name, value in self._asdict().items() if value is not None}

    def row(self) -> tuple[object, ...]:
        """Return the fields as a tuple for `Origin(*row)`, without an `original` that is None."""
        return tuple(self) if self.original is not None else tuple(self[:-1])


@dataclass(frozen=True, slots=True, eq=False)
class Batch(Generic[Array]):
    """A batch of samples, one sample in each row of every column.

    The decoder creates the columns as numpy arrays. The learner converts them to tensors on its
    device. The learning methods read the tensors, and `memory.WorkingMemory.add` stores them.

    Attributes:
        ids_B: int64, 63-bit hashes of source and id, >= 0. A sample that is sent twice keeps its
            number.
        hashes_B: int64, 63-bit hashes of the pixels, > 0. Equal pixels have equal hashes. 0 means
            unknown.
        labels_B: int64, the class, or -1 if the stream carries no label.
        images_BCHW: uint8 pixels.
        received_B: float64, the time when the receiver accepted the sample, in seconds since the
            Unix epoch.
        origins_B: the origin of each sample; None for samples that were drawn from the memory.
        slots_B: int64, the memory slots that the samples were drawn from; None if the samples
            were not drawn from the memory.
        offset: the first sample after this batch. `Batches(start=offset)` resumes there.
        rejected: the number of samples rejected since the previous batch, by reason.
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
        """Return the number of samples, B."""
        ids_B: Any = self.ids_B
        return len(ids_B)

    def __getitem__(self, rows: Any) -> Batch[Array]:
        """Return a batch of the selected rows, with the same `offset` and `rejected`.

        Args:
            rows: a slice, or a tensor of indices on the host. Reading indices from a device would
                block until the device has finished.
        """
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
        """Return the columns that the batch has, by name, without `slots_B` and `origins_B`."""
        found = {name: getattr(self, name) for name in COLUMNS}
        return {name: column for name, column in found.items() if column is not None}

    @property
    def producers_B(self) -> list[str | None] | None:
        """The name of each sample's producer, None if unknown; None if no origin is known."""
        if self.origins_B is None:
            return None
        return [origin and (origin.producer or None) for origin in self.origins_B]
