"""A batch on the device that learns from it.

Shapes: B samples, C channels, H height, W width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from memory.compute import to_device

if TYPE_CHECKING:
    from memory import WorkingMemory
    from stream_ssl.ingest.batches import Batch


class Inputs(NamedTuple):
    """uint8 images [B, C, H, W] and what is known of each sample, int64 [B]."""

    image_BCHW: Tensor
    ids_B: Tensor
    labels_B: Tensor  # -1: none
    hashes_B: Tensor  # 0: none
    slots_B: Tensor | None = None  # of the memory they were drawn from
    host_labels_B: Tensor | None = None  # the same labels on the CPU, where they came from there

    @classmethod
    def of_memory(
        cls,
        memory: WorkingMemory,
        count: int,
        device: torch.device,
        how: Literal["uniform", "inverse-count"] = "uniform",
    ) -> Inputs:
        """At most `count` samples of the memory, each at most once, as `WorkingMemory.sample`."""
        count = min(count, len(memory))
        draw = memory.sample(count, how=how)
        slots, image_BCHW, ids_B = draw.slots, draw.images, draw.ids
        assert image_BCHW is not None, "only a memory that keeps images is drawn from"
        if _repeats(memory, slots):
            slots = torch.unique(slots)
            image_BCHW, ids_B = memory.images_of(slots), memory.ids[slots]
        return cls(
            image_BCHW.to(device),
            ids_B.to(device),
            memory.labels[slots].to(device),
            memory.hashes[slots].to(device),
            slots,
        )

    def of(self, rows: Tensor) -> Inputs:
        """These samples of the batch, by int64 on the CPU; slots are left out."""
        rows = to_device(rows, self.ids_B.device)
        return Inputs(*(column[rows] for column in self._columns))

    def joined(self, other: Inputs) -> Inputs:
        """Both, one after the other; slots are left out."""
        pairs = zip(self._columns, other._columns, strict=True)
        return Inputs(*(torch.cat(pair) for pair in pairs))

    @property
    def _columns(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.image_BCHW, self.ids_B, self.labels_B, self.hashes_B

    def __len__(self) -> int:
        return len(self.ids_B)


def _repeats(memory: WorkingMemory, slots: Tensor) -> bool:
    """Whether a slot was drawn twice: the memory does so where it has lost most of its images."""
    if slots.device.type == "cpu":
        return len(torch.unique(slots)) < len(slots)
    # To look at the slots would wait for a GPU; how many could be drawn is known without.
    return len(memory.stalest(len(slots))) < len(slots)


class Upload:
    """Brings fresh batches to the device.

    To a GPU they go through pinned memory, from which the host need not wait for a copy. There are
    two sets of buffers, made once and used in turn: one is filled while the other may still be
    copied from, and none before its last copy is done.

    Args:
        device: where batches are wanted.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._now, self._next = _Pinned(), _Pinned()

    def __call__(self, batch: Batch) -> Inputs:
        """The batch there; the copies to a GPU overlap with what it still computes."""
        arrays = batch.image_BHWC, batch.key_B, batch.label_B, batch.hash_B
        given = [torch.from_numpy(array) for array in arrays]
        if self._device.type == "cuda":
            self._now, self._next = self._next, self._now
            moved = self._now.upload(given, self._device)
        else:
            moved = [column.to(self._device) for column in given]
        image_BHWC, ids_B, labels_B, hashes_B = moved
        images = image_BHWC.permute(0, 3, 1, 2)
        return Inputs(images, ids_B, labels_B, hashes_B, host_labels_B=given[2])


class _Pinned:
    """One set of buffers, and the moment when they were last copied from."""

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []
        self._copied: torch.cuda.Event | None = None

    def upload(self, columns: list[Tensor], device: torch.device) -> list[Tensor]:
        if self._copied is None:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        else:
            self._copied.synchronize()
        if [buffer.shape for buffer in self._buffers] != [column.shape for column in columns]:
            self._buffers = [torch.empty_like(column, pin_memory=True) for column in columns]
        for buffer, column in zip(self._buffers, columns, strict=True):
            buffer.copy_(column)
        moved = [to_device(buffer, device) for buffer in self._buffers]
        self._copied.record(torch.cuda.current_stream(device))
        return moved
